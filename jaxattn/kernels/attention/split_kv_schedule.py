"""The split-KV schedule of `mla_decode`: rows' pages assigned to blocks, on the device.

The pages of all rows stand in a line, row after row, and the line is cut into parts about as long
as each other, one for each block that the GPU runs at a time. A part is whole rows but for its
first and its last, of which it may have a piece: at most two partial results a part, whatever the
batch, so the room for them is known from static shapes. Lengths change without a host round trip
and without a recompilation.

A part that ends one row and begins another has what a row costs beside its pages twice. So where
each row can be cut in equal pieces, a part for each, and no part gets longer than that, rows are.

Of more rows than parts no row need be cut for the parts to be about as long. The rows then stand in
the line in an order of their own, in which every part is whole rows: from the longest to the
shortest they are dealt out to the parts in turns, in even turns from the first part to the last and
in odd ones back, so that long rows lie beside short ones. Where that leaves a part much longer than
the others, as one very long row does, the rows stand in the batch's order and the line is cut.

Where a row is cut depends on the others, and so does the rounding of what is merged. With `pieces`
a row is cut in as many equal ones, whatever the others are, and of more rows than parts none is: a
row's bits are its own.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels.hopper.device import plain_copies

TILE = 64  # packed rows (query token, head) of a block
PAGE = 64  # tokens that a block takes at a time; what is called a page here, whatever the cache has

# What a row costs its part beside its pages (its queries' load, its output), in pages, where its
# packed rows are many, and where they are few.
ROW_COST, FEW_ROWS_COST = 5, 3
MOST_FEW_ROWS = 24
# What partial results and their merging cost where most parts have some, in pages of a part, where
# packed rows are many, and where they are few.
MERGE_COST, FEW_MERGE_COST = 12, 3
# A part shorter than this costs more in partial results than it saves; a shorter one may do where
# a row has up to so many, which are merged in two turns.
MIN_PART = 6
FEW_PIECES = 16
# Where packed rows are few, two warpgroups take a part's pages in turns and wait for each: a page
# of each is the shortest part. So many partial results of a row are merged in one turn.
FEW_ROWS_MIN_PART, FEW_ROWS_SHORT_PART, FEW_ROWS_PIECES = 4, 2, 32
# Parts of whole rows have no partial results: taken when they are longer by at most one part in
# this, or by what the merging costs.
WHOLE_ROWS_SLACK = 16
# From this many rows a part on, rows are never split and no room is kept for partial results.
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
            results (0: the row's output is written directly), and the index of its other partial
            results, see `slot_of`. Some schedules have a fourth number: the stride of the other
            partial results, which is otherwise 2.
        order: int32 [B], the row at each place; every row occurs once. If a cut is inside of a row,
            row i is at place i. None: row i is always at place i.
        max_pages: the largest number of pages of a row; 0 if unknown.
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
        row.
        """
        return self.cuts[1]

    @property
    def parts(self) -> int:
        return self.cuts.shape[1] - 1

    def check(self, op: str, queries: tuple[int, ...], max_pages: int) -> None:
        """Raises ValueError if the schedule is for other rows."""
        made_for, batch = self.slots.shape[-1], queries[0]
        if made_for != batch:
            raise ValueError(
                f"{op}: the schedule is of {made_for} rows, q {queries} has {batch}; make it with "
                "decode_schedule from these seq_lens"
            )
        if self.max_pages not in (0, max_pages):
            raise ValueError(
                f"{op}: the schedule is of rows of up to {self.max_pages} times {PAGE} tokens, "
                f"block_tables and kv_cache have {max_pages}; make it with decode_schedule from "
                "these max_pages and page_size"
            )

    @classmethod
    def of(
        cls, places: jax.Array, pages: jax.Array, batch: int, max_pages: int = 0,
        order: jax.Array | None = None,
    ) -> "Schedule":  # fmt: skip
        """The schedule with these cuts, which determine the indices of partial results."""
        # A row that is cut has its own place: what follows is of rows.
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        starts, begun = places[:-1], pages[:-1]
        by_its_start = (starts < row) | ((starts == row) & (begun == 0))
        first = jnp.sum(by_its_start, axis=1, dtype=jnp.int32) - 1
        last = jnp.sum(starts <= row, axis=1, dtype=jnp.int32) - 1
        number = jnp.where(last > first, last - first + 1, 0)
        # A part's first piece is its partial result 0, another one its partial result 1.
        begins = starts[jnp.maximum(first, 0)] == row[:, 0]
        slots = jnp.stack([2 * first + ~begins, number, 2 * first])
        return cls(jnp.stack([places, pages]), slots, order, max_pages=max_pages)

    @classmethod
    def whole(cls, places: jax.Array, order: jax.Array, max_pages: int) -> "Schedule":
        """The schedule that splits no row, with parts that begin at `places`, and without partial
        results.
        """
        cuts = jnp.stack([places, jnp.zeros_like(places)])
        return cls(cuts, jnp.zeros((3, order.shape[0]), jnp.int32), order, max_pages=max_pages)

    @staticmethod
    def slot_of(slots: Any, index: Any) -> Any:
        """The partial result of a row's piece `index`, `slots` being the row's three, or four."""
        apart = slots[3] if len(slots) > 3 else 2
        return jnp.where(index == 0, slots[0], slots[2] + apart * index)


