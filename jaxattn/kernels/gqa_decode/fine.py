"""Lines of `gqa_decode` with more parts than the GPU runs at a time.

The GPU gives the next part to whichever multiprocessor is done, and not all read equally fast. So
long whole pairs are a part each, the longest first. Where the last turn is nearly full, its end
would still be ragged by what the slowest are behind: the last pairs are cut, and the shortest
pieces come last.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxattn.kernels.mla_decode.schedule import Schedule, deal_out

# Whole pairs of so many steps or more, on average, are dealt out to up to so many times the parts
# that the GPU runs at a time.
LONG_PAIR, TIMES_MORE = 96, 4
# The last turn has so many of the multiprocessors or more, of 4, where pairs are cut.
FULL = 3
# What the last pairs are cut into, and the one before them. Of the two partial results that there
# are for each multiprocessor, SHORT pieces take 8 of 11.
SHORT, HALF = 8, 2
LEAST_PIECE = 8  # steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FineLine:
    """
    Attributes:
        line: the parts. Where pairs are not long they are the usual ones, and empty ones.
        first_slots: int32 [parts], the partial result of each part's first piece.
    """

    line: Schedule
    first_slots: jax.Array


def may_have_more(pairs: int, parts: int, steps: int) -> bool:
    """Whether there are such lines, from static shapes."""
    return pairs > parts and steps >= LONG_PAIR


def tail_of(parts: int) -> tuple[int, int]:
    """How many of the last pairs are cut in halves, and how many after them in SHORT pieces: two
    partial results for each of `parts` are enough."""
    short = 2 * parts // (SHORT + 3)
    return (2 * parts - SHORT * short) // HALF, short


def in_more_parts(line: Schedule, pages: jax.Array, *, cost: int, cut: bool) -> FineLine:
    """The line of more pairs than parts, in more parts.

    Args:
        pages: int32 [pairs], steps of each.
        cost: of a pair beside its steps, in steps.
        cut: whether pairs may be cut here that `line` does not cut.
    """
    assert line.order is not None, "of more pairs than parts there is an order"
    pairs = pages.shape[0]
    number = jnp.sum(pages > 0, dtype=jnp.int32)
    dear = jnp.where(pages > 0, pages + cost, 0)
    if pairs > TIMES_MORE * line.parts:
        more, cut = TIMES_MORE * line.parts, False
        order, firsts = deal_out(dear, more)
        cuts, slots = jnp.stack([firsts, jnp.zeros_like(firsts)]), line.slots
        first_slots = jnp.zeros(more, jnp.int32)
    else:
        halves, shorts = tail_of(line.parts) if cut else (0, 0)
        more = pairs + halves * (HALF - 1) + shorts * (SHORT - 1)
        order = jnp.argsort(-dear, stable=True).astype(jnp.int32)
        full = 4 * (number % line.parts) >= FULL * line.parts
        cuts, first_slots, slots = _with_a_tail(pages[order], number, full, more, halves, shorts)
        slots = jnp.zeros_like(slots).at[:, order].set(slots)

    slots = jnp.pad(slots, ((0, 4 - len(slots)), (0, 0)), constant_values=2)
    usual_slots = jnp.pad(line.slots, ((0, 1), (0, 0)), constant_values=2)
    usual_cuts = jnp.pad(line.cuts, ((0, 0), (0, more - line.parts)), mode="edge")
    usual_first = 2 * jnp.arange(more, dtype=jnp.int32)
    long = jnp.sum(pages) >= LONG_PAIR * number
    whole = (jnp.max(line.slots[1]) == 0) & long
    picked = dataclasses.replace(
        line,
        cuts=jnp.where(whole, cuts, usual_cuts),
        order=jnp.where(whole, order, line.order),
        slots=jnp.where(whole, slots, usual_slots),
    )
    return FineLine(picked, jnp.where(whole, first_slots, usual_first))


def _with_a_tail(
    pages: jax.Array, number: jax.Array, full: jax.Array, parts: int, halves: int, shorts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(cuts [2, parts + 1], first_slots [parts], slots [4, pairs]) of pairs in this order, of which
    the first `number` have steps; whole ones where `full` is False."""
    place = jnp.arange(pages.shape[0], dtype=jnp.int32)
    left = number - place  # pairs from this one on
    pieces = jnp.where(left <= shorts, SHORT, jnp.where(left <= shorts + halves, HALF, 1))
    pieces = jnp.where(full, pieces, 1)
    size = (pages + pieces - 1) // pieces
    size = jnp.where(pieces > 1, jnp.maximum(size, LEAST_PIECE), jnp.maximum(size, 1))
    pieces = (pages + size - 1) // size  # 0 behind the last
    end = jnp.cumsum(pieces)
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    at = jnp.sum(end <= part[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(at, pages.shape[0] - 1)
    begun = jnp.where(at < number, (part - (end - pieces)[inside]) * size[inside], 0)
    is_cut = pieces > 1
    slot_end = jnp.cumsum(jnp.where(is_cut, pieces, 0))
    first = slot_end - pieces  # of pairs that are cut
    slots = jnp.stack([first, pieces, first, jnp.ones_like(first)])
    first_slots = (first[inside] + part - (end - pieces)[inside])[:-1]
    return (
        jnp.stack([jnp.minimum(at, number), begun]),
        jnp.where(is_cut[inside[:-1]], first_slots, 0),
        jnp.where(is_cut, slots, 0),
    )
