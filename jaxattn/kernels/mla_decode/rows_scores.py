"""The body of `mla_decode`: what its three warpgroups do, page by page.

    0    scores = Q K^T, softmax; P and the rescaling of the rows to shared memory
    1    left  = rescale left  + P K[:, :256]
    2    right = rescale right + P K[:, 256:512]

The tensor cores take their work in the order

    Q K^T of page i + 1,   P K of page i, both halves,   Q K^T of page i + 2

so that the softmax of page i + 1 runs beside the second: warpgroups 1 and 2 hold their products
back until the next page's scores are done, the rest follows from who waits for what. A page is
needed for its scores, and then through those of the next page, until it was multiplied by P: three
are in shared memory, in quarters of 128 columns,

    columns 0:128      2 pages    warpgroup 1 reads them last, and then copies the page after next
    the others         3 pages    warpgroup 1 or 2 likewise, three pages on
    rope columns       3 pages    warpgroup 2, then; P takes their place once the scores are there

(a model without rotated dims has none of the last, and P has their place to itself). The first
quarter, for which there is no third place, comes last in Q K^T and first in P K. To have room for
so much, three quarters of Q live in warpgroup 0's registers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import swizzled
from jaxattn.kernels.mla_decode.part import Part, Place, visible_keys
from jaxattn.kernels.mla_decode.rows_values import (
    FIRST_SLOT,
    PAGES,
    QUARTER,
    RANK,
    ROPE,
    SLOTS,
    Shared,
    multiply,
    shared_types,
)
from jaxattn.kernels.mla_decode.schedule import PAGE, TILE

LOG2E = math.log2(math.e)
REGISTERS = 168  # of a thread: three warpgroups share 65,536
# The softmax's reference is moved, and what is summed so far rescaled, where a row's scores exceed
# it by more than this, in powers of 2: P stays below 2 ** SLACK, and no bit of it is lost.
SLACK = 8.0
# A row's maximum before its first key, below any score but finite, and the score of what is not
# seen: no difference is inf - inf, and exp2(MASKED - EMPTY) is 0.
EMPTY, MASKED = -3e38, -math.inf


def scratch_types(dtype: Any, page_size: int, rope: bool, interpret: bool) -> list[Any]:
    tiled = swizzled(dtype)
    # The interpreter has no register operands: there all of Q is in shared memory.
    others = [plgpu.SMEM((3, TILE, QUARTER), dtype, transforms=tiled)] if interpret else []
    return [
        *others,
        # TMA wants its destination in one piece: the columns of Q and of pages lie apart.
        plgpu.SMEM((TILE, QUARTER), dtype, transforms=tiled),  # Q's first quarter
        plgpu.SMEM((TILE, ROPE), dtype, transforms=tiled),  # Q's rope columns
        plgpu.Barrier(num_arrivals=3 * len(others) + 1 + rope),  # Q loaded
        shared_types(dtype, page_size),
    ]


def make_body(
    *,
    q_len: int,
    num_heads: int,
    tiles: int,
    parts: int,
    scale: float,
    dtype: Any,
    page_size: int,
    split: bool,
    apart: bool,
    ordered: bool,
    ragged: bool,
    rope: bool,
    output_by_tma: bool,
    interpret: bool,
) -> Any:
    """The kernel's function of (first rows of the lanes, *refs in `mla_decode_mosaic`'s order).

    Args:
        page_size: tokens of a page of the cache; a "page" below is 64 tokens.
        split: whether there are partial results.
        apart: whether Q comes as the absorbed product and the rotation write it, two refs
            [H, B, S, R] and [B, S, H, P] with whole tiles of heads, or as one [B, rows, D].
        ordered: whether the schedule has an order.
        ragged: whether rows have lengths of their own among the S tokens.
        rope: whether there are rope columns: D 576, or 512.
        output_by_tma: whether a whole row's output leaves through its last page's slot, or by
            stores of four bytes from registers.
    """
    layout = plgpu.Layout.WGMMA
    row_layout = layout.reduce(1)
    factor = scale * LOG2E

    def over_keys(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (TILE, PAGE), [0])

    def iota(dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (TILE, PAGE), dimension, layout=layout)

    def body(first_rows, *every):
        refs = iter(every)
        q_refs = [next(refs) for _ in range(1 + apart)]
        kv_ref, layer_ref, table_ref, lens_ref, cuts_ref = (next(refs) for _ in range(5))
        order_ref: Any = next(refs) if ordered else None
        query_lens_ref: Any = next(refs) if ragged else None
        out_ref = next(refs)
        partial_ref: Any = next(refs) if split else None
        lse_ref = next(refs)
        partial_lse_ref: Any = next(refs) if split else None
        q_others_smem: Any = next(refs) if interpret else None
        q_smem, q_rope_smem, q_loaded, shared = refs
        assert isinstance(shared, Shared)
        wg, tile, part_index = (lax.axis_index(name) for name in ("wg", "tile", "part"))
        part = Part.of(cuts_ref, order_ref, part_index, lens_ref, table_ref, kv_ref, layer_ref)
        packed = pl.ds(tile * TILE, TILE)

        def each_empty_row(write: Any) -> None:
            """Calls write(row) for this block's share of the rows without tokens."""

            @pl.loop(part_index, lens_ref.shape[0], step=parts)
            def _each(row):
                pl.when(part.pages_of(row) <= 0)(lambda: write(row))

        def q_columns(row: jax.Array, first: int, width: int) -> Any:
            if not apart:
                return q_refs[0].at[row, packed, pl.ds(first, width)]
            token = lax.div(tile, num_heads // TILE)
            heads = pl.ds(lax.rem(tile, num_heads // TILE) * TILE, TILE)
            if first == RANK:
                return q_refs[1].at[row, token, heads]
            return q_refs[0].at[heads, row, token, pl.ds(first, width)]

        def load_q(at: Any) -> Any:
            """The queries of the part's first row from there on, if there is one. Returns the
            quarters in registers; if there is none, those of some row."""
            place, page, stop = part.settle(at)
            row = place.row

            @pl.when(page < stop)
            def _():
                plgpu.commit_smem()  # all four warps have read the last ones
                plgpu.copy_gmem_to_smem(q_columns(row, 0, QUARTER), q_smem, q_loaded)
                if rope:
                    plgpu.copy_gmem_to_smem(q_columns(row, RANK, ROPE), q_rope_smem, q_loaded)
                for i in range(3) if interpret else ():
                    some = q_columns(row, (1 + i) * QUARTER, QUARTER)
                    plgpu.copy_gmem_to_smem(some, q_others_smem.at[i], q_loaded)

            if interpret:
                return ()
            row = part.some_row(row)
            some = [q_columns(row, (1 + i) * QUARTER, QUARTER) for i in range(3)]
            return tuple(plgpu.load(x, layout=layout, optimized=False) for x in some)

        def piece(place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
            """Scores and P of a piece's pages."""
            row = place.row
            pages_before, pieces_before, q = carry
            plgpu.barrier_wait(q_loaded)
            others = q or tuple(q_others_smem.at[i] for i in range(3))
            length = lens_ref[row]
            queries = query_lens_ref[row] if ragged else None
            visible = visible_keys(
                tile * TILE + iota(0), length, queries,
                q_len=q_len, num_heads=num_heads, layout=layout,
            )  # fmt: skip

            def page_step(i, carry):
                top, total = carry
                slot = lax.rem(pages_before + i, PAGES)

                def product(acc):
                    def add(q, columns, loaded):
                        plgpu.barrier_wait(loaded)
                        plgpu.wgmma(acc, q, columns.transpose((1, 0)))

                    for quarter in (3, 2, 1):
                        at = FIRST_SLOT[quarter] + slot
                        add(others[quarter - 1], shared.kv.at[at], shared.kv_loaded.at[at])
                    if rope:
                        add(q_rope_smem, shared.rope.at[slot], shared.rope_loaded.at[slot])
                    at = lax.rem(pages_before + i, SLOTS[0])
                    add(q_smem, shared.kv.at[at], shared.kv_loaded.at[at])
                    return acc[...]

                scores = pl.run_scoped(product, plgpu.ACC((TILE, PAGE), jnp.float32))

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_arrive(shared.scores_done.at[slot])

                def reference(largest):
                    return jnp.where(largest > top + SLACK, largest, top)

                def plain(scores):
                    new_top = reference(scores.max(axis=1) * factor)
                    return new_top, jnp.exp2(scores * factor - over_keys(new_top))

                def masked(scores):
                    mask = iota(1) + (start + i) * PAGE < visible
                    scores = jnp.where(mask, scores * factor, MASKED)
                    new_top = reference(scores.max(axis=1))
                    return new_top, jnp.exp2(scores - over_keys(new_top))

                all_see_it = (start + i + 1) * PAGE <= length - (q_len - 1)
                if queries is not None:
                    all_see_it &= queries == q_len
                plain = plain if factor > 0 else masked
                new_top, p = lax.cond(all_see_it, plain, masked, scores)
                rescale = jnp.exp2(top - new_top)
                # Over the keys' rope columns: a warp that has waited for its products knows that
                # the warpgroup's are done.
                shared.rope[slot] = p.astype(dtype)
                shared.rescale[slot] = rescale
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared.p_written.at[slot])
                return new_top, total * rescale + p.sum(axis=1)

            zero_rows = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), row_layout)
            top, total = lax.fori_loop(0, steps, page_step, (zero_rows + EMPTY, zero_rows))
            # A NaN total is not 0: a NaN among a row's own keys shows in its output. Of a row that
            # sees no key the product is 0 * V, NaN where V is: a sum of -1 says write 0.
            empty = total == 0
            total = jnp.where(empty, -1.0, total)

            @pl.when(pieces_before > 0)
            def _():
                plgpu.barrier_wait(shared.sums_read)

            shared.sums[...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.sums_written)
            stop = start + steps
            q = load_q((place, stop, stop))
            lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
            whole = steps == part.pages_in(length)
            part.write_lse(lse_ref, partial_lse_ref, packed, row, whole, lse)
            return pages_before + steps, pieces_before + 1, q

        def write_nothing(row: jax.Array) -> None:
            nothing = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf), row_layout)
            lse_ref[row, packed] = nothing

        @pl.when(wg == 0)
        def _scores():
            plgpu.set_max_registers(REGISTERS, action="decrease")
            zero = jnp.int32(0)
            taken = part.each_piece(piece, (zero, zero, load_q(part.first())))[1]

            @pl.when(taken > 0)
            def _():
                plgpu.barrier_wait(shared.sums_read)

            each_empty_row(write_nothing)

        @pl.when((wg == 1) | (wg == 2))
        def _values():
            plgpu.set_max_registers(REGISTERS, action="increase")
            multiply(
                part, shared, wg - 1, out_ref, partial_ref,
                rows_of=lambda row: pl.ds(first_rows[0] + (row * tiles + tile) * TILE, TILE),
                partial_rows_of=lambda row: pl.ds(
                    first_rows[1] + (part.partial_slot(row) * tiles + tile) * TILE, TILE
                ),
                each_empty_row=each_empty_row, dtype=dtype, rope=rope,
                output_by_tma=output_by_tma, interpret=interpret,
            )  # fmt: skip

    return body