def copies_of(page_size: int) -> int:
    """Copies that bring 64 tokens, from pages of 16, 32, 64 or 128."""
    return max(1, PAGE // page_size)


def num_steps(max_pages: int, page_size: int) -> int:
    """64 tokens at a time, `max_pages` pages of the cache."""
    return -(-max_pages * page_size // PAGE)


def num_tiles(q_len: int, num_heads: int) -> int:
    return -(-q_len * num_heads // TILE)


def few_rows(q_len: int, num_heads: int) -> bool:
    """Whether a request has so few packed rows that they are the products' columns (with 32 the
    kernel whose products have them as rows is the faster)."""
    return q_len * num_heads <= MOST_FEW_ROWS


def packed_rows(q_len: int, num_heads: int) -> int:
    """Rows that results keep of a request: S * H, and what a kernel writes beside them. Where the
    assembler lacks plain copies, few rows of a block-scaled cache take the kernel of tiles."""
    if few_rows(q_len, num_heads) and plain_copies():
        return -(-q_len * num_heads // 8) * 8
    return num_tiles(q_len, num_heads) * TILE


def row_cost(q_len: int, num_heads: int) -> int:
    return FEW_ROWS_COST if few_rows(q_len, num_heads) else ROW_COST


def merge_cost(q_len: int, num_heads: int) -> int:
    return FEW_MERGE_COST if few_rows(q_len, num_heads) else MERGE_COST


class SplitThresholds(NamedTuple):
    """Pages of a part that is worth its partial results.

    Attributes:
        part: of any.
        short: where a row has up to `pieces` of them.
    """

    part: int = MIN_PART
    short: int = MIN_PART
    pieces: int = FEW_PIECES


OF_MANY_ROWS = SplitThresholds()
# Of one request with one tile: Kimi-Linear's 4,096 tokens took 13.6 us so, 16.4 in parts of six.
OF_ONE_TILE = SplitThresholds(short=4)
OF_FEW_ROWS = SplitThresholds(FEW_ROWS_MIN_PART, FEW_ROWS_SHORT_PART, FEW_ROWS_PIECES)


def split_thresholds(batch: int, q_len: int, num_heads: int) -> SplitThresholds:
    if few_rows(q_len, num_heads):
        return OF_FEW_ROWS
    return OF_ONE_TILE if batch * num_tiles(q_len, num_heads) == 1 else OF_MANY_ROWS


def num_parts(batch: int, q_len: int, num_heads: int, max_pages: int, num_sms: int) -> int:
    """Parts of a step, from static shapes: a block for each streaming multiprocessor and tile, or
    fewer where `batch` rows of `max_pages` pages are not worth as many."""
    least = split_thresholds(batch, q_len, num_heads).short
    worth = batch * (max_pages + row_cost(q_len, num_heads)) // least
    return max(1, min(num_sms // num_tiles(q_len, num_heads), worth))


def may_split(batch: int, parts: int) -> bool:
    """Whether rows are split at all, from static shapes: the arena has room for it or has not."""
    return parts > 1 and batch < WHOLE_ROWS * parts


def most_pieces(batch: int, parts: int) -> int:
    """Pieces of a row where rows are cut alike in every batch, from static shapes: as many as there
    are parts for it, so that no more than `parts` are merged."""
    return max(1, parts // batch) if may_split(batch, parts) else 1


def assign_whole_rows(cost: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Whole rows to parts in turns, forth and back, from the dearest row to the cheapest.

    Args:
        cost: int32 [B], 0 of a row that no part has: its place is behind the last part's.

    Returns:
        (order int32 [B], as `Schedule` has it, first place of each part int32 [parts + 1]).
    """
    place = jnp.arange(cost.shape[0], dtype=jnp.int32)
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    real = (cost > 0).astype(jnp.int32)
    number = jnp.sum(real, dtype=jnp.int32)
    # One row a part: they may as well stay as they are, as in a batch that has no more.
    ranked = jnp.argsort(-jnp.where(number > parts, cost, real), stable=True).astype(jnp.int32)
    turns, more = number // parts, number % parts
    in_last_turn = jnp.where(turns % 2 == 0, part, part - (parts - more))
    firsts = part * turns + jnp.clip(in_last_turn, 0, more)
    mine = jnp.sum(firsts[1:] <= place[:, None], axis=1, dtype=jnp.int32)
    turn = place - firsts[mine]
    rank = turn * parts + jnp.where(turn % 2 == 0, mine, parts - 1 - mine)
    return ranked[jnp.where(place < number, rank, place)], firsts


def _worth(pages: jax.Array, rows: jax.Array | int, least: SplitThresholds) -> jax.Array:
    """The parts that so many pages of so many rows are worth."""
    few = jnp.minimum(pages // least.short, least.pieces * rows)
    return jnp.maximum(pages // least.part, few)


def _apart(pages: jax.Array, wanted: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(place, page) where each part begins if rows have up to so many equal pieces, a part each: no
    more of them than there are parts."""
    batch = pages.shape[0]
    wanted = jnp.maximum(wanted, 1)
    piece = jnp.maximum((pages + wanted - 1) // wanted, 1)
    number = (pages + piece - 1) // piece
    rows, into = _inside(jnp.cumsum(number), number, part)
    return rows, jnp.where(rows < batch, into * piece[jnp.minimum(rows, batch - 1)], 0)


def _inside(end: jax.Array, length: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row that lies across each place `at` of a line, by counting the rows before it, B where
    none is left; and how far into the row that is. The rows are so long, and end there."""
    rows = jnp.sum(end <= at[:, None], axis=1, dtype=jnp.int32)
    return rows, at - (end - length)[jnp.minimum(rows, end.shape[0] - 1)]


@jax.named_scope("mla_schedule")
def make_schedule(
    seq_lens: jax.Array,
    *,
    parts: int,
    max_pages: int,
    row_cost: int,
    merge_cost: int,
    pieces: int = 0,
    least: SplitThresholds = OF_MANY_ROWS,
    least_piece: int = 1,
    longer: int | None = None,
) -> Schedule:
    """Cuts the pages of all rows into `parts`; with `pieces` each row into up to so many equal
    pieces, which are a part each, and of more rows than parts none.

    A part has the pages that `least` says, or more. Where rows are cut alike, a piece has
    `least_piece` pages or is a row's last; with `longer` it may be longer than a part's share by
    one part in so many.
    No part has a row without tokens: the others are cut alike with and without it.
    """
    batch = seq_lens.shape[0]
    pages = jnp.clip((seq_lens + PAGE - 1) // PAGE, 0, max_pages)
    real = pages > 0
    cost = jnp.where(real, pages + row_cost, 0)
    order = None
    if batch > parts:
        order, firsts = assign_whole_rows(cost, parts)
        if pieces or not may_split(batch, parts):
            assert pieces <= 1, "of more rows than parts none has a second piece"
            return Schedule.whole(firsts, order, max_pages)

    part = jnp.arange(parts + 1, dtype=jnp.int32)
    if pieces:
        wanted = jnp.clip(_worth(pages, 1, least), 1, pieces)
        rows, begun = _apart(pages, wanted, part)
        return Schedule.of(rows, begun, batch, max_pages)

    end = jnp.cumsum(cost)
    total = end[-1]
    number = jnp.sum(real, dtype=jnp.int32)
    used = jnp.clip(_worth(total, number, least), 1, parts)
    size = (total + used - 1) // used
    rows, into = _inside(end, cost, jnp.minimum(part * size, total))
    begun = jnp.maximum(into - row_cost, 0)
    begun = jnp.where(rows < batch, begun, 0)

    # Pages of a piece: as many as leave no part longer than its share and what a row costs. The
    # first with which there are parts enough is taken.
    longest_piece = size - row_cost + jnp.arange(row_cost + 1, dtype=jnp.int32)
    if longer is not None:
        longest_piece = jnp.append(longest_piece, size + size // longer)
    longest_piece = jnp.maximum(longest_piece, least_piece)
    number = (pages[:, None] + longest_piece - 1) // longest_piece
    fits = jnp.sum(number, axis=0, dtype=jnp.int32) <= used
    alike = _apart(pages, number[:, jnp.argmax(fits)], part)
    rows, begun = (
        jnp.where(jnp.any(fits), x, y) for x, y in zip(alike, (rows, begun), strict=True)
    )

    slack = size // WHOLE_ROWS_SLACK
    if order is None:  # one row a part
        rank = jnp.cumsum(real) - 1
        firsts = jnp.sum(rank < part[:, None], axis=1, dtype=jnp.int32)
        longest = jnp.max(cost)
    else:
        before = jnp.pad(jnp.cumsum(cost[order]), (1, 0))
        longest = jnp.max(jnp.diff(before[firsts]))
        # With a row a part or less, as in a batch that has no more, the merging is of few rows.
        most_are_cut = jnp.sum(real) > parts
        slack = jnp.where(most_are_cut, jnp.maximum(merge_cost, slack), slack)
    whole = longest <= size + slack
    if order is not None:
        order = jnp.where(whole, order, jnp.arange(batch, dtype=jnp.int32))
    places, begun = jnp.where(whole, firsts, rows), jnp.where(whole, 0, begun)
    return Schedule.of(places, begun, batch, max_pages, order)
