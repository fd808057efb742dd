"""The iteration of a CTA over its part of `gqa_decode`, in pairs (row, KV head) instead of rows.

Pair p is KV head p % Hk of row p // Hk, so that all multiprocessors have work whatever Hk is.
Steps, 64 tokens each, count from the first step in which the row's window has a token. Earlier
steps are in no part, and nobody reads their pages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.kernels.attention.split_kv_schedule import PAGE, copies_of
from jaxattn.kernels.attention.work_iterator import SchedulePosition, WorkIterator
from jaxattn.kernels.gqa.decode.load.prefetch import prefetch_array, prefetch_element

KEYS, VALUES = 0, 1  # in the cache's axis of two
MOST = 2**31 - 1  # of int32


def window_start(lengths: jax.Array, queries: Any, window: int) -> jax.Array:
    """Returns the first key that the first of the last `queries` tokens sees."""
    return jnp.maximum(lengths - queries - (window - 1), 0)


def first_step(lengths: jax.Array, q_len: int, window: int | None) -> jax.Array:
    """Returns the first step of rows that a line has: for S tokens, whatever `query_lens` contains,
    so that the kernel and a schedule made without it agree."""
    if window is None:
        return jnp.zeros_like(lengths)
    return lax.div(window_start(lengths, q_len, window), jnp.int32(PAGE))


@dataclasses.dataclass(frozen=True)
class HeadWorkIterator(WorkIterator):
    """The iteration over a part of pairs; `row` of `WorkIterator` is a pair here.

    Attributes:
        kv_ref: The cache [L, 2 N, C, Hk D], with the keys of page n at 2 n, followed by its values.
        query_lens_ref: [B], or None.
        prefetch_refs: Further int32 or uint32 arrays, of which each CTA reads a few numbers.
        first_slot: The slot of the partial result of the part's first piece; the next piece has the
            next slot.
    """

    kv_heads: int
    head_dim: int
    q_len: int
    window: int | None
    query_lens_ref: Any
    prefetch_refs: tuple[Any, ...]
    first_slot: jax.Array

    def some_row(self, row: jax.Array) -> jax.Array:
        return jnp.minimum(row, self.lens_ref.shape[0] * self.kv_heads - 1)

    def row_and_head(self, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = lax.div(pair, self.kv_heads)
        return row, pair - row * self.kv_heads

    def length_of(self, pair: jax.Array) -> jax.Array:
        """Returns the tokens of the pair's row. It is 0, as for padding, if the row has more tokens
        than the table has places, or another length than in the schedule."""
        length, known = self._lengths(pair)
        return length if known is None else jnp.where(known, length, 0)

    def known(self, pair: jax.Array) -> jax.Array | None:
        """Whether the schedule has the row's length. None: it was made from this call's lengths."""
        return self._lengths(pair)[1]

    def _lengths(self, pair: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        row = self.row_and_head(self.some_row(pair))[0]
        length = self.lens_ref[row]
        max_tokens = self.table_ref.shape[1] * self.page_size
        if max_tokens < MOST:
            length = jnp.where(length > max_tokens, 0, length)
        return (
            length,
            None if self.scheduled_lens_ref is None else length == self.scheduled_lens_ref[row],
        )

    def queries_of(self, pair: jax.Array) -> jax.Array | None:
        """Returns the number of query tokens of the pair's row; None: all S."""
        if self.query_lens_ref is None:
            return None
        return self.query_lens_ref[self.row_and_head(self.some_row(pair))[0]]

    def prefetch_next(self, *, interpret: bool) -> None:
        """Prefetches what `numbers_of` the first piece reads in turn."""
        self.prefetch_lines(interpret=interpret)
        if self.window is not None:  # its first page depends on its length
            return
        pair = self.some_row(self.place(self.begin[0]).row)
        width = self.table_ref.shape[1]
        page = jnp.minimum(lax.div(self.begin[1] * PAGE, self.page_size), width - 1)
        prefetch_element(self.table_ref, self.row_and_head(pair)[0], page, interpret=interpret)

    def prefetch_lines(self, *, interpret: bool) -> None:
        """Prefetches the arrays of which each CTA reads a few numbers. Only the first CTA
        prefetches those that are read after the first page, or at once."""
        for ref in (self.order_ref, self.lens_ref, self.scheduled_lens_ref):
            if ref is not None:
                prefetch_array(ref, interpret=interpret)

        @pl.when(self.index == 0)
        def _others() -> None:
            for ref in self.prefetch_refs:
                prefetch_array(ref, interpret=interpret)

    def slot_at(self, position: SchedulePosition) -> jax.Array:
        """Returns the slot of the partial result of the part's piece at that place."""
        return self.first_slot + (position.number != self.begin[0]).astype(jnp.int32)

    def first_key(self, pair: jax.Array) -> jax.Array | None:
        """Returns the first key that any of the pair's query tokens sees; None without a window."""
        if self.window is None:
            return None
        query_len = self.queries_of(pair)
        queries = self.q_len if query_len is None else query_len
        return window_start(self.length_of(pair), queries, self.window)

    def first_step_of(self, pair: jax.Array) -> jax.Array:
        return first_step(self.length_of(pair), self.q_len, self.window)

    def pages_of(self, row: jax.Array) -> jax.Array:
        return self.pages_in(self.length_of(row)) - self.first_step_of(row)

    def numbers_of(self, row: jax.Array, stop: jax.Array) -> Callable[[jax.Array], list[jax.Array]]:
        """Returns a function from a pair's step to the cache's pages of the step. For steps from
        `stop` on it returns those of the step before `stop`. Past the row's end or left of its
        window, it returns the nearest page inside: the keys are masked. Values that depend only on
        the pair are read once, here: the producer warpgroup has less time for a step than reading
        them takes."""
        pair = self.some_row(row)
        of_row, size = self.row_and_head(pair)[0], self.page_size
        last_step, first_step = jnp.maximum(stop - 1, 0), self.first_step_of(pair)
        end = lax.div(self.length_of(pair) + size - 1, size) - 1
        end = jnp.clip(end, 0, self.table_ref.shape[1] - 1)
        begin = None
        if (key := self.first_key(pair)) is not None:
            begin = jnp.minimum(lax.div(key, size), end)

        def numbers(page: jax.Array) -> list[jax.Array]:
            step = jnp.clip(page, 0, last_step) + first_step
            first = lax.div(step * PAGE, size)
            places = [jnp.minimum(first + j, end) for j in range(copies_of(size))]
            if begin is not None:
                places = [jnp.maximum(place, begin) for place in places]
            return [self.table_ref[of_row, place] for place in places]

        return numbers

    def boxes(self, kind: int, pair: jax.Array, numbers: list[jax.Array], step: jax.Array) -> Any:
        """Returns a step's keys or values [tokens, D], one box for each contiguous run of
        tokens."""
        size, dim = self.page_size, self.head_dim
        inside: Any = 0
        if size > PAGE:
            inside = lax.rem(step + self.first_step_of(pair), size // PAGE) * PAGE
        tokens = pl.ds(inside, min(size, PAGE))
        head = self.row_and_head(pair)[1]
        dims = pl.ds(pl.multiple_of(head * dim, dim), dim)
        return [self.kv_ref.at[self.layer, 2 * n + kind, tokens, dims] for n in numbers]
