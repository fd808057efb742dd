"""Benchmarks over several GPUs: collectives, layouts, context parallelism."""
