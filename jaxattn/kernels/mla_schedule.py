"""Who attends to what: a row's pages dealt out to the blocks of `mla_decode`, on the device.

The pages of all rows stand in a line, row after row, and the line is cut into equal parts, one for
each block that the GPU runs at a time. A part is whole rows but for its first and its last, of
which it may have a piece: at most two partial results a part, whatever the batch, so the room for
them is known from static shapes. Lengths change without a host round trip and without a
recompilation.
"""

import dataclasses

import jax
import jax.numpy as jnp

TILE = 64  # packed rows (query token, head) of a block
PAGE = 64

# What a row costs its part beside its pages (its queries' load, its output), in pages.
ROW_COST = 2
# A part shorter than this costs more in partial results than it saves.
MIN_PART = 6
# Parts of whole rows have no partial results: taken when they are longer by at most one part in
WHOLE_ROWS_SLACK = 16
# From this many rows a part on, rows are never split and no room is kept for partial results.
WHOLE_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Where each part begins: cut p is (row, page) for p from 0 to `parts`, the last is the end.

    Attributes:
        cuts: int32 [2, parts + 1], `rows` and `pages` in one array, as the kernels take them.
        spans: int32 [2, B], first and last part that has a piece of the row.
    """

    cuts: jax.Array
    spans: jax.Array

    @property
    def rows(self) -> jax.Array:
        """int32 [parts + 1], the row that a part begins in."""
        return self.cuts[0]

    @property
    def pages(self) -> jax.Array:
        """int32 [parts + 1], the page of that row; 0 is the row's own start."""
        return self.cuts[1]

    @property
    def parts(self) -> int:
        return self.cuts.shape[1] - 1

    @classmethod
    def of(cls, rows: jax.Array, pages: jax.Array, batch: int) -> "Schedule":
        """The schedule with these cuts; `spans` follow from them."""
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        starts, begun = rows[:-1], pages[:-1]
        by_its_start = (starts < row) | ((starts == row) & (begun == 0))
        first = jnp.sum(by_its_start, axis=1, dtype=jnp.int32) - 1
        last = jnp.sum(starts <= row, axis=1, dtype=jnp.int32) - 1
        return cls(jnp.stack([rows, pages]), jnp.stack([first, last]))


def num_tiles(q_len: int, num_heads: int) -> int:
    return -(-q_len * num_heads // TILE)


def num_parts(batch: int, q_len: int, num_heads: int, max_pages: int, num_sms: int) -> int:
    """Parts of a step, from static shapes: a block for each streaming multiprocessor and tile, or
    fewer where `batch` rows of `max_pages` pages are not worth as many."""
    worth = batch * (max_pages + ROW_COST) // MIN_PART
    return max(1, min(num_sms // num_tiles(q_len, num_heads), worth))


def may_split(batch: int, parts: int) -> bool:
    """Whether rows are split at all, from static shapes: the arena has room for it or has not."""
    return parts > 1 and batch < WHOLE_ROWS * parts


@jax.named_scope("mla_schedule")
def make_schedule(seq_lens: jax.Array, *, parts: int, max_pages: int) -> Schedule:
    """Cuts the pages of all rows into `parts`.

    A row without tokens has no place in the line: the others are cut alike with and without it.
    """
    batch = seq_lens.shape[0]
    pages = jnp.clip((seq_lens + PAGE - 1) // PAGE, 0, max_pages)
    real = pages > 0
    cost = jnp.where(real, pages + ROW_COST, 0)
    end = jnp.cumsum(cost)
    total = end[-1]
    used = jnp.clip(total // MIN_PART, 1, parts)
    size = (total + used - 1) // used
    part = jnp.arange(parts + 1, dtype=jnp.int32)[:, None]
    at = jnp.minimum(part[:, 0] * size, total)
    # The row that lies across a cut, by counting the rows before it; B where no row is left.
    rows = jnp.sum(end <= at[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(rows, batch - 1)
    begun = jnp.maximum(at - (end - cost)[inside] - ROW_COST, 0)
    begun = jnp.where(rows < batch, begun, 0)
    if not may_split(batch, parts):
        return Schedule.of(rows, jnp.zeros_like(begun), batch)

    # Whole rows, as many to each part: as short where the rows are of a length.
    rank = jnp.cumsum(real) - 1
    each = rank[-1] // parts + 1
    mine = real & (rank // each == part)
    longest = jnp.max(jnp.sum(jnp.where(mine, cost, 0), axis=1))
    whole = longest <= size + size // WHOLE_ROWS_SLACK
    firsts = jnp.sum(rank < part * each, axis=1, dtype=jnp.int32)
    return Schedule.of(jnp.where(whole, firsts, rows), jnp.where(whole, 0, begun), batch)
