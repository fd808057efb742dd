"""The prefill kernel as the ops of prefill.py call it: rows' bounds from their lengths."""

import functools

import jax
import jax.numpy as jnp

from jaxattn.kernels.gqa_prefill.launch import Paged, gqa_prefill_mosaic
from jaxattn.ops.gqa.scores import Scores


@functools.partial(jax.jit, static_argnames=("scores", "interpret"))
def prefill_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array | None,
    block_tables: jax.Array | None,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    sinks: jax.Array | None,
    gate: jax.Array | None,
    *,
    scores: Scores,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """`jaxattn.gqa.gqa_prefill`, or without a cache `gqa_attention`, by the kernel."""
    query_lens = jnp.where(seq_lens > 0, jnp.clip(query_lens, 0, q.shape[1]), 0)
    first = jnp.maximum(query_lens - seq_lens, 0)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    bounds = jnp.stack([first, query_lens, prefix, query_lens, 0 * first], axis=1)
    paged = None
    if kv_cache is not None:
        assert block_tables is not None
        cache = kv_cache if layer is not None else kv_cache[None]
        number = jnp.asarray(0 if layer is None else layer, jnp.int32)
        paged = Paged(cache=cache, table=block_tables, layer=number)
    return gqa_prefill_mosaic(
        q, k, v, bounds,
        scale=scores.scale, paged=paged, window=scores.window, sinks=sinks,
        soft_cap=scores.soft_cap, gate=gate, interpret=interpret,
    )  # fmt: skip
