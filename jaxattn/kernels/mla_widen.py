"""The warpgroups of `mla_decode_columns` that bring an FP8 cache's pages to the others.

Producer t widens the pages that consumer t takes, into the one page of 16 bits that consumer t has:

    cache --TMA--> ring of [64 tokens, 128 bytes] --registers--> page --> consumer

The ring runs ahead over pages, pieces and rows, as far as it holds. A page is handed over in
`STEPS` steps, its rope columns and then block after block of 128 dims, and comes back the same
way: the next page's first block is written while the values of the last one's others are used.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.mla_body import copies_of
from jaxattn.kernels.mla_latents import BLOCKS, FIRST_SCALE, SCALE_BYTES, STEPS, Latents
from jaxattn.kernels.mla_part import WARPGROUPS, Part
from jaxattn.kernels.mla_schedule import PAGE
from jaxattn.mla_cache import BLOCK, BYTES

SHARED_MEMORY = 227 * 1024  # bytes of a block
BARRIERS = 1024  # of them


def allocated(memory: Any) -> int:
    """Bytes that shared memory of that shape and dtype takes."""
    nbytes = math.prod(memory.shape) * jnp.dtype(memory.dtype).itemsize
    return -(-nbytes // 1024) * 1024


def ring_types(cache_dtype: Any, page_size: int, used: int) -> list[Any]:
    """`Ring`, as deep as there is room beside the `used` bytes of the consumers, and `HandOver`."""
    left = SHARED_MEMORY - BARRIERS - used
    copies = copies_of(page_size)
    scales = None
    if cache_dtype == BYTES:
        scales = plgpu.SMEM((WARPGROUPS, PAGE, SCALE_BYTES), BYTES)
        left -= allocated(scales)
    slots = plgpu.SMEM((WARPGROUPS, 1, PAGE, BLOCK), cache_dtype)
    depth = min(STEPS, left // allocated(slots))
    return [
        Ring(
            numbers=plgpu.SMEM((WARPGROUPS, depth, PAGE, BLOCK), cache_dtype),
            loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=(WARPGROUPS, depth)),
            scales=scales,
            scales_loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=WARPGROUPS),
        ),
        HandOver(
            written=plgpu.Barrier(num_barriers=(WARPGROUPS, STEPS)),
            read=plgpu.Barrier(num_barriers=(WARPGROUPS, STEPS)),
            piece_done=plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
        ),
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """What TMA has brought: 128 bytes of each token a slot, and a page's scales."""

    numbers: Any
    loaded: Any
    scales: Any
    scales_loaded: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HandOver:
    """Who may use a page: each step of it `written` by the producer, `read` by the consumer; and
    all four at the end of a piece, whose outputs take the pages' place for a while."""

    written: Any
    read: Any
    piece_done: Any


def produce(
    part: Part, turn: jax.Array, ring: Ring, hands: HandOver, kv: Any, rope: Any, *, interpret: bool
) -> None:
    """What producer `turn` does, all of its pages.

    Args:
        kv: the consumer's page, its R columns [64, R]; `rope` its others [64, P].
    """
    depth, tokens = ring.numbers.shape[1], min(part.page_size, PAGE)
    latents = Latents(part.kv_ref.dtype, interpret)

    def load(step: int, page: jax.Array, numbers: Any, slot: jax.Array | int) -> None:
        for j, source in enumerate(part.sources(numbers, page)):
            to = ring.numbers.at[turn, slot, pl.ds(j * tokens, tokens)]
            some = source.at[:, latents.columns(step)]
            plgpu.copy_gmem_to_smem(some, to, ring.loaded.at[turn, slot])

    def load_scales(page: jax.Array, numbers: list[jax.Array]) -> None:
        for j, source in enumerate(part.sources(numbers, page)):
            to = ring.scales.at[turn, pl.ds(j * tokens, tokens)]
            some = source.at[:, pl.ds(FIRST_SCALE, SCALE_BYTES)]
            plgpu.copy_gmem_to_smem(some, to, ring.scales_loaded.at[turn])

    def each_page(i, carry):
        pages_before, (row, page, stop, start), numbers = carry
        later = part.following((row, page, stop, start), turn)
        numbers_later = part.numbers(*later[:3])
        is_later = later[1] < later[2]

        def take(step: int, slot: jax.Array) -> None:
            """The slot, which all four warps have read, is loaded again."""
            ahead = step + depth
            if ahead < STEPS:
                load(ahead, page, numbers, slot)
            else:
                pl.when(is_later)(lambda: load(ahead - STEPS, later[1], numbers_later, slot))

        def wait_for_room(step: int) -> None:
            @pl.when(pages_before > 0)
            def _():
                plgpu.barrier_wait(hands.read.at[turn, step])

        def hand_over(step: int) -> None:
            plgpu.commit_smem()
            plgpu.barrier_arrive(hands.written.at[turn, step])

        def slot_of(step: int) -> jax.Array:
            slot = lax.rem(pages_before * STEPS + step, depth)
            plgpu.barrier_wait(ring.loaded.at[turn, slot])
            return slot

        slot = slot_of(0)
        some = latents.read_rope(ring.numbers.at[turn, slot])
        scales = jnp.int32(0)
        if latents.scaled:
            plgpu.barrier_wait(ring.scales_loaded.at[turn])
            scales = latents.read_scales(ring.scales.at[turn])
        wait_for_room(0)
        rope[...] = latents.widen_rope(some)
        hand_over(0)
        take(0, slot)
        if latents.scaled:
            pl.when(is_later)(lambda: load_scales(later[1], numbers_later))

        for block in range(BLOCKS):
            slot = slot_of(1 + block)
            some = latents.read(ring.numbers.at[turn, slot])
            # Only then widened: it takes twice the registers.
            wait_for_room(1 + block)
            kv[:, pl.ds(block * BLOCK, BLOCK)] = latents.widen(some, block, scales)
            hand_over(1 + block)
            take(1 + block, slot)
        return pages_before + 1, later, numbers_later

    def piece(row, start, steps, carry):
        del row, start
        mine = lax.div(steps + (WARPGROUPS - 1) - turn, WARPGROUPS)
        carry = lax.fori_loop(0, mine, each_page, carry)
        plgpu.barrier_arrive(hands.piece_done)
        plgpu.barrier_wait(hands.piece_done)
        return carry

    first = part.first(turn)
    numbers = part.numbers(*first[:3])

    @pl.when(first[1] < first[2])
    def _begin():
        if latents.scaled:
            load_scales(first[1], numbers)
        for step in range(depth):
            load(step, first[1], numbers, step)

    pages = part.each_piece(piece, (jnp.int32(0), first, numbers))[0]

    @pl.when(pages > 0)
    def _end():
        for step in range(STEPS):
            plgpu.barrier_wait(hands.read.at[turn, step])
