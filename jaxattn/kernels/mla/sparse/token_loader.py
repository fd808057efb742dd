"""The loads of a list's tokens by warpgroups 1 and 2, instead of the loads of pages.

A "page" is 64 entries of a token's list. Warpgroups 1 and 2 copy the tokens' columns by
`token_gather` to where a page's columns would be. Locating a token takes two dependent reads: of
the list, then of the block table. They are a step apart, two and three pages ahead of the copies,
so that no step waits for them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.instructions import fence_proxy_async, swizzled, warpgroup_barrier
from jaxattn.kernels.mla.decode.latent_tile import QUARTER, RANK, ROPE, SCALE_BYTES, SWIZZLED
from jaxattn.kernels.mla.decode.warp_specialized.fp8_page_loader import AHEAD, Fp8PageLoader
from jaxattn.kernels.mla.decode.warp_specialized.page_loader import PageLoader
from jaxattn.kernels.mla.decode.warp_specialized.smem import PAGES, RAW
from jaxattn.kernels.mla.sparse.token_gather import (
    copy_scales,
    copy_tokens,
    end_group,
    read_positions,
    read_tables,
    select_words,
    wait_for_groups,
)


def _select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Selects `if_true` or `if_false`, for scalars and for words `BY_THREAD`."""
    if condition is True:
        return if_true

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return select_words(condition, x, y) if x.ndim else jnp.where(condition, x, y)

    return jax.tree.map(choose, if_true, if_false)


