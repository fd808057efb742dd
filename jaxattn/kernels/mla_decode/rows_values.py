"""Warpgroups 1 and 2 of `mla_decode`: they bring the pages, and multiply them by P.

Each has a half of the output's columns, and of a page those that it multiplies: two quarters of
128. rows_body.py says what is where in shared memory, and in which order the tensor cores work.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import wgmma
from jaxattn.kernels.mla_decode.part import Place
from jaxattn.kernels.mla_decode.rows_memory import (
    FIRST_SLOT,
    HALF,
    LAYOUT,
    PAGES,
    QUARTER,
    RANK,
    ROPE,
    SLOTS,
    Block,
)
from jaxattn.kernels.mla_decode.rows_rescale import emptied, rescaled
from jaxattn.kernels.mla_decode.schedule import PAGE, TILE


class Piece(NamedTuple):
    """A row, or what of it lies in the part."""

    start: jax.Array  # first page
    steps: jax.Array  # pages
    length: jax.Array  # tokens of the row
    before: jax.Array  # pages of earlier pieces


class Values:
    """What warpgroups 1 and 2 do, each with its half of the columns: all of the part's pages.

    Attributes:
        columns: of the two quarters.
    """

    def __init__(self, block: Block):
        self.block, self.cut, self.refs, self.part = block, block.cut, block.refs, block.part
        self.shared = block.refs.shared
        half = block.wg - 1
        self.is_right = half == 1
        # Of the half's two quarters: the first one's place, and how many there are.
        self.first_slots = [
            jnp.where(self.is_right, FIRST_SLOT[2 + i], FIRST_SLOT[i]) for i in range(2)
        ]
        self.slots = [jnp.where(self.is_right, SLOTS[2 + i], SLOTS[i]) for i in range(2)]
        self.columns = [pl.ds(half * HALF + i * QUARTER, QUARTER) for i in range(2)]
        self.zero = plgpu.layout_cast(jnp.zeros((TILE, QUARTER), jnp.float32), LAYOUT)
        self.tokens = min(self.part.page_size, PAGE)  # of a copy

    def run(self) -> None:
        ahead = self._found(self.part.first())
        pages = lax.fori_loop(0, PAGES, self._begin, (self._page_of(ahead), ahead))
        self.part.each_piece(self._piece, (jnp.int32(0), pages))

        def write_zeros(row: jax.Array) -> None:
            for some in self.columns:
                self.refs.out_ref[self.block.rows_of(row), some] = self.zero.astype(self.cut.dtype)

        self.block.each_empty_row(write_zeros)

    # Loading. `pages`: the next to load of columns 0:128, which have two places, and the one after
    # it, the next of the other columns. A page is (number in its row, whether there is one, where
    # in the cache), the second with its whole position in the part, as `settle` has it, instead.

    def _found(self, at: Any) -> Any:
        place, page, stop = at
        return at, self.part.numbers(place.row, page, stop)

    def _page_of(self, ahead: Any) -> Any:
        (_, page, stop), numbers = ahead
        return page, page < stop, numbers

    def _later(self, pages: Any, goes_on: Any = True) -> Any:
        """The same where it does not go on. No select over what is read of the table here: it would
        wait for the load."""
        before, ahead = pages
        place, page, stop = ahead[0]
        select = functools.partial(jnp.where, goes_on)
        before = jax.tree.map(select, self._page_of(ahead), before)
        return before, self._found(self.part.settle((place, page + jnp.int32(goes_on), stop)))

    def _begin(self, i: jax.Array, pages: Any) -> Any:
        page, there, numbers = at = self._page_of(pages[1])
        self._load(1, at, i)
        if self.cut.rope:
            self._load_rope(at, i)
        self._load(0, (page, there & (i < self.slots[0]), numbers), i)
        return self._later(pages)

    def _refill(self, quarter: int, pages: Any, into: jax.Array) -> None:
        """The quarter of the next page to its place, which was the page `into`'s."""
        before, ahead = pages
        at = self._page_of(ahead)
        if quarter == 0:
            at = jax.tree.map(functools.partial(jnp.where, self.is_right), at, before)
        self._load(quarter, at, into)

    def _slot_of(self, quarter: int, page: jax.Array) -> jax.Array:
        """Where the part's page `page` has the quarter."""
        return self.first_slots[quarter] + lax.rem(page, self.slots[quarter])

    def _load(self, quarter: int, at: Any, into: jax.Array) -> None:
        """The page `at` to the place that the part's page `into` has."""
        page, there, numbers = at
        shared, tokens = self.shared, self.tokens
        slot = self._slot_of(quarter, into)

        @pl.when(there)
        def _():
            for j, source in enumerate(self.part.sources(numbers, page)):
                if quarter == 1 and not self.cut.interpret:
                    # Of columns 0:128 a page is loaded late: it comes from L2 then.
                    @pl.when(jnp.logical_not(self.is_right))
                    def _(source=source):
                        plgpu.async_prefetch(source.at[:, pl.ds(0, QUARTER)])

                to = shared.kv.at[slot, pl.ds(j * tokens, tokens)]
                some = source.at[:, self.columns[quarter]]
                plgpu.copy_gmem_to_smem(some, to, shared.kv_loaded.at[slot])

    def _load_rope(self, at: Any, into: jax.Array) -> None:
        page, there, numbers = at
        shared, tokens = self.shared, self.tokens
        slot = lax.rem(into, PAGES)

        @pl.when(there & self.is_right)
        def _():
            for j, source in enumerate(self.part.sources(numbers, page)):
                to = shared.rope.at[slot, pl.ds(j * tokens, tokens)]
                some = source.at[:, pl.ds(RANK, ROPE)]
                plgpu.copy_gmem_to_smem(some, to, shared.rope_loaded.at[slot])

    # Multiplying.

    def _piece(self, place: Place, start: jax.Array, steps: jax.Array, carry: Any) -> Any:
        pages_before, pages = carry
        length = self.part.lens_ref[place.row]
        page = functools.partial(self._page, Piece(start, steps, length, pages_before))
        accs, pages = lax.fori_loop(0, steps, page, ((self.zero, self.zero), pages))
        plgpu.barrier_wait(self.shared.sums_written)
        total = plgpu.load(self.shared.sums, layout=LAYOUT.reduce(1))
        plgpu.barrier_arrive(self.shared.sums_read)
        accs = tuple(emptied(acc, total, interpret=self.cut.interpret) for acc in accs)
        factor = lax.broadcast_in_dim(jnp.abs(1 / total), (TILE, QUARTER), [0])
        whole = steps == self.part.pages_in(length)
        last = pages_before + steps - 1
        pl.when(whole)(lambda: self._write(place.row, accs, factor, last))
        if self.cut.output_by_tma:
            self._refill(0, pages, last)
            self._refill(1, pages, last)
            if self.cut.rope:
                self._load_rope(self._page_of(pages[1]), last)
            pages = self._later(pages)
        if self.refs.partial_ref is not None:

            @pl.when(jnp.logical_not(whole))
            def _():
                for some, acc in zip(self.columns, accs, strict=True):
                    shown = acc * factor
                    self.refs.partial_ref[self.block.partial_rows_of(place.row), some] = shown

        return pages_before + steps, pages

    def _page(self, piece: Piece, i: jax.Array, carry: Any) -> Any:
        """The piece's page i: the output rescaled, and P V added; the next ones' copies begun."""
        accs, pages = carry
        cut, shared = self.cut, self.shared
        now = piece.before + i
        slot = lax.rem(now, PAGES)
        values = [shared.kv.at[self._slot_of(quarter, now)] for quarter in range(2)]
        plgpu.barrier_wait(shared.p_written.at[slot])
        rescale = plgpu.load(shared.rescale.at[slot], layout=LAYOUT.reduce(1))
        accs = tuple(rescaled(acc, rescale, interpret=cut.interpret) for acc in accs)
        left = piece.length - (piece.start + i) * PAGE
        pl.when(left < PAGE)(lambda: self._clear_tail(values, left))
        goes_on = i < piece.steps - 1

        @pl.when(goes_on)
        def _():
            plgpu.barrier_wait(shared.scores_done.at[lax.rem(now + 1, PAGES)])

        # The last page's place is loaded again after the output has left through it.
        free = goes_on if cut.output_by_tma else jnp.bool_(True)

        def refill_first() -> None:
            plgpu.commit_smem()  # all four warps have read what is there
            pl.when(free)(lambda: self._refill(0, pages, now))

        accs = self._multiplied(accs, shared.rope.at[slot], values, refill_first)

        if cut.rope:

            @pl.when(jnp.logical_not(self.is_right))
            def _():
                plgpu.barrier_arrive(shared.p_read.at[slot])

        plgpu.commit_smem()
        pl.when(free)(lambda: self._refill(1, pages, now))
        if cut.rope:  # takes P's place; without it P's own place is free with the quarters'

            @pl.when(self.is_right)
            def _():
                plgpu.barrier_wait(shared.p_read.at[slot])
                pl.when(free)(lambda: self._load_rope(self._page_of(pages[1]), now))

        return accs, self._later(pages, free)

    def _multiplied(self, accs: Any, p: Any, values: Any, between: Any) -> Any:
        """accs + P K, of both quarters; `between` runs when the first one is done."""
        if self.cut.interpret:
            shape = (TILE, QUARTER)
            both = zip(accs, values, strict=True)
            done = [wgmma(acc, p, some, shape=shape, interpret=True) for acc, some in both]
            between()
            return tuple(done)

        def run(*refs: Any) -> Any:
            for ref, acc in zip(refs, accs, strict=True):
                ref[...] = acc
            for ref, some in zip(refs, values, strict=True):
                plgpu.wgmma(ref, p, some)
            plgpu.wgmma_wait(1)
            between()
            plgpu.wgmma_wait(0)
            return tuple(ref[...] for ref in refs)

        return pl.run_scoped(run, *[plgpu.ACC((TILE, QUARTER), jnp.float32)] * 2)

    def _clear_tail(self, values: Any, left: jax.Array) -> None:
        """What lies past the end of the sequence may be NaN, and 0 * NaN is NaN: it becomes 0
        before it is used as a value. As keys it has been read."""
        inside = plgpu.broadcasted_iota(jnp.int32, (PAGE, ROPE), 0, layout=LAYOUT) < left
        for some in values:
            for first in range(0, QUARTER, ROPE):
                some_of_it = some.at[:, pl.ds(first, ROPE)]
                kept = plgpu.load(some_of_it, layout=LAYOUT)
                some_of_it[...] = jnp.where(inside, kept, jnp.zeros((), self.cut.dtype))
        plgpu.commit_smem()

    def _write(self, row: jax.Array, accs: Any, factor: jax.Array, last: jax.Array) -> None:
        """A whole row's output; by TMA through the place of its last page."""
        cut = self.cut
        for quarter, (some, acc) in enumerate(zip(self.columns, accs, strict=True)):
            to = self.refs.out_ref.at[self.block.rows_of(row), some]
            if not cut.output_by_tma:
                to[...] = (acc * factor).astype(cut.dtype)
                continue
            staged = self.shared.kv.at[self._slot_of(quarter, last)]
            staged[...] = (acc * factor).astype(cut.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, to)
        if cut.output_by_tma:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
