"""From steps to executables: `shard_map`, `jax.export` and the cache of executables on disk."""