class TokenLoader(PageLoader):
    """The loader of a part's listed tokens.

    The caller carries `pages`: the page before the next, the next page, and the positions of the
    page after it. The page before the next is, with 16 bits, that of columns 0:128 to load; with
    FP8, the one that shared memory holds as stored. A page's numbers are its tokens'
    (`read_tables`) and 64, since all count; in the interpreter its row instead of the tokens'.
    """

    block: Any

    def _positions(self, location: Any) -> Any:
        schedule_position, page, stop = location
        row = self.part.some_row(schedule_position.row)
        if self.cut.interpret:
            return row
        page = jnp.clip(page, 0, jnp.maximum(stop - 1, 0))
        return read_positions(self.block.refs.indices_ref, row, page)

    def _numbers(self, location: Any, positions: Any) -> Any:
        if self.cut.interpret:
            return positions, jnp.int32(PAGE)
        refs = self.block.refs
        row = self.part.some_row(location[0].row)
        table_row = lax.div(row, jnp.int32(self.block.tokens_of_row))
        visible, page_size = self.block.visible(row), self.part.page_size
        tokens = read_tables(positions, refs.table_ref, table_row, visible, page_size=page_size)
        return tokens, jnp.int32(PAGE)

    def _next(self, location: Any) -> Any:
        schedule_position, page, stop = location
        return self.part.settle((schedule_position, page + 1, stop))

    def _after(self, location: Any) -> Any:
        following = self._next(location)
        return following, self._positions(following)

    def _first(self, count: int) -> tuple[list[Any], Any]:
        """Returns the part's first pages, and the positions of the next page. All of their lists
        are read before any of their block tables: a CTA then begins with two dependent reads, and
        not with two for each page."""
        locations = [self.part.first()]
        for _ in range(count):
            locations.append(self._next(locations[-1]))
        positions = [self._positions(at) for at in locations]
        found = zip(locations[:count], positions, strict=False)
        return [(at, self._numbers(at, some)) for at, some in found], (locations[-1], positions[-1])

    def later(self, pages: Any, is_continued: Any = True) -> Any:
        """Returns the `pages` after the next page's copies have started, or the same ones if not
        `is_continued`."""
        before, ahead, (location, positions) = pages[:3]
        # No select and no branch over the words read here: they would wait for the load. If not
        # `is_continued`, the same words are read again.
        current_positions = ahead[1][0] if self.cut.interpret else ahead[1][0][1]
        before = _select(is_continued, self._page_of(ahead), before)
        next_location = _select(is_continued, location, ahead[0])
        ahead = (
            next_location,
            self._numbers(next_location, _select(is_continued, positions, current_positions)),
        )
        schedule_position, page, stop = location
        following = self.part.settle((schedule_position, page + jnp.int32(is_continued), stop))
        return before, ahead, (following, self._positions(following))

    def clear_tail(self, values: list[Any], left: jax.Array) -> None:
        """Does nothing: tokens that are not attended to are zeros."""

    def wait_for_warps(self) -> None:
        warpgroup_barrier(interpret=self.cut.interpret)

    def _gather(self, page: Any, target: Any, transforms: Any, first: Any) -> None:
        """Starts the copies of columns of a page's tokens."""
        number, _, (tokens, _) = page
        if not self.cut.interpret:
            copy_tokens(self.part.kv_ref, tokens, self.part.layer, target, transforms, first)
            return
        refs, layer = self.block.refs, self.part.layer
        positions = refs.indices_ref[tokens, pl.ds(number * PAGE, PAGE)]
        is_visible = (positions >= 0) & (positions < self.block.visible(tokens))
        positions = jnp.where(is_visible, positions, 0)
        table = refs.table_ref.at[lax.div(tokens, jnp.int32(self.block.tokens_of_row))][...]
        pages = jnp.where(is_visible, table[positions // self.part.page_size], 0)
        size = jnp.dtype(target.dtype).itemsize // self.part.kv_ref.dtype.itemsize
        columns = self.part.kv_ref.at[layer, :, :, pl.ds(first, size * target.shape[-1])][...]
        token_columns = columns[pages, positions % self.part.page_size]
        if size > 1:
            token_columns = lax.bitcast_convert_type(
                token_columns.reshape(PAGE, -1, size), target.dtype
            )
        target[...] = jnp.where(is_visible[:, None], token_columns, jnp.zeros((), target.dtype))

    def _end_group(self) -> None:
        if not self.cut.interpret:
            end_group()


class WideTokenLoader(TokenLoader):
    """The loader of 16-bit tokens: copies go to where the products read.

    A step starts two groups of copies: that of the first quarter, after it was multiplied, and that
    of the others. They are handed over a step later. All of a page is handed over before the next
    page's scores begin, except columns 0:128, which come last in the scores. The last entry of
    `pages` is whether the page after the one that is multiplied exists.
    """

    signals_arrival = True

    def begin(self) -> Any:
        locations, (location, positions) = self._first(PAGES)
        pages = [self._page_of(each) for each in locations]
        for i, page in enumerate(pages):
            self._begin(jnp.int32(i), page)
        ahead = location, self._numbers(location, positions)
        first_exists, second_exists = pages[0][1], pages[1][1]
        first_index, second_index = jnp.int32(0), jnp.int32(1)
        self._arrive(
            2,
            first_exists,
            [self._quarter(0, first_index), *self._others(first_index, both_quarters=False)],
        )
        self._arrive(1, second_exists, self._others(second_index))
        return pages[-1], ahead, self._after(location), second_exists

    def _begin(self, i: jax.Array, page_entry: Any) -> None:
        page, page_exists, numbers = page_entry
        self._load(1, page_entry, i)
        if self.cut.rope:
            self._load_rope(page_entry, i)
        slots = jnp.where(self.is_right, self.slots[0][1], self.slots[0][0])
        self._load(0, (page, page_exists & (i < slots), numbers), i)
        self._end_group()

    def later(self, pages: Any, is_continued: Any = True) -> Any:
        return *super().later(pages, is_continued), jnp.where(is_continued, pages[0][1], pages[3])

    def refill(self, quarter: int, pages: Any, into: jax.Array) -> None:
        before, ahead = pages[:2]
        page_entry = self._page_of(ahead)
        if quarter == 0:
            pl.when(self.is_right)(lambda: self._load(0, page_entry, into))
            pl.when(jnp.logical_not(self.is_right))(lambda: self._load(0, before, into))
            self._end_group()
            return
        self._load(quarter, page_entry, into)
        if not self.cut.interpret:
            self._prefetch_queries(*ahead[0])

    def hand_over_first(self, pages: Any, current_page: jax.Array) -> None:
        is_left_pending = pages[3] & jnp.logical_not(self.is_right)
        self._arrive(1, is_left_pending, [self._quarter(0, current_page + 1)])

    def hand_over(self, pages: Any, current_page: jax.Array) -> None:
        self._end_group()
        self._arrive(2, pages[0][1], self._others(current_page + 2))

    def _quarter(self, quarter: int, page: jax.Array) -> Callable[[], None]:
        barrier = self.shared.kv_loaded.at[self.slot_of(quarter, page)]
        return lambda: plgpu.barrier_arrive(barrier)

    def _others(self, page: jax.Array, *, both_quarters: bool = True) -> list[Callable[[], None]]:
        """The arrivals of all columns except the left warpgroup's first quarter; without
        `both_quarters`, also except the right one's."""

        def right() -> None:
            if both_quarters:
                self._quarter(0, page)()
            if self.cut.rope:
                plgpu.barrier_arrive(self.shared.rope_loaded.at[lax.rem(page, PAGES)])

        return [self._quarter(1, page), lambda: pl.when(self.is_right)(right)]

    def _arrive(
        self, num_pending: int, page_exists: jax.Array, arrivals: list[Callable[[], None]]
    ) -> None:
        """Waits for all copy groups except the last `num_pending`, and makes them visible to all
        readers."""
        interpret = self.cut.interpret

        @pl.when(page_exists)
        def _():
            if not interpret:
                wait_for_groups(num_pending, of_warp=False)
            fence_proxy_async(interpret=interpret)
            for arrive in arrivals:
                arrive()

    def _load(self, quarter: int, page_entry: Any, into: jax.Array) -> None:
        target = self.shared.kv.at[self.slot_of(quarter, into)]
        first_column = (2 * self.half + quarter) * QUARTER
        pl.when(page_entry[1])(
            lambda: self._gather(page_entry, target, swizzled(self.cut.dtype), first_column)
        )

    def _load_rope(self, page_entry: Any, into: jax.Array) -> None:
        target = self.shared.rope.at[lax.rem(into, PAGES)]
        gather = functools.partial(self._gather, page_entry, target, swizzled(self.cut.dtype), RANK)
        pl.when(page_entry[1] & self.is_right)(gather)


class Fp8TokenLoader(TokenLoader, Fp8PageLoader):
    """The loader of FP8 tokens: a warp copies the tokens that it widens, as stored, and waits for
    them.

    A step starts three groups of copies: rope columns, and two quarters. Rope columns of a
    block-scaled cache are not widened: they are copied to where the products read them, and handed
    over with the second quarter.
    """

    def __init__(self, block: Any):
        super().__init__(block)
        self.rope_in_place = self.cut.latents.block_scaled

    def begin(self) -> Any:
        (first, ahead), further = self._first(2)
        page = self._page_of(first)
        if not self.rope_in_place:
            self._store_rope(page)
        for quarter in range(2):
            self._store(2 * self.half + quarter, page)
        return lax.fori_loop(0, AHEAD, self._begin, (page, ahead, further))

    def _begin(self, i: jax.Array, pages: Any) -> Any:
        self._next_rope(pages, i)
        for quarter in range(2):
            super().refill(quarter, pages, i)
        self._signal_rope_loaded(pages, i)
        return self.later(pages)

    def refill(self, quarter: int, pages: Any, into: jax.Array) -> None:
        super().refill(quarter, pages, into)
        if quarter == 1:
            self._signal_rope_loaded(pages, into + AHEAD)

    def _signal_rope_loaded(self, pages: Any, into: jax.Array) -> None:
        if self.rope_in_place:
            loaded = self.shared.rope_loaded.at[lax.rem(into, PAGES)]
            pl.when(pages[0][1] & self.is_right)(lambda: plgpu.barrier_arrive(loaded))

    def _next_rope(self, pages: Any, into: jax.Array) -> None:
        if not self.rope_in_place:
            super()._next_rope(pages, into)
            return
        page, target = pages[0], self.shared.rope.at[lax.rem(into, PAGES)]
        columns = swizzled(self.cut.dtype), RANK + SCALE_BYTES
        pl.when(page[1] & self.is_right)(lambda: self._gather(page, target, *columns))
        self._end_group()

    def _wait_for_raw(self, tile: Any, quarter: int | None) -> None:
        """Waits for a quarter, except for the groups started since: those of the other quarter and
        of the rope columns. Block-scaled rope columns must also have arrived with the second
        quarter."""
        del tile
        if not self.cut.interpret:
            pending = 1 if self.rope_in_place and quarter == 1 else 2
            wait_for_groups(pending, of_warp=True)

    def _store(self, tile: Any, page: Any) -> None:
        super()._store(tile, page)
        self._end_group()

    def _store_rope(self, page: Any) -> None:
        super()._store_rope(page)
        self._end_group()

    def _copy(self, tile: Any, page: Any, first: Any) -> None:
        numbers = page[2][0]

        def load() -> None:
            self._gather(page, self.raw.at[tile], SWIZZLED, first)
            if not self.cut.latents.block_scaled:
                return
            scales = self.shared.raw_scales.at[tile]
            if self.cut.interpret:
                self._gather(page, scales, (), RANK)
            else:
                copy_scales(self.part.kv_ref, numbers, self.part.layer, scales, RANK)

        pl.when(page[1])(load)


assert SCALE_BYTES == 16 and ROPE * 2 == 128 and RAW == 5, "token_gather copies such tiles"
