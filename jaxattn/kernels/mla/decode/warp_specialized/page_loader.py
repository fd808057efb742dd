"""The loads of 16-bit pages in `mla_decode`, by warpgroups 1 and 2.

Each warpgroup loads the columns that it multiplies by P, two quarters of 128; the second also loads
the rope columns. fp8_page_loader.py loads FP8 pages.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.attention.work_iterator import SchedulePosition
from jaxattn.kernels.mla.decode.latent_tile import HALF, QUARTER, RANK, ROPE
from jaxattn.kernels.mla.decode.warp_specialized.cta_context import MlaDecodeCta
from jaxattn.kernels.mla.decode.warp_specialized.smem import LAYOUT, PAGES


class PageLoader:
    """A warpgroup's half of the part's pages, in the order in which they are multiplied.

    The caller carries `pages`. It contains the next page to load of columns 0:128, which have two
    places, and the page after it, which is the next of the other columns. The first is (number in
    its row, whether there is one, where in the cache). The second has its whole position in the
    part, as `settle` returns it, instead of the first two.

    Attributes:
        columns: The columns of the two quarters.
    """

    signals_arrival = False  # whether the loader must signal that data is there; TMA does so itself

    def __init__(self, block: MlaDecodeCta):
        self.block, self.cut, self.part = block, block.cut, block.part
        self.shared, self.places = block.refs.shared, block.cut.places
        self.half = half = block.wg - 1
        self.is_right = half == 1
        firsts, slots = self.places.firsts, self.places.slots
        # For the half's two quarters: the first place, and the number of places.
        self.first_slots = [jnp.where(self.is_right, firsts[2 + i], firsts[i]) for i in range(2)]
        self.slots = [(slots[i], slots[2 + i]) for i in range(2)]
        self.columns = [pl.ds(half * HALF + i * QUARTER, QUARTER) for i in range(2)]
        self.tokens = min(self.part.page_size, PAGE)  # of a copy

    def begin(self) -> Any:
        """Starts the copies of the first pages."""
        ahead = self._found(self.part.first())
        pages = self._page_of(ahead), ahead
        return lax.fori_loop(0, PAGES, self._begin, pages)

    def refill(self, quarter: int, pages: Any, into: jax.Array) -> None:
        """Loads the quarter of the next page into the place of the page `into`."""
        before, ahead = pages
        page_entry = self._page_of(ahead)
        if quarter == 0:
            page_entry = jax.tree.map(
                functools.partial(jnp.where, self.is_right), page_entry, before
            )
        self._load(quarter, page_entry, into)
        if quarter == 1 and not self.cut.interpret:
            self._prefetch_queries(*ahead[0])

    def _prefetch_queries(
        self, position: SchedulePosition, page: jax.Array, stop: jax.Array
    ) -> None:
        """Where a row begins, prefetches its queries into L2, three pages before they are
        loaded."""

        @pl.when((page == 0) & (page < stop) & jnp.logical_not(self.is_right))
        def _():
            for first in range(0, RANK, QUARTER):
                plgpu.async_prefetch(self.block.queries(position.row, first, QUARTER))
            if self.cut.rope:
                plgpu.async_prefetch(self.block.queries(position.row, RANK, ROPE))

    def refill_rope(self, pages: Any, into: jax.Array) -> None:
        """Loads the next page's rope columns, as `refill` does."""
        self._load_rope(self._page_of(pages[1]), into)

    def meanwhile(self, pages: Any, current_page: jax.Array) -> None:
        """Work that can overlap with the products of the part's page `current_page` with P."""

    def hand_over_first(self, pages: Any, current_page: jax.Array) -> None:
        """Signals that the quarter with two places of the page after `current_page` has arrived."""

    def hand_over(self, pages: Any, current_page: jax.Array) -> None:
        """Signals that the other columns of the page after that have arrived. Called once the next
        products, or the output, have made room."""

    def wait_for_warps(self) -> None:
        """Ensures that all four warps have read the data. On a GPU this needs no barrier: the whole
        warpgroup issues a wgmma, so a warp that waited for it knows that all have read. CUTLASS's
        pipelines count one arrival per warpgroup for the same reason."""
        if self.cut.interpret:
            plgpu.commit_smem()

    def later(self, pages: Any, is_continued: Any = True) -> Any:
        """Returns the `pages` of the next step, or the same ones if not `is_continued`. It has no
        select over what is read from the table: a select would wait for the load."""
        before, ahead = pages
        position, page, stop = ahead[0]
        select = functools.partial(jnp.where, is_continued)
        before = jax.tree.map(select, self._page_of(ahead), before)
        return before, self._found(
            self.part.settle((position, page + jnp.int32(is_continued), stop))
        )

    def slot_of(self, quarter: int, page: jax.Array) -> jax.Array:
        """The place of the quarter of the part's page `page`."""
        left, right = (lax.rem(page, slots) for slots in self.slots[quarter])
        return self.first_slots[quarter] + jnp.where(self.is_right, right, left)

    def clear_tail(self, values: list[Any], left: jax.Array) -> None:
        """Zeroes the tokens past the end of the sequence before they are read as values: they may
        be NaN, and 0 * NaN is NaN. The products have already read them as keys."""
        pl.when(left < PAGE)(lambda: self._clear(values, left))

    def _clear(self, values: list[Any], left: jax.Array) -> None:
        is_valid = plgpu.broadcasted_iota(jnp.int32, (PAGE, ROPE), 0, layout=LAYOUT) < left
        for value_tile in values:
            for first in range(0, QUARTER, ROPE):
                tile_columns = value_tile.at[:, pl.ds(first, ROPE)]
                columns_values = plgpu.load(tile_columns, layout=LAYOUT)
                tile_columns[...] = jnp.where(
                    is_valid, columns_values, jnp.zeros((), self.cut.dtype)
                )
        plgpu.commit_smem()

    def _found(self, location: Any) -> Any:
        position, page, stop = location
        return location, self.part.numbers(position.row, page, stop)

    def _page_of(self, ahead: Any) -> Any:
        (_, page, stop), numbers = ahead
        return page, page < stop, numbers

    def _begin(self, i: jax.Array, pages: Any) -> Any:
        page, page_exists, numbers = page_entry = self._page_of(pages[1])
        self._load(1, page_entry, i)
        if self.cut.rope:
            self._load_rope(page_entry, i)
        slots = jnp.where(self.is_right, self.slots[0][1], self.slots[0][0])
        self._load(0, (page, page_exists & (i < slots), numbers), i)
        return self.later(pages)

    def _load(self, quarter: int, page_entry: Any, into: jax.Array) -> None:
        """Copies the page of `page_entry` to the place of the part's page `into`."""
        page, page_exists, numbers = page_entry
        shared, tokens = self.shared, self.tokens
        slot = self.slot_of(quarter, into)

        @pl.when(page_exists)
        def _():
            for j, source in enumerate(self.part.sources(numbers, page)):
                if quarter == 1 and not self.cut.interpret:
                    # Columns 0:128 of a page are loaded late: prefetched here, they then come from
                    # L2.
                    @pl.when(jnp.logical_not(self.is_right))
                    def _(source=source):
                        plgpu.async_prefetch(source.at[:, pl.ds(0, QUARTER)])

                destination = shared.kv.at[slot, pl.ds(j * tokens, tokens)]
                source_columns = source.at[:, self.columns[quarter]]
                plgpu.copy_gmem_to_smem(source_columns, destination, shared.kv_loaded.at[slot])

    def _load_rope(self, page_entry: Any, into: jax.Array) -> None:
        page, page_exists, numbers = page_entry
        shared, tokens = self.shared, self.tokens
        slot = lax.rem(into, PAGES)

        @pl.when(page_exists & self.is_right)
        def _():
            for j, source in enumerate(self.part.sources(numbers, page)):
                destination = shared.rope.at[slot, pl.ds(j * tokens, tokens)]
                source_columns = source.at[:, pl.ds(RANK, ROPE)]
                plgpu.copy_gmem_to_smem(source_columns, destination, shared.rope_loaded.at[slot])
