"""Warpgroups 1 and 2 of `mla_decode`: they bring the pages, and multiply them by P.

Each has a half of the output's columns, and of a page those that it multiplies: two quarters of
128. rows_scores.py says what is where in shared memory, and in which order the tensor cores work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import swizzled, wgmma
from jaxattn.kernels.mla_decode.part import Part, Place
from jaxattn.kernels.mla_decode.rows_rescale import emptied, rescaled
from jaxattn.kernels.mla_decode.schedule import PAGE, TILE, copies_of

RANK, ROPE = 512, 64
HALF, QUARTER = RANK // 2, RANK // 4
# Of each quarter: pages that there is room for, and the first one's place.
SLOTS, FIRST_SLOT = (2, 3, 3, 3), (0, 2, 5, 8)
PAGES = max(SLOTS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """What the three warpgroups share, arrays and then barriers."""

    kv: Any  # [place, 64, 128], quarters of pages
    rope: Any  # [PAGES, 64, 64], rope columns of pages, then P
    rescale: Any  # float32 [PAGES, 64], of the rows, before the page is added
    sums: Any  # float32 [64], of a piece's rows at its end; negative where one sees no key
    kv_loaded: Any
    rope_loaded: Any
    p_written: Any  # and the rescaling
    p_read: Any  # by warpgroup 1, where rope columns take its place
    scores_done: Any  # but of a piece's first page
    sums_written: Any
    sums_read: Any  # by both


def shared_types(dtype: Any, page_size: int) -> Shared:
    tiled, copies = swizzled(dtype), copies_of(page_size)
    return Shared(
        kv=plgpu.SMEM((sum(SLOTS), PAGE, QUARTER), dtype, transforms=tiled),
        rope=plgpu.SMEM((PAGES, PAGE, ROPE), dtype, transforms=tiled),
        rescale=plgpu.SMEM((PAGES, TILE), jnp.float32),
        sums=plgpu.SMEM((TILE,), jnp.float32),
        kv_loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=sum(SLOTS)),
        rope_loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=PAGES),
        p_written=plgpu.Barrier(num_barriers=PAGES),
        p_read=plgpu.Barrier(num_barriers=PAGES),
        scores_done=plgpu.Barrier(num_barriers=PAGES),
        sums_written=plgpu.Barrier(),
        sums_read=plgpu.Barrier(num_arrivals=2),
    )


def multiply(
    part: Part,
    shared: Shared,
    half: jax.Array,
    out_ref: Any,
    partial_ref: Any,
    *,
    rows_of: Callable[[jax.Array], Any],
    partial_rows_of: Callable[[jax.Array], Any],
    each_empty_row: Callable[[Callable[[jax.Array], None]], None],
    dtype: Any,
    rope: bool,
    output_by_tma: bool,
    interpret: bool,
) -> None:
    """What warpgroup 1 + `half` does, all of the part's pages.

    Args:
        partial_ref: of partial results, or None where rows are not split.
        rows_of: a row's rows of `out_ref`; `partial_rows_of`: of the piece that begins at a page.
    """
    layout = plgpu.Layout.WGMMA
    is_right = half == 1
    # Of the half's two quarters: the first one's place, and how many there are.
    first_slots = [jnp.where(is_right, FIRST_SLOT[2 + i], FIRST_SLOT[i]) for i in range(2)]
    slots = [jnp.where(is_right, SLOTS[2 + i], SLOTS[i]) for i in range(2)]
    columns = [pl.ds(half * HALF + i * QUARTER, QUARTER) for i in range(2)]
    zero_out = plgpu.layout_cast(jnp.zeros((TILE, QUARTER), jnp.float32), layout)
    tokens = min(part.page_size, PAGE)  # of a copy

    def slot_of(quarter: int, page: jax.Array) -> jax.Array:
        """Where the part's page `page` has the quarter."""
        return first_slots[quarter] + lax.rem(page, slots[quarter])

    def load(quarter: int, at: Any, into: jax.Array) -> None:
        """The page `at` to the place that the part's page `into` has."""
        page, there, numbers = at
        slot = slot_of(quarter, into)

        @pl.when(there)
        def _():
            for j, source in enumerate(part.sources(numbers, page)):
                if quarter == 1 and not interpret:
                    # Of columns 0:128 a page is loaded late: it comes from L2 then.
                    @pl.when(jnp.logical_not(is_right))
                    def _(source=source):
                        plgpu.async_prefetch(source.at[:, pl.ds(0, QUARTER)])

                to = shared.kv.at[slot, pl.ds(j * tokens, tokens)]
                some = source.at[:, columns[quarter]]
                plgpu.copy_gmem_to_smem(some, to, shared.kv_loaded.at[slot])

    def load_rope(at: Any, into: jax.Array) -> None:
        page, there, numbers = at
        slot = lax.rem(into, PAGES)

        @pl.when(there & is_right)
        def _():
            for j, source in enumerate(part.sources(numbers, page)):
                to = shared.rope.at[slot, pl.ds(j * tokens, tokens)]
                some = source.at[:, pl.ds(RANK, ROPE)]
                plgpu.copy_gmem_to_smem(some, to, shared.rope_loaded.at[slot])

    # `pages`: the next to load of columns 0:128, which have two places, and the one after it, the
    # next of the other columns. A page is (number in its row, whether there is one, where in the
    # cache), the second with its whole position in the part, as `settle` has it, instead.
    def found(at: Any) -> Any:
        place, page, stop = at
        return at, part.numbers(place.row, page, stop)

    def page_of(ahead: Any) -> Any:
        (_, page, stop), numbers = ahead
        return page, page < stop, numbers

    def later(pages: Any, goes_on: Any = True) -> Any:
        """The same where it does not go on. No select over what is read of the table here: it would
        wait for the load."""
        before, ahead = pages
        place, page, stop = ahead[0]
        before = jax.tree.map(functools.partial(jnp.where, goes_on), page_of(ahead), before)
        return before, found(part.settle((place, page + jnp.int32(goes_on), stop)))

    def refill(quarter: int, pages: Any, into: jax.Array) -> None:
        """The quarter of the next page to its place, which was the page `into`'s."""
        before, ahead = pages
        at = page_of(ahead)
        if quarter == 0:
            at = jax.tree.map(functools.partial(jnp.where, is_right), at, before)
        load(quarter, at, into)

    def begin(i: jax.Array, pages: Any) -> Any:
        page, there, numbers = at = page_of(pages[1])
        load(1, at, i)
        if rope:
            load_rope(at, i)
        load(0, (page, there & (i < slots[0]), numbers), i)
        return later(pages)

    def multiplied(accs: Any, p: Any, values: Any, between: Any) -> Any:
        """accs + P K, of both quarters; `between` runs when the first one is done."""
        if interpret:
            shape = (TILE, QUARTER)
            both = zip(accs, values, strict=True)
            done = [wgmma(acc, p, some, shape=shape, interpret=True) for acc, some in both]
            between()
            return tuple(done)

        def run(*refs):
            for ref, acc in zip(refs, accs, strict=True):
                ref[...] = acc
            for ref, some in zip(refs, values, strict=True):
                plgpu.wgmma(ref, p, some)
            plgpu.wgmma_wait(1)
            between()
            plgpu.wgmma_wait(0)
            return tuple(ref[...] for ref in refs)

        return pl.run_scoped(run, *[plgpu.ACC((TILE, QUARTER), jnp.float32)] * 2)

    def clear_tail(values: Any, left: jax.Array) -> None:
        """What lies past the end of the sequence may be NaN, and 0 * NaN is NaN: it becomes 0
        before it is used as a value. As keys it has been read."""
        inside = plgpu.broadcasted_iota(jnp.int32, (PAGE, ROPE), 0, layout=layout) < left
        for some in values:
            for first in range(0, QUARTER, ROPE):
                some_of_it = some.at[:, pl.ds(first, ROPE)]
                kept = plgpu.load(some_of_it, layout=layout)
                some_of_it[...] = jnp.where(inside, kept, jnp.zeros((), dtype))
        plgpu.commit_smem()

    def piece(place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
        row = place.row
        pages_before, pages = carry
        length = part.lens_ref[row]

        def page_step(i, carry):
            accs, pages = carry
            now = pages_before + i
            slot = lax.rem(now, PAGES)
            values = [shared.kv.at[slot_of(quarter, now)] for quarter in range(2)]
            plgpu.barrier_wait(shared.p_written.at[slot])
            rescale = plgpu.load(shared.rescale.at[slot], layout=layout.reduce(1))
            accs = tuple(rescaled(acc, rescale, interpret=interpret) for acc in accs)
            left = length - (start + i) * PAGE
            pl.when(left < PAGE)(lambda: clear_tail(values, left))
            goes_on = i < steps - 1

            @pl.when(goes_on)
            def _():
                plgpu.barrier_wait(shared.scores_done.at[lax.rem(now + 1, PAGES)])

            # The last page's place is loaded again after the output has left through it.
            free = goes_on if output_by_tma else jnp.bool_(True)

            def refill_first():
                plgpu.commit_smem()  # all four warps have read what is there
                pl.when(free)(lambda: refill(0, pages, now))

            accs = multiplied(accs, shared.rope.at[slot], values, refill_first)

            if rope:

                @pl.when(jnp.logical_not(is_right))
                def _():
                    plgpu.barrier_arrive(shared.p_read.at[slot])

            plgpu.commit_smem()
            pl.when(free)(lambda: refill(1, pages, now))
            if rope:  # takes P's place; without it P's own place is free with the quarters'

                @pl.when(is_right)
                def _():
                    plgpu.barrier_wait(shared.p_read.at[slot])
                    pl.when(free)(lambda: load_rope(page_of(pages[1]), now))

            return accs, later(pages, free)

        accs, pages = lax.fori_loop(0, steps, page_step, ((zero_out, zero_out), pages))
        plgpu.barrier_wait(shared.sums_written)
        total = plgpu.load(shared.sums, layout=layout.reduce(1))
        plgpu.barrier_arrive(shared.sums_read)
        accs = tuple(emptied(acc, total, interpret=interpret) for acc in accs)
        factor = lax.broadcast_in_dim(jnp.abs(1 / total), (TILE, QUARTER), [0])
        whole = steps == part.pages_in(length)
        last = pages_before + steps - 1

        @pl.when(whole)
        def _():
            for quarter, (some, acc) in enumerate(zip(columns, accs, strict=True)):
                to = out_ref.at[rows_of(row), some]
                if not output_by_tma:
                    to[...] = (acc * factor).astype(dtype)
                    continue
                staged = shared.kv.at[slot_of(quarter, last)]
                staged[...] = (acc * factor).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged, to)
            if output_by_tma:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if output_by_tma:
            refill(0, pages, last)
            refill(1, pages, last)
            if rope:
                load_rope(page_of(pages[1]), last)
            pages = later(pages)
        if partial_ref is not None:

            @pl.when(jnp.logical_not(whole))
            def _():
                for some, acc in zip(columns, accs, strict=True):
                    partial_ref[partial_rows_of(row), some] = acc * factor

        return pages_before + steps, pages

    ahead = found(part.first())
    pages = lax.fori_loop(0, PAGES, begin, (page_of(ahead), ahead))
    part.each_piece(piece, (jnp.int32(0), pages))

    def write_zeros(row):
        for some in columns:
            out_ref[rows_of(row), some] = zero_out.astype(dtype)

    each_empty_row(write_zeros)
