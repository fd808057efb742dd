"""Who loads ahead of a part's pieces finds the pages that consumers take, or one waits for ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.attention.work_iterator import WorkIterator

ROWS, PAGES = 4, 7


def walks(begin, end, lens, order):
    """How many pages there are and their (row, page): piece by piece, ahead, and of the first place
    alone."""
    table, cache = np.zeros((ROWS, PAGES), np.int32), jax.ShapeDtypeStruct((1, 1, 64, 576), "uint8")
    part = WorkIterator(tuple(begin), tuple(end), lens, table, cache, 0, 0, order, None)
    nothing = jnp.int32(0), jnp.full((ROWS * PAGES, 2), -1)

    def add(taken, row, page):
        count, pages = taken
        return count + 1, pages.at[count].set(jnp.stack([row, page]))

    def take(place, start, steps, taken):
        each = lambda i, taken: add(taken, place.row, start + i)  # noqa: E731
        return jax.lax.fori_loop(0, steps, each, taken)

    def ahead(state):
        (place, page, stop), taken = state
        return part.settle((place, page + 1, stop)), add(taken, place.row, page)

    some_left = lambda state: state[0][1] < state[0][2]  # noqa: E731
    first = part.first(), nothing
    return (
        part.each_piece(take, nothing),
        jax.lax.while_loop(some_left, ahead, first)[1],
        take(*part.first_piece(), nothing),
    )


def expected(begin, end, lens, order, places=ROWS):
    pages = []
    for place in range(begin[0], min(end[0] + 1, begin[0] + places, ROWS)):
        row = place if order is None else order[place]
        start = begin[1] if place == begin[0] else 0
        stop = min(-(-lens[row] // 64), end[1] if place == end[0] else PAGES)
        pages += [(row, page) for page in range(start, stop)]
    return pages


@pytest.mark.parametrize("ordered", [False, True])
def test_ahead_and_behind_agree_for_any_lengths_and_cuts(ordered):
    """Cuts that know nothing of the lengths: rows may have shrunk since a schedule was made."""
    rng, cases = np.random.default_rng(0), 300
    lens = rng.integers(0, PAGES * 64 + 1, (cases, ROWS)) * rng.integers(0, 2, (cases, ROWS))
    line = np.sort(rng.integers(0, ROWS * PAGES + 1, (cases, 2)), axis=1)
    rows, pages = line // PAGES, line % PAGES
    cuts = np.stack([rows, pages], axis=-1)  # [cases, begin and end, (row, page)]
    order = rng.permuted(np.tile(np.arange(ROWS), (cases, 1)), axis=1) if ordered else None
    given = [cuts[:, 0], cuts[:, 1], lens, order]
    args = [None if x is None else jnp.asarray(x, jnp.int32) for x in given]
    of_places = ROWS, ROWS, 1
    for places, (count, taken) in zip(of_places, jax.jit(jax.vmap(walks))(*args), strict=True):
        for i in range(cases):
            wanted = expected(*(None if x is None else x[i] for x in given), places)
            assert [tuple(x) for x in np.asarray(taken[i, : int(count[i])])] == wanted
