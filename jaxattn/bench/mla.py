"""`python -m jaxattn.bench mla`: paged MLA decode, checked and timed shape by shape.

`us` is GPU time of the decode and combine kernels, from a profile: what a layer of a step takes,
whose schedule is made once. `call us` is a call's share of a loop of calls.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.bench.timing import ROTATE_BYTES, per_call, profile
from jaxattn.dispatch import Implementation

PAGE, DIM, RANK = 64, 576, 512
PROFILED = 10  # calls
SCALE = 192**-0.5
# B, H, T, S
SHAPES = (
    (128, 128, 4096, 1),
    (64, 128, 8192, 1),
    (16, 128, 8192, 1),
    (128, 64, 4096, 1),
    (128, 16, 4096, 1),
    (1, 128, 65536, 1),
    (1, 128, 8192, 1),
    (1, 16, 32768, 1),
    (64, 128, 4096, 2),
)
SMALL_SHAPES = ((2, 16, 256, 1), (1, 20, 130, 2))


def inputs(batch: int, heads: int, tokens: int, q_len: int, seed: int = 0) -> tuple[Any, ...]:
    """Normal data on shuffled pages, in as many layers as keep the caches out of L2."""
    pages = -(-tokens // PAGE)
    layers = max(1, min(32, ROTATE_BYTES // (batch * pages * PAGE * DIM * 2)))
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (batch, q_len, heads, DIM), jnp.bfloat16)
    cache = jax.random.normal(keys[1], (layers, batch * pages, PAGE, DIM), jnp.bfloat16)
    tables = jax.random.permutation(keys[2], batch * pages).reshape(batch, pages)
    return q, cache, tables.astype(jnp.int32), jnp.full((batch,), tokens, jnp.int32)


def worst_error(out: jax.Array, expected: jax.Array) -> float:
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))


def measure(shape: tuple[int, int, int, int], implementation: Implementation | None) -> dict:
    batch, heads, tokens, q_len = shape
    q, cache, tables, lens = inputs(*shape)
    layers = cache.shape[0]
    decode: Any = functools.partial(mla.mla_decode, scale=SCALE, implementation=implementation)

    # The check takes the rows that a float32 reference of this length can hold.
    rows = max(1, min(batch, 2**20 // tokens))
    few = (q[:rows], cache, tables[:rows], lens[:rows])
    expected, _ = jax.jit(functools.partial(mla.mla_decode, scale=SCALE, implementation="xla"))(
        *few, layer=layers - 1
    )
    out, _ = jax.jit(decode)(q, cache, tables, lens, layer=layers - 1)
    error = worst_error(out[:rows], expected)
    if not error < 4e-3:
        raise AssertionError(f"mla {shape}: relative error {error} against the reference")

    # The arena goes from call to call, as in a step.
    spec = mla.scratch(batch=batch, q_len=q_len, num_heads=heads, max_pages=tables.shape[1])

    schedule = jax.jit(
        functools.partial(
            mla.decode_schedule, q_len=q_len, num_heads=heads, max_pages=tables.shape[1]
        )
    )(lens)

    kernels = _kernel_time(decode, (q, cache, tables, lens), layers, schedule)

    # Arrays that a loop closes over would be compiled into it.
    def call(carry, i):
        arena, (q, cache, tables, lens), schedule = carry
        out, _, arena = decode(
            q, cache, tables, lens, layer=i % layers, schedule=schedule, arena=arena
        )
        if implementation == "xla":
            # XLA would drop an output that the next call overwrites; a kernel is opaque to it.
            lens = jnp.where(jnp.isnan(out[0, 0, 0, 0]), 0, lens)
        return arena, (q, cache, tables, lens), schedule

    time = per_call(call, (Arena.allocate(spec), (q, cache, tables, lens), schedule))
    counted = kernels or time
    flops = 2 * batch * heads * q_len * tokens * (DIM + RANK)
    moved = batch * tokens * DIM * 2 + batch * heads * q_len * (DIM + RANK) * 2
    return {
        "B,H,T,S": ",".join(map(str, shape)),
        "us": counted * 1e6,
        "call us": time * 1e6,
        "TFLOP/s": flops / counted / 1e12,
        "GB/s": moved / counted / 1e9,
        "relative error": error,
    }


def _kernel_time(decode: Any, arrays: tuple[Any, ...], layers: int, schedule: Any) -> float:
    """Seconds of the kernels of a call; 0 where none ran."""
    step = jax.jit(decode)

    def run():
        return [step(*arrays, layer=i % layers, schedule=schedule)[0] for i in range(PROFILED)][-1]

    jax.block_until_ready(run())
    spent, _ = profile(run)
    return sum(time for name, time in spent.items() if "mla_decode" in name) / PROFILED
