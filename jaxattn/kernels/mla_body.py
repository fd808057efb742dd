"""The body of `mla_decode`: what its three warpgroups do, page by page.

    0    scores = Q K^T, softmax; P and the rescaling of the rows to shared memory
    1    left  = rescale left  + P K[:, :256]
    2    right = rescale right + P K[:, 256:512]

A page comes in three pieces, of which shared memory holds

    left columns    2 pages    warpgroup 1 reads them last, and then copies the page after next
    right columns   3 pages    warpgroup 2 likewise, three pages on
    rope columns    3 pages    with the right ones; P takes their place once the scores are there

(a model without rotated dims has none of the last, and P has their place to itself).

To have room for the third, the left half of Q lives in warpgroup 0's registers. The tensor cores
take their work in the order

    Q K^T of page i + 1,   P K right of page i,   P K left of page i + 1

so that the softmax of page i + 1 runs beside the second: warpgroup 2 holds its product back until
the next page's scores are done, the rest follows from who waits for what.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper import swizzled, wgmma
from jaxattn.kernels.mla_rescale import rescaled
from jaxattn.kernels.mla_schedule import PAGE, TILE

LOG2E = math.log2(math.e)
RANK, ROPE = 512, 64
HALF = RANK // 2  # columns of the output that a warpgroup owns
LEFT_SLOTS, RIGHT_SLOTS = 2, 3
REGISTERS = 168  # of a thread: three warpgroups share 65,536
# The softmax's reference is moved, and what is summed so far rescaled, where a row's scores exceed
# it by more than this, in powers of 2: P stays below 2 ** SLACK, and no bit of it is lost.
SLACK = 8.0
# Far enough apart that exp2(MASKED - EMPTY) is 0 and no difference is inf - inf.
EMPTY, MASKED = -1e30, -1e33


def copies_of(page_size: int) -> int:
    """Copies that bring 64 tokens, from pages of 16, 32, 64 or 128."""
    return max(1, PAGE // page_size)


def scratch_types(dtype: Any, page_size: int, rope: bool, interpret: bool) -> list[Any]:
    tiled = swizzled(dtype)
    copies = copies_of(page_size)
    # The interpreter has no register operands: there Q's left columns are in shared memory, too.
    left = [plgpu.SMEM((TILE, HALF), dtype, transforms=tiled)] if interpret else []
    return [
        *left,
        # TMA wants its destination in one piece: the columns of Q and of pages lie apart.
        plgpu.SMEM((TILE, HALF), dtype, transforms=tiled),  # Q's right columns
        plgpu.SMEM((TILE, ROPE), dtype, transforms=tiled),  # Q's rope columns
        # Left columns slot after slot, then right ones.
        plgpu.SMEM((LEFT_SLOTS + RIGHT_SLOTS, PAGE, HALF), dtype, transforms=tiled),
        plgpu.SMEM((RIGHT_SLOTS, PAGE, ROPE), dtype, transforms=tiled),  # rope columns, then P
        plgpu.SMEM((RIGHT_SLOTS, TILE), jnp.float32),  # rescaling of the rows
        plgpu.SMEM((TILE,), jnp.float32),  # their sums
        plgpu.Barrier(num_arrivals=len(left) + 1 + rope),  # Q loaded
        # Left and right columns loaded, and rope columns.
        plgpu.Barrier(num_arrivals=copies, num_barriers=LEFT_SLOTS + RIGHT_SLOTS),
        plgpu.Barrier(num_arrivals=copies, num_barriers=RIGHT_SLOTS),
        plgpu.Barrier(num_barriers=RIGHT_SLOTS),  # P and the rescaling written
        plgpu.Barrier(num_barriers=RIGHT_SLOTS),  # P read by warpgroup 1
        plgpu.Barrier(num_barriers=RIGHT_SLOTS),  # scores done, but of a piece's first page
        plgpu.Barrier(),  # sums written
        plgpu.Barrier(num_arrivals=2),  # sums read by both
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
    piece_pages: int,
    split: bool,
    apart: bool,
    ragged: bool,
    rope: bool,
    output_by_tma: bool,
    interpret: bool,
) -> Any:
    """The kernel's function of (first rows of the lanes, *refs in `mla_decode_mosaic`'s order).

    Args:
        page_size: tokens of a page of the cache; a "page" below is 64 tokens.
        piece_pages: `Schedule.piece`.
        split: whether there are partial results.
        apart: whether Q comes as the absorbed product and the rotation write it, two refs
            [H, B, S, R] and [B, S, H, P] with whole tiles of heads, or as one [B, rows, D].
        ragged: whether rows have lengths of their own among the S tokens.
        rope: whether there are rope columns: D 576, or 512.
        output_by_tma: whether a whole row's output leaves through its last page's slot, or by
            stores of four bytes from registers.
    """
    tile_layout = plgpu.Layout.WGMMA
    row_layout = tile_layout.reduce(1)
    factor = scale * LOG2E
    in_registers = not interpret  # the left half of Q
    copies = copies_of(page_size)

    def over_rows(vector: jax.Array, width: int) -> jax.Array:
        return lax.broadcast_in_dim(vector, (TILE, width), [0])

    def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=tile_layout)

    def body(first_rows, *every):
        refs = iter(every)
        q_refs = [next(refs) for _ in range(1 + apart)]
        kv_ref, layer_ref, table_ref, lens_ref, cuts_ref = (next(refs) for _ in range(5))
        query_lens_ref: Any = next(refs) if ragged else None
        out_ref = next(refs)
        partial_ref: Any = next(refs) if split else None
        lse_ref = next(refs)
        partial_lse_ref: Any = next(refs) if split else None
        q_left_smem: Any = next(refs) if interpret else None
        (
            q_right_smem, q_rope_smem, kv_smem, rope_smem, rescale_smem, sum_smem, q_loaded,
            kv_loaded, rope_loaded, p_written, p_read, scores_done, sums_written, sums_read,
        ) = refs  # fmt: skip
        batch = lens_ref.shape[0]
        max_pages = -(-table_ref.shape[1] * page_size // PAGE)
        wg, tile, part = lax.axis_index("wg"), lax.axis_index("tile"), lax.axis_index("part")
        first_row, first_page = cuts_ref[0, part], cuts_ref[1, part]
        last_row, last_page = cuts_ref[0, part + 1], cuts_ref[1, part + 1]

        def pages_of(row: jax.Array) -> jax.Array:
            pages = lax.div(lens_ref[jnp.minimum(row, batch - 1)] + PAGE - 1, PAGE)
            return jnp.minimum(pages, max_pages)

        def stop_of(row: jax.Array) -> jax.Array:
            # No further than the row: it may have shrunk since the schedule was made.
            pages = pages_of(row)
            return jnp.where(row == last_row, jnp.minimum(last_page, pages), pages)

        def settle(row: jax.Array, page: jax.Array, stop: jax.Array) -> Any:
            """The part's first (row, page, row's end) from there on; page = end if none is left."""

            def passed(at):
                row, page, stop = at
                return (page >= stop) & (row < last_row)

            def next_row(at):
                row = at[0] + 1
                return row, jnp.int32(0), stop_of(row)

            return lax.while_loop(passed, next_row, (row, page, stop))

        def each_piece(piece: Any, carry: Any = ()) -> tuple[jax.Array, Any]:
            """carry = piece(carry, row, first page, pages, whole, pages and pieces before) for each
            piece of a row that this part holds; returns their number, too."""

            def step(i, before):
                pages_before, pieces_before, carry = before
                row = first_row + i
                start = jnp.where(i == 0, first_page, 0)
                steps = jnp.maximum(stop_of(row) - start, 0)
                some = steps > 0

                def take(j, carry):
                    done = j * piece_pages
                    taken = jnp.minimum(steps - done, piece_pages) if piece_pages else steps
                    whole = taken == pages_of(row)
                    before = pages_before + done, pieces_before + j
                    return piece(carry, row, start + done, taken, whole, *before)

                if piece_pages:
                    pieces = lax.div(steps + piece_pages - 1, piece_pages)
                    carry = lax.fori_loop(0, pieces, take, carry)
                else:
                    pieces = some.astype(jnp.int32)
                    carry = lax.cond(some, lambda: take(0, carry), lambda: carry)
                return pages_before + steps, pieces_before + pieces, carry

            rows = last_row - first_row + (last_page > 0).astype(jnp.int32)
            return lax.fori_loop(0, rows, step, (jnp.int32(0), jnp.int32(0), carry))[1:]

        def each_empty_row(write: Any) -> None:
            """Calls write(row) for this block's share of the rows without tokens."""

            @pl.loop(part, batch, step=parts)
            def _(row):
                pl.when(pages_of(row) <= 0)(lambda: write(row))

        def partial_slot(row: jax.Array, start: jax.Array) -> jax.Array:
            """Where the partial result of the row's piece from page `start` on goes; nothing is
            read for it, since what is read early stays in registers for the whole piece."""
            if piece_pages:
                return row * (-(-max_pages // piece_pages)) + lax.div(start, piece_pages)
            return 2 * part + (row != first_row).astype(jnp.int32)

        @pl.when(wg == 0)
        def _scores():
            plgpu.set_max_registers(REGISTERS, action="decrease")

            def q_columns(row: jax.Array, first: int, width: int) -> Any:
                if not apart:
                    return q_refs[0].at[row, pl.ds(tile * TILE, TILE), pl.ds(first, width)]
                token = lax.div(tile, num_heads // TILE)
                heads = pl.ds(lax.rem(tile, num_heads // TILE) * TILE, TILE)
                if first == RANK:
                    return q_refs[1].at[row, token, heads]
                return q_refs[0].at[heads, row, token, pl.ds(first, width)]

            def load_q(row: jax.Array, page: jax.Array) -> None:
                """The queries of the part's first row from this page on, if there is one."""
                row, page, stop = settle(row, page, stop_of(row))

                @pl.when(page < stop)
                def _():
                    plgpu.commit_smem()  # all four warps have read the last ones
                    if not in_registers:
                        plgpu.copy_gmem_to_smem(q_columns(row, 0, HALF), q_left_smem, q_loaded)
                    plgpu.copy_gmem_to_smem(q_columns(row, HALF, HALF), q_right_smem, q_loaded)
                    if rope:
                        plgpu.copy_gmem_to_smem(q_columns(row, RANK, ROPE), q_rope_smem, q_loaded)

            def piece(carry, row, start, steps, whole, pages_before, pieces_before):
                q_left = q_left_smem
                if in_registers:
                    source = q_columns(row, 0, HALF)
                    q_left = plgpu.load(source, layout=tile_layout, optimized=False)
                plgpu.barrier_wait(q_loaded)
                # Keys that each packed row sees: causal from the bottom right.
                length = lens_ref[row]
                queries = query_lens_ref[row] if ragged else q_len
                packed_row = tile * TILE + iota((TILE, PAGE), 0)
                visible = jnp.full((TILE, PAGE), length - (queries - 1), jnp.int32)
                visible = plgpu.layout_cast(visible, tile_layout)
                for token in range(1, q_len):
                    visible += (packed_row >= token * num_heads).astype(jnp.int32)
                if ragged:
                    visible = jnp.where(packed_row < queries * num_heads, visible, 0)

                def page_step(i, carry):
                    top, total = carry
                    left = lax.rem(pages_before + i, LEFT_SLOTS)
                    slot = lax.rem(pages_before + i, RIGHT_SLOTS)

                    def product(acc):
                        def add(q, columns, loaded):
                            plgpu.barrier_wait(loaded)
                            plgpu.wgmma(acc, q, columns.transpose((1, 0)))

                        # The right columns come last: they are loaded last.
                        right = LEFT_SLOTS + slot
                        add(q_left, kv_smem.at[left], kv_loaded.at[left])
                        if rope:
                            add(q_rope_smem, rope_smem.at[slot], rope_loaded.at[slot])
                        add(q_right_smem, kv_smem.at[right], kv_loaded.at[right])
                        return acc[...]

                    scores = pl.run_scoped(product, plgpu.ACC((TILE, PAGE), jnp.float32))

                    @pl.when(i > 0)
                    def _():
                        plgpu.barrier_arrive(scores_done.at[slot])

                    @pl.when(i == steps - 1)
                    def _():
                        load_q(row, start + steps)

                    def reference(largest):
                        return jnp.where(largest > top + SLACK, largest, top)

                    def plain(scores):
                        new_top = reference(scores.max(axis=1) * factor)
                        return new_top, jnp.exp2(scores * factor - over_rows(new_top, PAGE))

                    def masked(scores):
                        mask = iota((TILE, PAGE), 1) + (start + i) * PAGE < visible
                        scores = jnp.where(mask, scores * factor, MASKED)
                        new_top = reference(scores.max(axis=1))
                        return new_top, jnp.exp2(scores - over_rows(new_top, PAGE))

                    all_see_it = (start + i + 1) * PAGE <= length - (q_len - 1)
                    if ragged:
                        all_see_it &= queries == q_len
                    plain = plain if factor > 0 else masked
                    new_top, p = lax.cond(all_see_it, plain, masked, scores)
                    rescale = jnp.exp2(top - new_top)
                    # Over the keys' rope columns: a warp that has waited for its products knows
                    # that the warpgroup's are done.
                    rope_smem[slot] = p.astype(dtype)
                    rescale_smem[slot] = rescale
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_written.at[slot])
                    return new_top, total * rescale + p.sum(axis=1)

                zero_rows = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), row_layout)
                top, total = lax.fori_loop(0, steps, page_step, (zero_rows + EMPTY, zero_rows))
                # A NaN total is not 0: a NaN among a row's own keys shows in its output. Of a row
                # that sees no key the product is 0 * V, NaN where V is: a sum of -1 says write 0.
                empty = total == 0
                total = jnp.where(empty, -1.0, total)

                @pl.when(pieces_before > 0)
                def _():
                    plgpu.barrier_wait(sums_read)

                sum_smem[...] = total
                plgpu.commit_smem()
                plgpu.barrier_arrive(sums_written)
                lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
                write_lse(row, start, whole, lse)
                return carry

            def write_lse(row, start, whole, lse):
                at = pl.ds(tile * TILE, TILE)

                @pl.when(whole)
                def _whole():
                    lse_ref[row, at] = lse

                if split:

                    @pl.when(jnp.logical_not(whole))
                    def _piece():
                        partial_lse_ref[partial_slot(row, start), at] = lse

            load_q(first_row, first_page)
            pieces = each_piece(piece)[0]

            @pl.when(pieces > 0)
            def _():
                plgpu.barrier_wait(sums_read)

            def write_nothing(row):
                nothing = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf), row_layout)
                lse_ref[row, pl.ds(tile * TILE, TILE)] = nothing

            each_empty_row(write_nothing)

        @pl.when((wg == 1) | (wg == 2))
        def _values():
            plgpu.set_max_registers(REGISTERS, action="increase")
            half = wg - 1
            is_right = half == 1
            first_slot = jnp.where(is_right, LEFT_SLOTS, 0)
            slots = jnp.where(is_right, RIGHT_SLOTS, LEFT_SLOTS)
            columns = pl.ds(half * HALF, HALF)
            zero_out = plgpu.layout_cast(jnp.zeros((TILE, HALF), jnp.float32), tile_layout)

            def out_rows(row):
                return pl.ds(first_rows[0] + (row * tiles + tile) * TILE, TILE)

            def next_load(row: jax.Array, page: jax.Array, stop: jax.Array) -> Any:
                """The first page to load from there on: (row, page, the row's end, and where in
                the cache it is)."""
                row, page, stop = settle(row, page, stop)
                # Read long before it is needed; of a page that is not there, any.
                owner = jnp.minimum(row, batch - 1)
                if page_size == PAGE:
                    return row, page, stop, [table_ref[owner, jnp.minimum(page, max_pages - 1)]]
                # Past the row's last page of the cache, that page again: what is read is masked.
                end = lax.div(lens_ref[owner] + page_size - 1, page_size) - 1
                end = jnp.clip(end, 0, table_ref.shape[1] - 1)
                first = lax.div(page * PAGE, page_size)
                places = [jnp.minimum(first + j, end) for j in range(copies)]
                return row, page, stop, [table_ref[owner, place] for place in places]

            def load(page: jax.Array, numbers: Any, there: jax.Array, slot: jax.Array) -> None:
                tokens = min(page_size, PAGE)  # of a copy
                inside = lax.rem(page, page_size // PAGE) * PAGE if page_size > PAGE else 0

                @pl.when(there)
                def _():
                    for j, number in enumerate(numbers):
                        source = kv_ref.at[layer_ref[0], number, pl.ds(inside, tokens)]
                        to = pl.ds(j * tokens, tokens)

                        if rope:

                            @pl.when(is_right)
                            def _(source=source, to=to):
                                rotated = source.at[:, pl.ds(RANK, ROPE)]
                                target = rope_smem.at[slot, to]
                                plgpu.copy_gmem_to_smem(rotated, target, rope_loaded.at[slot])

                        at = first_slot + slot
                        target = kv_smem.at[at, to]
                        plgpu.copy_gmem_to_smem(source.at[:, columns], target, kv_loaded.at[at])

            ahead = next_load(first_row, first_page, stop_of(first_row))

            def begin(slot, ahead):
                row, page, stop, numbers = ahead
                load(page, numbers, page < stop, slot)
                return next_load(row, page + 1, stop)

            ahead = lax.fori_loop(0, slots, begin, ahead)

            def piece(ahead, row, start, steps, whole, pages_before, pieces_before):
                length = lens_ref[row]

                def page_step(i, carry):
                    acc, (next_row, next_page, stop, numbers) = carry
                    slot = lax.rem(pages_before + i, RIGHT_SLOTS)
                    mine = lax.rem(pages_before + i, slots)
                    values = kv_smem.at[first_slot + mine]
                    plgpu.barrier_wait(p_written.at[slot])
                    rescale = plgpu.load(rescale_smem.at[slot], layout=row_layout)
                    acc = rescaled(acc, rescale, interpret=interpret)

                    # What lies past the end of the sequence may be NaN, and 0 * NaN is NaN: it
                    # becomes 0 before it is used as a value. As keys it has been read.
                    left = length - (start + i) * PAGE

                    @pl.when(left < PAGE)
                    def _clear_tail():
                        inside = iota((PAGE, ROPE), 0) < left
                        for first in range(0, HALF, ROPE):
                            some = values.at[:, pl.ds(first, ROPE)]
                            kept = plgpu.load(some, layout=tile_layout)
                            some[...] = jnp.where(inside, kept, jnp.zeros((), dtype))
                        plgpu.commit_smem()

                    @pl.when(is_right & (i < steps - 1))
                    def _():
                        following = lax.rem(pages_before + i + 1, RIGHT_SLOTS)
                        plgpu.barrier_wait(scores_done.at[following])

                    p = rope_smem.at[slot]
                    acc = wgmma(acc, p, values, shape=(TILE, HALF), interpret=interpret)

                    @pl.when(jnp.logical_not(is_right))
                    def _():
                        plgpu.barrier_arrive(p_read.at[slot])

                    @pl.when(is_right)
                    def _():
                        plgpu.barrier_wait(p_read.at[slot])

                    plgpu.commit_smem()  # all four warps have read what is there
                    if output_by_tma:  # the last page's slot is loaded again after the output
                        goes_on = i < steps - 1
                        load(next_page, numbers, (next_page < stop) & goes_on, mine)
                        after = next_load(next_row, next_page + 1, stop)
                        now = (next_row, next_page, stop, numbers)
                        pick = functools.partial(jnp.where, goes_on)
                        return acc, jax.tree.map(pick, after, now)
                    load(next_page, numbers, next_page < stop, mine)
                    return acc, next_load(next_row, next_page + 1, stop)

                acc, ahead = lax.fori_loop(0, steps, page_step, (zero_out, ahead))
                plgpu.barrier_wait(sums_written)
                total = plgpu.load(sum_smem, layout=row_layout)
                plgpu.barrier_arrive(sums_read)
                factor = over_rows(1 / total, HALF)
                out = jnp.where(factor < 0, 0.0, acc * factor)

                if output_by_tma:
                    last = lax.rem(pages_before + steps - 1, slots)

                    @pl.when(whole)
                    def _():
                        staged = kv_smem.at[first_slot + last]
                        staged[...] = out.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(staged, out_ref.at[out_rows(row), columns])
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    next_row, next_page, stop, numbers = ahead
                    load(next_page, numbers, next_page < stop, last)
                    ahead = next_load(next_row, next_page + 1, stop)
                else:

                    @pl.when(whole)
                    def _():
                        out_ref[out_rows(row), columns] = out.astype(dtype)

                if split:

                    @pl.when(jnp.logical_not(whole))
                    def _():
                        at = first_rows[1] + (partial_slot(row, start) * tiles + tile) * TILE
                        partial_ref[pl.ds(at, TILE), columns] = out

                return ahead

            each_piece(piece, ahead)

            def write_zeros(row):
                out_ref[out_rows(row), columns] = zero_out.astype(dtype)

            each_empty_row(write_zeros)

    return body
