"""Shared memory of a `turbo_decode` CTA, and the division of its threads."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant.codec import E4M3, TurboFormat
from jaxattn.core.turboquant.slot_layout import GROUP
from jaxattn.kernels.attention.packed_row_layouts import MARGIN
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.gqa.decode.smem import BARRIER_BYTES, QUERIES
from jaxattn.kernels.hopper.device import RESERVED_BYTES, SHARED_BYTES
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.turboquant.cache.lut_dequantization import GROUPS

TERMS = 2  # e4m3 numbers that make up one of a query's, or of P's
ROW = 32  # bytes; the unit of copies of 16 tokens, as LINE is that of 64
ALIGNED = 1024  # bytes to which Mosaic aligns an array in shared memory
LINE = 128  # bytes; copies and their destinations in shared memory are multiples of it
# Warpgroups that take a part's steps in turns, where there is room for two steps of each, and the
# registers of the producer and of each consumer. With up to FEW numbers of queries there are
# registers for two steps at a time.
MOST_CONSUMERS, LEAST_CONSUMERS, FEW = 3, 2, 1024
REGISTERS = {4: (32, 112), 3: (40, 152), 2: (40, 232)}
# Presets whose steps four warpgroups process faster one by one.
ONE_BY_ONE = ("k3v4_nc",)
MOST_STEPS = 6  # of a warpgroup, in shared memory or in flight


@dataclasses.dataclass(frozen=True)
class TurboCtaResources:
    """The division of a CTA's shared memory.

    Attributes:
        consumers: w, the consumer warpgroups; one more loads.
        steps: Stages of each of them.
        pitch: Bytes from a group of 16 tokens to the next.
        together: Steps that a warpgroup takes at a time.
    """

    consumers: int
    steps: int
    pitch: int
    together: int


def whole_steps(page_size: int) -> bool:
    """Whether a page has all tokens of a step, so that one copy loads them."""
    return page_size >= PAGE


def turbo_cta_resources(form: TurboFormat, columns: int, page_size: int) -> TurboCtaResources:
    """Returns the division of a CTA's memory for `columns` packed rows."""
    pitch = GROUP * form.slot_bytes
    if not whole_steps(page_size):  # each group is a copy, some bytes longer than it
        pitch = -(-pitch // LINE) * LINE
    free = SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES
    few = columns * form.head_dim <= FEW
    four = few and form.preset in ONE_BY_ONE
    together = 2 if few and not four else 1
    for consumers in range(4 if four else MOST_CONSUMERS, LEAST_CONSUMERS - 1, -1):
        for steps in range(MOST_STEPS, 1, -1):
            room = TurboCtaResources(consumers, steps, pitch, together)
            if bytes_of(form, columns, room) <= free:
                return room
    return TurboCtaResources(LEAST_CONSUMERS, 1, pitch, 1)


def summed_dims(form: TurboFormat) -> int:
    """Returns the dims of a score whose products the tensor cores add up before they are added in
    float32.

    These sums have 14 bits, counted from the largest product or sum. With keys of 8 bits they lose
    more than the 1e-2 that is allowed, if values cancel. Keys of fewer bits are near that limit,
    and every instruction counts.
    """
    return form.head_dim if form.rotated else PAGE


def bytes_of(form: TurboFormat, columns: int, room: TurboCtaResources) -> int:
    """Returns the bytes of all arrays of `TurboDecodeSmem`, each of which begins at a multiple of
    ALIGNED."""
    w, dim = room.consumers, form.head_dim
    sizes = (
        w * room.steps * GROUPS * room.pitch,  # codes
        QUERIES * TERMS * columns * dim,
        QUERIES * columns * 4,  # factors
        w * room.together * columns * (PAGE + MARGIN) * 4,  # scores
        w * room.together * TERMS * columns * PAGE,  # p
        w * columns * (dim + MARGIN) * 4,  # outputs
        3 * w * columns * 4,  # stats
        3 * w * columns * 4,  # units
    )
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


def step_shape(room: TurboCtaResources, page_size: int) -> tuple[int, ...]:
    """Returns the shape of the bytes of a step's codes: those of one copy, or of one copy per
    group."""
    if whole_steps(page_size):
        return (GROUPS * room.pitch // LINE, LINE)
    return (GROUPS, room.pitch // ROW, ROW)


def coded_view(
    kv_cache: jax.Array, form: TurboFormat, page_size: int, *, interpret: bool
) -> jax.Array:
    """Returns a cache [L, N, Hk, bytes] in the form of the copies: [L, N Hk, C / 64, lines, 128],
    or for pages of fewer than 64 tokens rows of bytes [L, all of them, 32].

    A copy of the latter is some rows longer than its data, and reads past the last page: TMA gives
    zeros there, and the interpreter has some more rows.
    """
    layers = kv_cache.shape[0]
    if whole_steps(page_size):
        return kv_cache.reshape(layers, -1, page_size // PAGE, PAGE * form.slot_bytes // LINE, LINE)
    rows = kv_cache.reshape(layers, -1, ROW)
    return jnp.pad(rows, ((0, 0), (0, LINE // ROW), (0, 0))) if interpret else rows


class TurboDecodeSmem(NamedTuple):
    """A CTA's shared memory; w is a warpgroup, N its columns.

    Attributes:
        codes: uint8 [w, steps, *`step_shape`], as TMA stores them.
        queries: e4m3 [2, 2 N, D], both terms, of this piece and the next.
        factors: float32 [2, N], the factors of their scores.
        scores: float32 [w, N, 64 and a margin]; a second step taken together follows all w.
        p: e4m3 [w, 2 N, 64], both terms; a second step follows in the same way.
        outputs: float32 [w, N, D and a margin], at a piece's end.
        stats: float32 [3, w, N]: rescaling, and at a piece's end maxima and sums.
        units: float32 [3, w, N]: the values that 1 stands for in P, of a step and the one before
            it; and at a piece's end the minima's share.
        codes_loaded, queries_loaded: Full barriers.
        codes_read, queries_read: Empty barriers: the buffer may be overwritten.
        consumer_barrier: The barrier of the consumer warpgroups.
    """

    codes: Any
    queries: Any
    factors: Any
    scores: Any
    p: Any
    outputs: Any
    stats: Any
    units: Any
    codes_loaded: Any
    queries_loaded: Any
    codes_read: Any
    queries_read: Any
    consumer_barrier: Any


def scratch_types(
    form: TurboFormat, columns: int, page_size: int, room: TurboCtaResources
) -> TurboDecodeSmem:
    """Returns the scratch types of a `TurboDecodeSmem`."""
    dim, w, terms = form.head_dim, room.consumers, TERMS * columns
    together, width = w * room.together, min(summed_dims(form), 128)

    def barriers(arrivals: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=(w, room.steps))

    return TurboDecodeSmem(
        codes=plgpu.SMEM((w, room.steps, *step_shape(room, page_size)), jnp.uint8),
        queries=plgpu.SMEM((QUERIES, terms, dim), E4M3, transforms=swizzled(E4M3, width)),
        factors=plgpu.SMEM((QUERIES, columns), jnp.float32),
        scores=plgpu.SMEM((together, columns, PAGE + MARGIN), jnp.float32),
        p=plgpu.SMEM((together, terms, PAGE), E4M3, transforms=swizzled(E4M3, PAGE)),
        outputs=plgpu.SMEM((w, columns, dim + MARGIN), jnp.float32),
        stats=plgpu.SMEM((3, w, columns), jnp.float32),
        units=plgpu.SMEM((3, w, columns), jnp.float32),
        codes_loaded=barriers(1 if whole_steps(page_size) else GROUPS),
        queries_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=QUERIES),
        codes_read=barriers(1),
        queries_read=plgpu.Barrier(num_arrivals=w, num_barriers=QUERIES),
        consumer_barrier=plgpu.Barrier(num_arrivals=w),
    )
