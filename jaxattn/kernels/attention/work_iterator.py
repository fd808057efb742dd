"""The iteration of a CTA over its part of MLA decode's rows: the pieces of the part, page by page.

A piece is a row, or its portion in this part. Warpgroups may share a piece and take its pages in
turns. A consumer processes its pieces one by one. A producer that loads ahead of it finds the page
that follows a page, or a piece, with `settle`.

Iteration goes from place to place of the schedule's line. The tokens, pages, queries and output of
a place are those of the row that stands there: `SchedulePosition.row`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE, copies_of
from jaxattn.kernels.hopper.store.row_store import store


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SchedulePosition:
    """A place in the schedule's line, and the row there.

    Attributes:
        number: The index of the place in the line.
        ordered: The row there, read once; None if the schedule has no order.
    """

    number: jax.Array
    ordered: jax.Array | None

    @property
    def row(self) -> jax.Array:
        return self.number if self.ordered is None else self.ordered


@dataclasses.dataclass(frozen=True)
class WorkIterator:
    """The iteration over a part of the schedule.

    Attributes:
        begin: (place, page) where the part begins, a cut of `Schedule`; `end` is that of the next
            part.
        lens_ref: The tokens of each row [B].
        table_ref: The block tables [B, M].
        kv_ref: The cache [L, N, C, Ds].
        layer: The layer of the cache.
        index: The index of the part.
        order_ref: `Schedule.order` [B], or None.
        scheduled_lens_ref: `Schedule.seq_lens` [B], or None.
    """

    begin: tuple[jax.Array, jax.Array]
    end: tuple[jax.Array, jax.Array]
    lens_ref: Any
    table_ref: Any
    kv_ref: Any
    layer: jax.Array
    index: jax.Array
    order_ref: Any
    scheduled_lens_ref: Any

    stride = 1  # distance between the part's places

    @classmethod
    def of(cls, refs: Any, index: jax.Array) -> "WorkIterator":
        """Returns the part `index` of a `Schedule`; `refs` are a kernel's refs."""
        begin, end = ((refs.cuts_ref[0, i], refs.cuts_ref[1, i]) for i in (index, index + 1))
        return cls(
            begin, end, refs.lens_ref, refs.table_ref, refs.kv_ref, refs.layer_ref[0], index,
            refs.order_ref, refs.scheduled_lens_ref,
        )  # fmt: skip

    @property
    def page_size(self) -> int:
        return self.kv_ref.shape[2]

    @property
    def max_pages(self) -> int:
        return -(-self.table_ref.shape[1] * self.page_size // PAGE)

    def some_row(self, row: jax.Array) -> jax.Array:
        """Returns the row, or any row if the part ends after the last; the same for places. The
        only row of a batch is known without a read, so its length is loaded together with the cuts,
        and not after them."""
        rows = self.lens_ref.shape[0]
        return jnp.minimum(row, rows - 1) if rows > 1 else jnp.int32(0)

    def place(self, number: jax.Array) -> SchedulePosition:
        """Returns the position at place `number`, with any row if the part ends after the last
        place."""
        if self.order_ref is None:
            return SchedulePosition(number, None)
        return SchedulePosition(number, self.order_ref[self.some_row(number)])

    def known(self, row: jax.Array) -> jax.Array | None:
        """Whether the schedule was made for the row's length; None: it was made from this call's
        lengths."""
        row = self.some_row(row)
        return (
            None
            if self.scheduled_lens_ref is None
            else self.lens_ref[row] == self.scheduled_lens_ref[row]
        )

    def pages_of(self, row: jax.Array) -> jax.Array:
        """Returns the row's pages, 0 if the schedule was made for another length."""
        pages, known = self.pages_in(self.lens_ref[self.some_row(row)]), self.known(row)
        return pages if known is None else jnp.where(known, pages, 0)

    def pages_in(self, length: jax.Array) -> jax.Array:
        return jnp.minimum(lax.div(length + PAGE - 1, PAGE), self.max_pages)

    def _stop_of(self, position: SchedulePosition) -> jax.Array:
        # Not beyond the row: if the cuts do not tell their lengths, the row may have fewer pages.
        pages, (last_place, last_page) = self.pages_of(position.row), self.end
        return jnp.where(position.number == last_place, jnp.minimum(last_page, pages), pages)

    def each_piece(self, piece: Any, carry: Any = ()) -> Any:
        """Runs carry = piece(place, first page, pages, carry) for each piece; returns the last
        carry."""
        (first_place, first_page), (last_place, last_page) = self.begin, self.end

        def each(i, carry):
            position = self.place(first_place + (i if self.stride == 1 else i * self.stride))
            start = jnp.where(i == 0, first_page, 0)
            steps = jnp.maximum(self._stop_of(position) - start, 0)
            has_pages = (steps > 0).astype(jnp.int32)
            return lax.fori_loop(
                0, has_pages, lambda _, carry: piece(position, start, steps, carry), carry
            )

        places = last_place - first_place
        if self.stride > 1:
            places = lax.div(places, jnp.int32(self.stride))
        places += (last_page > 0).astype(jnp.int32)
        return lax.fori_loop(0, places, each, carry)

    def first_piece(self) -> tuple[SchedulePosition, jax.Array, jax.Array]:
        """Returns (place, first page, pages) where the part begins; the number of pages may be
        0."""
        number, page = self.begin
        position = self.place(number)
        return position, page, jnp.maximum(self._stop_of(position) - page, 0)

    def first(self) -> Any:
        """Returns the first page: (place, page, the piece's stop). There is none if page >=
        stop."""
        number, page = self.begin
        position = self.place(number)
        return self.settle((position, page, self._stop_of(position)))

    def settle(self, location: Any) -> Any:
        """Returns `location`, or the first page of a later piece if its piece has no such page."""

        def passed(location):
            position, page, stop = location
            return (page >= stop) & (position.number < self.end[0])

        def next_piece(location):
            position = self.place(location[0].number + self.stride)
            return position, jnp.int32(0), self._stop_of(position)

        return lax.while_loop(passed, next_piece, location)

    def partial_slot(self, row: jax.Array) -> jax.Array:
        """Returns the slot of the partial result of the row's piece."""
        # A schedule with partial results has the batch's order: the place is the row.
        return 2 * self.index + (row != self.begin[0]).astype(jnp.int32)

    def write_lse(
        self, lse_ref: Any, partial_lse_ref: Any, columns: Any, row: jax.Array, is_whole: jax.Array,
        lse: jax.Array,
    ) -> None:  # fmt: skip
        """Writes the LSE of a whole row, or, if there are partial results, that of a piece to its
        slot."""

        @pl.when(is_whole)
        def _whole():
            store(lse_ref.at[row, columns], lse)

        if partial_lse_ref is not None:

            @pl.when(jnp.logical_not(is_whole))
            def _piece():
                store(partial_lse_ref.at[self.partial_slot(row), columns], lse)

    def numbers(self, row: jax.Array, page: jax.Array, stop: jax.Array) -> list[jax.Array]:
        """Returns the page numbers in the cache of a page; from `stop` on, those of the page before
        it."""
        row = self.some_row(row)
        page = jnp.clip(page, 0, jnp.maximum(stop - 1, 0))
        if self.page_size == PAGE:
            return [self.table_ref[row, page]]
        # After the row's last page of the cache, that page again: its keys are masked.
        end = lax.div(self.lens_ref[row] + self.page_size - 1, self.page_size) - 1
        end = jnp.clip(end, 0, self.table_ref.shape[1] - 1)
        first = lax.div(page * PAGE, self.page_size)
        copies = copies_of(self.page_size)
        return [self.table_ref[row, jnp.minimum(first + j, end)] for j in range(copies)]

    def sources(self, numbers: list[jax.Array], page: jax.Array) -> list[Any]:
        """Returns the page's tokens in the cache, one box for each contiguous run of them."""
        tokens = min(self.page_size, PAGE)
        page_offset = lax.rem(page, self.page_size // PAGE) * PAGE if self.page_size > PAGE else 0
        tokens_slice = pl.ds(page_offset, tokens)
        return [self.kv_ref.at[self.layer, number, tokens_slice] for number in numbers]


def nothing_or_nan(empty_value: float, known: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the result of a row without keys; NaN if `known` is False, because the schedule has
    another length."""
    value = jnp.float32(empty_value)
    return (value if known is None else jnp.where(known, value, jnp.nan)).astype(dtype)


def visible_keys(
    packed_row: jax.Array,
    length: jax.Array,
    queries: jax.Array | None,
    *,
    q_len: int,
    num_heads: int,
    layout: Any,
) -> jax.Array:
    """Returns the number of keys that each packed row sees, int32 as `packed_row`: causal from the
    bottom right.

    Args:
        packed_row: s * H + h of each score.
        length: The tokens of the row.
        queries: The number of the row's query tokens, of S; None: all.
    """
    first = length - (q_len if queries is None else queries) + 1
    visible = plgpu.layout_cast(jnp.full(packed_row.shape, first, jnp.int32), layout)
    for token in range(1, q_len):
        visible += (packed_row >= token * num_heads).astype(jnp.int32)
    if queries is None:
        return visible
    return jnp.where(packed_row < queries * num_heads, visible, 0)
