"""The split-KV schedule of `mla_decode`: assigns the rows' pages to CTAs, on the device.

The pages of all rows form a line, row after row. The schedule divides this line into parts of about
equal length, one for each CTA that the GPU runs at a time. A part consists of whole rows, except
that its first and last row may be pieces of a row. A part therefore has at most two partial
results, whatever the batch, so static shapes bound the memory for them. Lengths change without a
host round trip and without a recompilation.

A part that ends one row and begins another pays twice the cost of a row beyond its pages. So if
each row can be split into equal pieces, one part each, without making any part longer, the schedule
does that.

With more rows than parts, no row need be split for the parts to be about equal. The rows then stand
in the line in an order of their own, in which every part is whole rows. From the longest to the
shortest they are dealt to the parts in turns. Even turns go from the first part to the last and odd
turns back, so that each part has long and short rows. If that leaves a part much longer than the
others, for example because of one very long row, the rows stand in the batch's order and the line
is split.

Where a row is split depends on the other rows, and so does the rounding of its combine. With
`pieces` a row is split into equal pieces whose number does not depend on the other rows, and with
more rows than parts none is split. The bits of a row then depend only on the row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels.hopper.device import plain_copies

TILE = 64  # packed rows (query token, head) of a CTA
PAGE = 64  # tokens that a CTA takes at a time; called a page here, whatever the cache's

# The cost of a row beyond its pages (loading its queries, storing its output), in pages: with many
# packed rows, and with few.
ROW_COST, FEW_ROWS_COST = 5, 3
MOST_FEW_ROWS = 24
# The cost of partial results and their combine if most parts have some, in pages of a part: with
# many packed rows, and with few.
MERGE_COST, FEW_MERGE_COST = 12, 3
# A shorter part costs more in partial results than it saves. It may pay off where a row has at most
# FEW_PIECES of them, which are merged in two turns.
MIN_PART = 6
FEW_PIECES = 16
# With few packed rows, two warpgroups alternate between a part's pages and wait for each: one page
# for each of them is the shortest part. FEW_ROWS_PIECES partial results of a row are merged in one
# turn.
FEW_ROWS_MIN_PART, FEW_ROWS_SHORT_PART, FEW_ROWS_PIECES = 4, 2, 32
# Parts of whole rows have no partial results. They are used if they are longer by at most one part
# in WHOLE_ROWS_SLACK, or by the cost of the combine.
WHOLE_ROWS_SLACK = 16
# From this many rows per part on, rows are never split, and no memory is kept for partial results.
WHOLE_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The division of all rows' pages into parts: part p begins at cut p, which is (place, page).

    p is from 0 to `parts`, and the last cut is the end. A place is a position in the order of rows,
    from 0 to B - 1.

    Attributes:
        cuts: int32 [2, parts + 1], `places` and `pages` in one array, as the kernels read them.
        slots: int32 [3, B], for each row: its first partial result, the number of its partial
            results (0: the row's output is written directly), and the base of its other partial
            results, see `slot_of`. Some schedules have a fourth number: the stride of the other
            partial results, which is otherwise 2.
        order: int32 [B], the row at each place; every row occurs once. If a cut is inside of a row,
            row i is at place i. None: row i is always at place i.
        max_pages: The largest number of pages of a row; 0 if unknown.
        seq_lens: int32 [B], the lengths of the schedule, with 0 for lengths that were too long. A
            call returns NaN for a row with another length. None: the call does not check lengths.
    """

    cuts: jax.Array
    slots: jax.Array
    order: jax.Array | None = None
    max_pages: int = dataclasses.field(default=0, metadata={"static": True})
    seq_lens: jax.Array | None = None

    @property
    def places(self) -> jax.Array:
        """int32 [parts + 1], the place of the row in which a part begins."""
        return self.cuts[0]

    @property
    def pages(self) -> jax.Array:
        """int32 [parts + 1], the first page of a part within its row; 0 is the beginning of the
        row."""
        return self.cuts[1]

    @property
    def parts(self) -> int:
        return self.cuts.shape[1] - 1

    def check(self, op: str, queries: tuple[int, ...], max_pages: int) -> None:
        """Raises ValueError if the schedule is for other rows."""
        made_for, batch = self.slots.shape[-1], queries[0]
        if made_for != batch:
            raise ValueError(
                f"{op}: schedule is for {made_for} rows, but q {queries} has {batch}; create it "
                "with decode_schedule from these seq_lens"
            )
        if self.max_pages not in (0, max_pages):
            raise ValueError(
                f"{op}: schedule is for rows of up to {self.max_pages} times {PAGE} tokens, but "
                f"block_tables and kv_cache have {max_pages}; create it with decode_schedule from "
                "these max_pages and page_size"
            )

    @classmethod
    def of(
        cls, places: jax.Array, pages: jax.Array, batch: int, max_pages: int = 0,
        order: jax.Array | None = None,
    ) -> "Schedule":  # fmt: skip
        """Returns the schedule with these cuts, which determine the slots of partial results."""
        # A row that is split is at its own place, so the following arrays are indexed by row.
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        starts, first_pages = places[:-1], pages[:-1]
        starts_before = (starts < row) | ((starts == row) & (first_pages == 0))
        first = jnp.sum(starts_before, axis=1, dtype=jnp.int32) - 1
        last = jnp.sum(starts <= row, axis=1, dtype=jnp.int32) - 1
        number = jnp.where(last > first, last - first + 1, 0)
        # A part's first piece is its partial result 0, another piece its partial result 1.
        begins = starts[jnp.maximum(first, 0)] == row[:, 0]
        slots = jnp.stack([2 * first + ~begins, number, 2 * first])
        return cls(jnp.stack([places, pages]), slots, order, max_pages=max_pages)

    @classmethod
    def whole(cls, places: jax.Array, order: jax.Array, max_pages: int) -> "Schedule":
        """Returns the schedule that splits no row, with parts that begin at `places`, and without
        partial results."""
        cuts = jnp.stack([places, jnp.zeros_like(places)])
        return cls(cuts, jnp.zeros((3, order.shape[0]), jnp.int32), order, max_pages=max_pages)

    @staticmethod
    def slot_of(slots: Any, index: Any) -> Any:
        """The slot of the partial result of a row's piece `index`; `slots` are the row's three or
        four numbers in the schedule's `slots`."""
        slot_stride = slots[3] if len(slots) > 3 else 2
        return jnp.where(index == 0, slots[0], slots[2] + slot_stride * index)


