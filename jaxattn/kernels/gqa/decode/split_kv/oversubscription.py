"""Schedules of `gqa_decode` with more parts than the GPU runs at a time.

A pair is a row and a KV head. A part is the work of one CTA, one pair after another. A turn (wave)
is as many parts as the GPU runs at a time. A line is all parts, in the order in which they begin.

The GPU gives the next part to the first free multiprocessor, and not all read equally fast. So if
whole pairs are long, all but the last turn or two of them are dealt to parts in advance. The pairs
of the end are one part each, the longest first. If the last turn is nearly full, the lag of the
slowest multiprocessors would still make its end ragged: the last pairs are split, and the shortest
pieces come last.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxattn.kernels.attention.split_kv_schedule import Schedule

LONG_PAIR = 96  # average steps of a pair
# A last turn that fills this many quarters of the multiprocessors or more is the end by itself, and
# its last pairs are split. Otherwise the end also includes the turn before it.
FULL = 3
# Pieces of each of the last pairs, and of those before them. The former have 8 of 11 of the partial
# results, of which there are two for each multiprocessor.
SHORT, HALF = 8, 2
LEAST_PIECE = 8  # steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OversubscribedSchedule:
    """A schedule of more parts than run at a time, and the slots of their partial results.

    Attributes:
        line: The parts. If pairs are not long, these are the usual parts followed by empty ones.
        first_slots: int32 [parts], the slot of the partial result of each part's first piece.
    """

    line: Schedule
    first_slots: jax.Array


def may_oversubscribe(pairs: int, parts: int, steps: int) -> bool:
    """Whether there are such schedules, from static shapes."""
    return pairs > parts and steps >= LONG_PAIR


def tail_of(parts: int) -> tuple[int, int]:
    """Returns how many of the last pairs are split into halves, and how many after them into SHORT
    pieces: two partial results for each of `parts` suffice."""
    short = 2 * parts // (SHORT + 3)
    return (2 * parts - SHORT * short) // HALF, short


def compute_max_parts(pairs: int, parts: int, more: int) -> int:
    """Returns the most parts of such a line: the usual ones for the pairs dealt in advance, and
    those of the end. A nearly full turn has `more` parts in addition to its pairs."""
    return min(pairs + more, parts + max(parts - 1 + more, parts + FULL * parts // 4))


def full_waves(number: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Returns (turns of pairs that are dealt in advance, whether the last turn is nearly full)."""
    full = 4 * (number % parts) >= FULL * parts
    return jnp.maximum(number // parts - jnp.where(full, 0, 1), 0), full


def oversubscribe(
    line: Schedule, pages: jax.Array, *, cost: int, cut: bool
) -> OversubscribedSchedule:
    """Returns the line of more pairs than parts, divided into more parts.

    Args:
        pages: int32 [pairs], the steps of each pair.
        cost: The cost of a pair beyond its steps, in steps.
        cut: Whether pairs may be split here that `line` does not split.
    """
    assert line.order is not None, "with more pairs than parts, the schedule has an order"
    usual, place = line.parts, jnp.arange(pages.shape[0], dtype=jnp.int32)
    halves, shorts = tail_of(usual) if cut else (0, 0)
    parts = compute_max_parts(pages.shape[0], usual, halves * (HALF - 1) + shorts * (SHORT - 1))
    number = jnp.sum(pages > 0, dtype=jnp.int32)
    turns, full = full_waves(number, usual)

    # Back and forth, as in `assign_whole_rows`, except the end.
    ranked = jnp.argsort(-jnp.where(pages > 0, pages + cost, 0), stable=True).astype(jnp.int32)
    mine, turn = place // jnp.maximum(turns, 1), place % jnp.maximum(turns, 1)
    rank = turn * usual + jnp.where(turn % 2 == 0, mine, usual - 1 - mine)
    at_the_end = place >= turns * usual
    order = ranked[jnp.where(at_the_end, place, rank)]

    left = number - place  # pairs from this one on
    pieces = jnp.where(left <= shorts, SHORT, jnp.where(left <= shorts + halves, HALF, 1))
    pieces = jnp.where(full & at_the_end, pieces, 1)
    steps = pages[order]
    size = (steps + pieces - 1) // pieces
    size = jnp.where(pieces > 1, jnp.maximum(size, LEAST_PIECE), jnp.maximum(size, 1))
    pieces = (steps + size - 1) // size  # 0 after the last pair
    begin = jnp.where(at_the_end, pieces, turn == 0)  # parts that begin in the pair
    cuts, at = _cuts(begin, size, number, parts)

    is_cut = pieces > 1
    first = jnp.cumsum(jnp.where(is_cut, pieces, 0)) - pieces  # partial results, one after another
    slots = jnp.where(is_cut, jnp.stack([first, pieces, first, jnp.ones_like(first)]), 0)
    first_slots = first[at] + cuts[1, :-1] // size[at]

    usual_cuts = jnp.pad(line.cuts, ((0, 0), (0, parts - usual)), mode="edge")
    usual_slots = jnp.pad(line.slots, ((0, 1), (0, 0)), constant_values=2)
    usual_first = 2 * jnp.arange(parts, dtype=jnp.int32)
    long = jnp.sum(pages) >= LONG_PAIR * number
    whole = (jnp.max(line.slots[1]) == 0) & long
    picked = dataclasses.replace(
        line,
        cuts=jnp.where(whole, cuts, usual_cuts),
        order=jnp.where(whole, order, line.order),
        slots=jnp.where(whole, jnp.zeros_like(slots).at[:, order].set(slots), usual_slots),
    )
    return OversubscribedSchedule(picked, jnp.where(whole, first_slots, usual_first))


def _cuts(
    begin: jax.Array, size: jax.Array, number: jax.Array, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (cuts [2, parts + 1] if `begin` parts begin at each of the first `number` places, one
    every `size` steps; the place of each part [parts])."""
    end, part = jnp.cumsum(begin), jnp.arange(parts + 1, dtype=jnp.int32)
    at = jnp.sum(end <= part[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(at, begin.shape[0] - 1)
    begun = jnp.where(at < number, (part - (end - begin)[inside]) * size[inside], 0)
    return jnp.stack([jnp.minimum(at, number), begun]), inside[:-1]
