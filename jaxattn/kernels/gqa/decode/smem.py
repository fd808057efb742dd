"""Shared memory of a `gqa_decode` CTA, and the number of columns of its products."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import FP8
from jaxattn.kernels.attention.packed_row_layouts import MARGIN
from jaxattn.kernels.attention.split_kv_schedule import PAGE, copies_of
from jaxattn.kernels.gqa.decode.fp8_register_operands import tiles_of
from jaxattn.kernels.hopper.device import RESERVED_BYTES, SHARED_BYTES, shared_bytes
from jaxattn.kernels.hopper.instructions import swizzled

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
PAGE_SIZES = (16, 32, 64, 128)
QUERIES = 2  # pieces whose queries are in shared memory
ACROSS = 8  # columns of a product come in multiples of eight
# Dims of K and V, and the most columns for which shared memory has room for a step of each
# warpgroup in addition to the exchange.
MOST_COLUMNS = {64: 64, 128: 64, 256: 24}
# Stages of a warpgroup's keys, and of its values: 64 KB in flight per multiprocessor hide the
# memory's latency, and these stages have at least twice that.
MOST_STEPS = {64: (5, 5), 128: (3, 3), 256: (1, 2)}
MOST_FP8_STEPS = {64: (8, 8), 128: (6, 6), 256: (3, 3)}
# Rows of so few steps, such as a window's, are bound by latency, not bandwidth. Two CTAs then share
# a multiprocessor if their registers allow it, with STEPS_OF_FEW stages each.
FEW_STEPS, STEPS_OF_FEW, BLOCKS_OF_FEW = 4, 2, 2
# Three warpgroups have 168 registers each, or 56, 224 and 224. The producer gives some away if
# outputs, with this many numbers [D, N], and descriptors of the products' tiles need many.
MANY_NUMBERS, REGISTERS_OF_MANY = 2048, (56, 224)
REGISTERS_OF_FOUR = (56, 144)  # for four warpgroups, which have 128 each
BARRIER_BYTES = 1024  # an upper bound on the barriers' bytes


def refusal(dtype: Any, cache_dtype: Any, head_dim: int, page_size: int) -> str | None:
    """Returns what the kernel requires instead of these arguments; None if it accepts them."""
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    if dtype not in DTYPES:
        return f"q in bfloat16 or float16, got {dtype.name}"
    if cache_dtype not in (dtype, FP8):
        return f"a cache in {FP8.name} or in the dtype of q, {dtype.name}, got {cache_dtype.name}"
    if head_dim not in MOST_COLUMNS:
        return f"head_dim 64, 128 or 256, got {head_dim}"
    if page_size not in PAGE_SIZES:
        return f"pages of 16, 32, 64 or 128 tokens, got {page_size}"
    return None


def block_columns(rows: int, head_dim: int) -> tuple[int, int]:
    """Returns (packed rows of a CTA, a multiple of 8; CTAs that share a pair's rows)."""
    tiles = -(-rows // MOST_COLUMNS.get(head_dim, ACROSS))
    return -(-rows // (ACROSS * tiles)) * ACROSS, tiles


def product_dtype(dtype: Any, cache_dtype: Any) -> Any:
    """Returns the dtype of queries and P as operands: q's dtype, or the one to which e4m3 numbers
    are widened."""
    return jnp.dtype(jnp.float16) if cache_dtype == FP8 else jnp.dtype(dtype)


@dataclasses.dataclass(frozen=True)
class GqaCtaResources:
    """The division of a CTA's shared memory and registers.

    Attributes:
        consumers: w, the consumer warpgroups, which take a part's steps in turns; one more loads.
        ahead: Stages per consumer: of keys, and of values, which are freed later.
        registers: Registers per thread of the producer, and of each consumer; None: all warpgroups
            keep what they have.
    """

    consumers: int
    ahead: tuple[int, int]
    registers: tuple[int, int] | None


def ctas_per_sm(columns: int, head_dim: int, steps: int) -> int:
    """Returns the CTAs per multiprocessor, for rows of up to `steps` steps; 0 steps: unknown."""
    few = head_dim == 64 and columns == ACROSS and 0 < steps <= FEW_STEPS
    return BLOCKS_OF_FEW if few else 1


def cta_resources(columns: int, head_dim: int, cache_dtype: Any, steps: int) -> GqaCtaResources:
    """Returns the resources of CTAs for `columns` packed rows, of up to `steps` steps.

    A step with few bytes takes a warpgroup longer than two warpgroups have time for: then there are
    three.
    """
    fp8, together = cache_dtype == FP8, ctas_per_sm(columns, head_dim, steps)
    few_bytes = head_dim * jnp.dtype(cache_dtype).itemsize <= 128
    consumers = 3 if few_bytes and columns == ACROSS and together == 1 else 2
    exchanged = consumers * columns * (PAGE + head_dim + 2 * MARGIN + 4 + 1) * 4
    operands = columns * (QUERIES * head_dim + consumers * PAGE) * 2
    free = SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES - exchanged - operands
    boxes = free // (consumers * PAGE * head_dim * jnp.dtype(cache_dtype).itemsize)
    keys, values = (MOST_FP8_STEPS if fp8 else MOST_STEPS)[head_dim]
    ahead = min(keys, boxes // 2), min(values, boxes - boxes // 2)
    if together > 1:
        return GqaCtaResources(consumers, (STEPS_OF_FEW, STEPS_OF_FEW), None)
    many = REGISTERS_OF_MANY if columns * head_dim >= MANY_NUMBERS else None
    registers = REGISTERS_OF_FOUR if consumers == 3 else many
    return _fitting(GqaCtaResources(consumers, ahead, registers), columns, head_dim, cache_dtype)


def _fitting(
    room: GqaCtaResources, columns: int, head_dim: int, cache_dtype: Any
) -> GqaCtaResources:
    """Returns the resources with one stage of values less if the alignment of arrays takes its
    place."""
    half = jnp.dtype(jnp.float16)  # the same width as the other dtypes of queries and P
    types = scratch_types(half, cache_dtype, columns, head_dim, PAGE, room)
    needed = shared_bytes(x for x in types if x is not None)
    keys, values = room.ahead
    if needed <= SHARED_BYTES - RESERVED_BYTES or values == 1:
        return room
    return _fitting(
        dataclasses.replace(room, ahead=(keys, values - 1)), columns, head_dim, cache_dtype
    )


class GqaDecodeSmem(NamedTuple):
    """A CTA's shared memory; w is a warpgroup, N its columns.

    Attributes:
        keys, values: [w, steps, 64, D], as TMA stores them, with the stages of
            `GqaCtaResources.ahead`.
        queries: [2, N, D], of this piece and the next.
        scores: float32 [w, N, 64 and a margin].
        p: [w, N, 64].
        outputs: float32 [w, N, D and a margin], at a piece's end.
        stats: float32 [3, w, N]: rescaling, and at a piece's end maxima and sums.
        factors: float32 [2, N], factors of the scores of a piece's queries; None without an FP8
            cache.
        keys_loaded, values_loaded, queries_loaded: Full barriers.
        keys_read, values_read, queries_read: Empty barriers: the buffer may be overwritten.
        consumer_barrier: The barrier of the consumer warpgroups.
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
    consumer_barrier: Any


def scratch_types(
    dtype: Any, cache_dtype: Any, columns: int, head_dim: int, page_size: int, room: GqaCtaResources
) -> GqaDecodeSmem:
    """Returns the scratch types of a `GqaDecodeSmem`; `dtype` is `product_dtype`."""
    tiles, consumers = swizzled(dtype), room.consumers
    of_keys, of_values = room.ahead
    of_cache = tiles_of(head_dim) if cache_dtype == FP8 else tiles

    def ring(steps: int) -> Any:
        return plgpu.SMEM((consumers, steps, PAGE, head_dim), cache_dtype, transforms=of_cache)

    def barriers(arrivals: int, steps: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=(consumers, steps))

    copies = copies_of(page_size)
    return GqaDecodeSmem(
        keys=ring(of_keys),
        values=ring(of_values),
        queries=plgpu.SMEM((QUERIES, columns, head_dim), dtype, transforms=tiles),
        scores=plgpu.SMEM((consumers, columns, PAGE + MARGIN), jnp.float32),
        p=plgpu.SMEM((consumers, columns, PAGE), dtype, transforms=tiles),
        outputs=plgpu.SMEM((consumers, columns, head_dim + MARGIN), jnp.float32),
        stats=plgpu.SMEM((3, consumers, columns), jnp.float32),
        factors=plgpu.SMEM((QUERIES, columns), jnp.float32) if cache_dtype == FP8 else None,
        keys_loaded=barriers(copies, of_keys),
        values_loaded=barriers(copies, of_values),
        queries_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=QUERIES),
        keys_read=barriers(1, of_keys),
        values_read=barriers(1, of_values),
        queries_read=plgpu.Barrier(num_arrivals=consumers, num_barriers=QUERIES),
        consumer_barrier=plgpu.Barrier(num_arrivals=consumers),
    )


def over_out(vector: jax.Array, rows: int) -> jax.Array:
    """Broadcasts a number of each packed row over `rows` dims of its output, [rows, N]."""
    wide = lax.broadcast_in_dim(vector, (rows, *vector.shape), [1])
    return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)