def copies_of(page_size: int) -> int:
    """Returns the number of copies that load 64 tokens, from pages of 16, 32, 64 or 128."""
    return max(1, PAGE // page_size)


def num_steps(max_pages: int, page_size: int) -> int:
    """Returns the number of steps, of 64 tokens each, in `max_pages` pages of the cache."""
    return -(-max_pages * page_size // PAGE)


def num_tiles(q_len: int, num_heads: int) -> int:
    return -(-q_len * num_heads // TILE)


def few_rows(q_len: int, num_heads: int) -> bool:
    """Whether a request has so few packed rows that they become the products' columns (swap AB).
    With 32 the kernel with packed rows as the products' rows is faster."""
    return q_len * num_heads <= MOST_FEW_ROWS


def packed_rows(q_len: int, num_heads: int) -> int:
    """Returns the rows that results keep per request: S * H, and padding rows that a kernel also
    writes. If the assembler lacks plain copies, few rows of a block-scaled cache take the kernel
    with tiles of 64."""
    if few_rows(q_len, num_heads) and plain_copies():
        return -(-q_len * num_heads // 8) * 8
    return num_tiles(q_len, num_heads) * TILE


def row_cost(q_len: int, num_heads: int) -> int:
    return FEW_ROWS_COST if few_rows(q_len, num_heads) else ROW_COST


def merge_cost(q_len: int, num_heads: int) -> int:
    return FEW_MERGE_COST if few_rows(q_len, num_heads) else MERGE_COST


class SplitThresholds(NamedTuple):
    """The least pages for which a part pays for its partial results.

    Attributes:
        part: Pages of any part.
        short: Pages of a part if a row has up to `pieces` of them.
    """

    part: int = MIN_PART
    short: int = MIN_PART
    pieces: int = FEW_PIECES


OF_MANY_ROWS = SplitThresholds()
# One request with one tile: Kimi-Linear's 4,096 tokens took 13.6 us so, and 16.4 us in parts of
# six.
OF_ONE_TILE = SplitThresholds(short=4)
OF_FEW_ROWS = SplitThresholds(FEW_ROWS_MIN_PART, FEW_ROWS_SHORT_PART, FEW_ROWS_PIECES)


def split_thresholds(batch: int, q_len: int, num_heads: int) -> SplitThresholds:
    if few_rows(q_len, num_heads):
        return OF_FEW_ROWS
    return OF_ONE_TILE if batch * num_tiles(q_len, num_heads) == 1 else OF_MANY_ROWS


def num_parts(batch: int, q_len: int, num_heads: int, max_pages: int, num_sms: int) -> int:
    """Returns the parts of a step, from static shapes: one CTA for each multiprocessor and tile, or
    fewer if `batch` rows of `max_pages` pages do not pay for as many."""
    least = split_thresholds(batch, q_len, num_heads).short
    worth = batch * (max_pages + row_cost(q_len, num_heads)) // least
    return max(1, min(num_sms // num_tiles(q_len, num_heads), worth))


def may_split(batch: int, parts: int) -> bool:
    """Whether rows are split at all, from static shapes: the arena then has memory for the partial
    results."""
    return parts > 1 and batch < WHOLE_ROWS * parts


def compute_max_pieces(batch: int, parts: int) -> int:
    """Returns the pieces of a row for batch-invariant splits, from static shapes. These are as many
    as there are parts per row, so that at most `parts` are merged."""
    return max(1, parts // batch) if may_split(batch, parts) else 1


def assign_whole_rows(cost: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Assigns whole rows to parts in turns, back and forth, from the most expensive row to the
    cheapest.

    Args:
        cost: int32 [B], 0 for a row in no part: its place is after the last part's.

    Returns:
        (order int32 [B], as in `Schedule`, first place of each part int32 [parts + 1]).
    """
    place = jnp.arange(cost.shape[0], dtype=jnp.int32)
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    has_tokens = (cost > 0).astype(jnp.int32)
    number = jnp.sum(has_tokens, dtype=jnp.int32)
    # With at most one row per part the rows keep the batch's order, as in a batch of no more rows
    # than parts.
    ranked = jnp.argsort(-jnp.where(number > parts, cost, has_tokens), stable=True).astype(
        jnp.int32
    )
    num_rounds, num_left = number // parts, number % parts
    rank_in_last_round = jnp.where(num_rounds % 2 == 0, part, part - (parts - num_left))
    firsts = part * num_rounds + jnp.clip(rank_in_last_round, 0, num_left)
    part_of_place = jnp.sum(firsts[1:] <= place[:, None], axis=1, dtype=jnp.int32)
    round_index = place - firsts[part_of_place]
    rank = round_index * parts + jnp.where(
        round_index % 2 == 0, part_of_place, parts - 1 - part_of_place
    )
    return ranked[jnp.where(place < number, rank, place)], firsts


def _worth(pages: jax.Array, rows: jax.Array | int, thresholds: SplitThresholds) -> jax.Array:
    """Returns the number of parts that the pages of the rows pay for."""
    short_parts = jnp.minimum(pages // thresholds.short, thresholds.pieces * rows)
    return jnp.maximum(pages // thresholds.part, short_parts)


def _apart(pages: jax.Array, num_pieces: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (place, page) where each part begins if rows have up to `num_pieces` equal pieces,
    one part each; there must be no more pieces than parts."""
    batch = pages.shape[0]
    num_pieces = jnp.maximum(num_pieces, 1)
    piece = jnp.maximum((pages + num_pieces - 1) // num_pieces, 1)
    pieces_per_row = (pages + piece - 1) // piece
    rows, piece_index = _inside(jnp.cumsum(pieces_per_row), pieces_per_row, part)
    return rows, jnp.where(rows < batch, piece_index * piece[jnp.minimum(rows, batch - 1)], 0)


def _inside(end: jax.Array, length: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the row that contains each of `positions` of a line, B where none is left, by
    counting the rows before it, and the offset in the row. The rows have these lengths and ends."""
    rows = jnp.sum(end <= positions[:, None], axis=1, dtype=jnp.int32)
    return rows, positions - (end - length)[jnp.minimum(rows, end.shape[0] - 1)]


@jax.named_scope("mla_schedule")
def make_schedule(
    seq_lens: jax.Array,
    *,
    parts: int,
    max_pages: int,
    row_cost: int,
    merge_cost: int,
    pieces: int = 0,
    thresholds: SplitThresholds = OF_MANY_ROWS,
    min_piece: int = 1,
    excess_divisor: int | None = None,
) -> Schedule:
    """Divides the pages of all rows into `parts`. With `pieces` each row is split into up to
    `pieces` equal pieces, one part each, and with more rows than parts no row is split.

    A part has at least the pages that `thresholds` requires. Where rows are split into equal
    pieces, a piece has `min_piece` pages or is a row's last. With `excess_divisor` a piece may be
    longer than a part's share by one part in `excess_divisor`.
    No part has a row without tokens: the others are split in the same way with and without it.
    """
    batch = seq_lens.shape[0]
    pages = jnp.clip((seq_lens + PAGE - 1) // PAGE, 0, max_pages)
    real = pages > 0
    cost = jnp.where(real, pages + row_cost, 0)
    order = None
    if batch > parts:
        order, firsts = assign_whole_rows(cost, parts)
        if pieces or not may_split(batch, parts):
            assert pieces <= 1, "with more rows than parts, no row has a second piece"
            return Schedule.whole(firsts, order, max_pages)

    part = jnp.arange(parts + 1, dtype=jnp.int32)
    if pieces:
        max_row_pieces = jnp.clip(_worth(pages, 1, thresholds), 1, pieces)
        rows, first_pages = _apart(pages, max_row_pieces, part)
        return Schedule.of(rows, first_pages, batch, max_pages)

    end = jnp.cumsum(cost)
    total = end[-1]
    number = jnp.sum(real, dtype=jnp.int32)
    used = jnp.clip(_worth(total, number, thresholds), 1, parts)
    size = (total + used - 1) // used
    rows, into = _inside(end, cost, jnp.minimum(part * size, total))
    first_pages = jnp.maximum(into - row_cost, 0)
    first_pages = jnp.where(rows < batch, first_pages, 0)

    # Candidates for the pages of a piece, at most a part's share and the cost of a row. The first
    # one for which there are enough parts is taken.
    longest_piece = size - row_cost + jnp.arange(row_cost + 1, dtype=jnp.int32)
    if excess_divisor is not None:
        longest_piece = jnp.append(longest_piece, size + size // excess_divisor)
    longest_piece = jnp.maximum(longest_piece, min_piece)
    number = (pages[:, None] + longest_piece - 1) // longest_piece
    fits = jnp.sum(number, axis=0, dtype=jnp.int32) <= used
    equal_split = _apart(pages, number[:, jnp.argmax(fits)], part)
    rows, first_pages = (
        jnp.where(jnp.any(fits), x, y)
        for x, y in zip(equal_split, (rows, first_pages), strict=True)
    )

    slack = size // WHOLE_ROWS_SLACK
    if order is None:  # one row per part
        rank = jnp.cumsum(real) - 1
        firsts = jnp.sum(rank < part[:, None], axis=1, dtype=jnp.int32)
        longest = jnp.max(cost)
    else:
        before = jnp.pad(jnp.cumsum(cost[order]), (1, 0))
        longest = jnp.max(jnp.diff(before[firsts]))
        # With at most one row per part, as in a batch of no more rows than parts, few rows are
        # merged.
        most_are_cut = jnp.sum(real) > parts
        slack = jnp.where(most_are_cut, jnp.maximum(merge_cost, slack), slack)
    whole = longest <= size + slack
    if order is not None:
        order = jnp.where(whole, order, jnp.arange(batch, dtype=jnp.int32))
    places, first_pages = jnp.where(whole, firsts, rows), jnp.where(whole, 0, first_pages)
    return Schedule.of(places, first_pages, batch, max_pages, order)
