"""What a block of `gqa_decode` keeps in shared memory, and how many columns its products have."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.formats import FP8
from jaxattn.kernels.gqa_decode.fp8 import tiles_of
from jaxattn.kernels.hopper.machine import RESERVED_BYTES, SHARED_BYTES, swizzled
from jaxattn.kernels.mla_decode.columns_memory import MARGIN
from jaxattn.kernels.mla_decode.schedule import PAGE, copies_of

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
PAGE_SIZES = (16, 32, 64, 128)
CONSUMERS = 2  # warpgroups that take a part's steps in turns; one more loads
QUERIES = 2  # pieces whose queries are in shared memory
ACROSS = 8  # columns of a product come in eights
# Dims of K and V, and the most columns for which shared memory has room for a step of each
# warpgroup beside what they exchange.
MOST_COLUMNS = {64: 64, 128: 64, 256: 24}
# Steps of a warpgroup whose keys, and whose values, are in shared memory or on their way there:
# 64 KB of a multiprocessor hide the memory's latency, and so many are twice that and more.
MOST_STEPS = {64: (5, 5), 128: (3, 3), 256: (1, 2)}
MOST_FP8_STEPS = {64: (8, 8), 128: (6, 6), 256: (3, 3)}
BARRIER_BYTES = 1024  # more than the barriers take


def refusal(dtype: Any, cache_dtype: Any, head_dim: int, page_size: int) -> str | None:
    """What the kernel wants in the place of these; None where it takes them."""
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    if dtype not in DTYPES:
        return f"q of bfloat16 or float16, and got {dtype.name}"
    if cache_dtype not in (dtype, FP8):
        return (
            f"a cache of {FP8.name} or of the dtype of q, {dtype.name}, and got {cache_dtype.name}"
        )
    if head_dim not in MOST_COLUMNS:
        return f"head_dim 64, 128 or 256, and got {head_dim}"
    if page_size not in PAGE_SIZES:
        return f"pages of 16, 32, 64 or 128 tokens, and got {page_size}"
    return None


def block_columns(rows: int, head_dim: int) -> tuple[int, int]:
    """(packed rows of a block, a multiple of 8; blocks that share a pair's rows)."""
    tiles = -(-rows // MOST_COLUMNS.get(head_dim, ACROSS))
    return -(-rows // (ACROSS * tiles)) * ACROSS, tiles


def product_dtype(dtype: Any, cache_dtype: Any) -> Any:
    """What queries and P are as operands: q's dtype, or what e4m3 numbers are widened to."""
    return jnp.dtype(jnp.float16) if cache_dtype == FP8 else jnp.dtype(dtype)


def steps_ahead(columns: int, head_dim: int, cache_dtype: Any) -> tuple[int, int]:
    """Steps of each warpgroup that there is room for, of keys and of values, whose place is free
    again later."""
    exchanged = CONSUMERS * columns * (PAGE + head_dim + 2 * MARGIN + 4 + 1) * 4
    operands = columns * (QUERIES * head_dim + CONSUMERS * PAGE) * 2
    free = SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES - exchanged - operands
    boxes = free // (CONSUMERS * PAGE * head_dim * cache_dtype.itemsize)
    keys, values = (MOST_FP8_STEPS if cache_dtype == FP8 else MOST_STEPS)[head_dim]
    return min(keys, boxes // 2), min(values, boxes - boxes // 2)


class Memory(NamedTuple):
    """A block's shared memory; w is a warpgroup, N its columns.

    Attributes:
        keys, values: [w, steps, 64, D], as they come, of `steps_ahead`.
        queries: [2, N, D], of this piece and the next.
        scores: float32 [w, N, 64 and a margin].
        p: [w, N, 64].
        outputs: float32 [w, N, D and a margin], at a piece's end.
        stats: float32 [3, w, N]: rescaling, and at a piece's end maxima and sums.
        factors: float32 [2, N], of the scores of a piece's queries; None without an FP8 cache.
        keys_loaded, values_loaded, queries_loaded: barriers of what has come.
        keys_read, values_read, queries_read: and of what may be overwritten.
        both_there: of the two warpgroups.
    """

    keys: Any
    values: Any
    queries: Any
    scores: Any
    p: Any
    outputs: Any
    stats: Any
    factors: Any
    keys_loaded: Any
    values_loaded: Any
    queries_loaded: Any
    keys_read: Any
    values_read: Any
    queries_read: Any
    both_there: Any


def scratch_types(
    dtype: Any, cache_dtype: Any, columns: int, head_dim: int, page_size: int
) -> Memory:
    """What `Memory` is made of; `dtype` is `product_dtype`."""
    tiles = swizzled(dtype)
    of_keys, of_values = steps_ahead(columns, head_dim, cache_dtype)
    of_cache = tiles_of(head_dim) if cache_dtype == FP8 else tiles

    def ring(steps: int) -> Any:
        return plgpu.SMEM((CONSUMERS, steps, PAGE, head_dim), cache_dtype, transforms=of_cache)

    def barriers(arrivals: int, steps: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=(CONSUMERS, steps))

    copies = copies_of(page_size)
    return Memory(
        keys=ring(of_keys),
        values=ring(of_values),
        queries=plgpu.SMEM((QUERIES, columns, head_dim), dtype, transforms=tiles),
        scores=plgpu.SMEM((CONSUMERS, columns, PAGE + MARGIN), jnp.float32),
        p=plgpu.SMEM((CONSUMERS, columns, PAGE), dtype, transforms=tiles),
        outputs=plgpu.SMEM((CONSUMERS, columns, head_dim + MARGIN), jnp.float32),
        stats=plgpu.SMEM((3, CONSUMERS, columns), jnp.float32),
        factors=plgpu.SMEM((QUERIES, columns), jnp.float32) if cache_dtype == FP8 else None,
        keys_loaded=barriers(copies, of_keys),
        values_loaded=barriers(copies, of_values),
        queries_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=QUERIES),
        keys_read=barriers(1, of_keys),
        values_read=barriers(1, of_values),
        queries_read=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=QUERIES),
        both_there=plgpu.Barrier(num_arrivals=CONSUMERS),
    )


def over_out(vector: jax.Array, rows: int) -> jax.Array:
    """Of each packed row, for so many dims of its output, [rows, N]."""
    wide = lax.broadcast_in_dim(vector, (rows, *vector.shape), [1])
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)
