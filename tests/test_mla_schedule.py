"""How a batch's pages are dealt out: every page once, in order, and about as many to each part."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.kernels.mla_schedule import MIN_PART, ROW_COST, make_schedule, may_split


def pieces(lens, parts, max_pages):
    """[(row, first page, end)] of each part, as the kernel's blocks walk them."""
    schedule = make_schedule(jnp.asarray(lens, jnp.int32), parts=parts, max_pages=max_pages)
    rows, pages = np.asarray(schedule.rows), np.asarray(schedule.pages)
    held = []
    for part in range(parts):
        mine = []
        for row in range(rows[part], rows[part + 1] + (pages[part + 1] > 0)):
            start = pages[part] if row == rows[part] else 0
            whole = min(-(-lens[row] // 64), max_pages)
            end = pages[part + 1] if row == rows[part + 1] else whole
            if end > start:
                mine.append((row, start, end))
        held.append(mine)
    return held, np.asarray(schedule.spans)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=12),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([4, 32]),
)
def test_every_page_belongs_to_one_part(lens, parts, max_pages):
    held, spans = pieces(lens, parts, max_pages)
    walked = [
        (row, page) for mine in held for row, start, end in mine for page in range(start, end)
    ]
    expected = [
        (row, page) for row, n in enumerate(lens) for page in range(min(-(-n // 64), max_pages))
    ]
    assert walked == expected
    for row in range(len(lens)):
        parts_of_row = [part for part, mine in enumerate(held) if row in [r for r, _, _ in mine]]
        if parts_of_row:
            assert (spans[0, row], spans[1, row]) == (parts_of_row[0], parts_of_row[-1])
        else:
            assert spans[1, row] <= spans[0, row]  # nothing to merge
    for mine in held:  # what the two partial results of a part are kept for
        whole = [end - start == min(-(-lens[row] // 64), max_pages) for row, start, end in mine]
        assert all(whole[1:-1])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.data())
def test_padding_rows_do_not_move_the_cuts(lens, data):
    places = data.draw(st.lists(st.integers(0, len(lens)), max_size=4))
    padded = list(lens)
    for place in sorted(places, reverse=True):
        padded.insert(place, 0)
    plain, _ = pieces(lens, 5, 64)
    beside, _ = pieces(padded, 5, 64)
    real = [row for row, n in enumerate(padded) if n]
    renamed = [[(real.index(row), start, end) for row, start, end in mine] for mine in beside]
    assert renamed == plain


def test_rows_of_a_length_stay_whole_and_random_ones_are_shared_evenly():
    held, _ = pieces([4096] * 128, 66, 64)
    assert all(end - start == 64 for mine in held for _, start, end in mine)

    lens = np.random.default_rng(0).integers(1, 8193, 128).tolist()
    held, _ = pieces(lens, 66, 128)
    loads = [sum(end - start + ROW_COST for _, start, end in mine) for mine in held]
    assert max(loads) <= 1.08 * np.mean(loads)


def test_a_long_row_alone_takes_every_part_and_a_short_one_few():
    held, spans = pieces([65536], 66, 1024)
    assert sum(map(bool, held)) == 65 and spans.tolist() == [[0], [64]]
    held, _ = pieces([512], 66, 1024)
    assert sum(bool(mine) for mine in held) == (8 + ROW_COST) // MIN_PART


@pytest.mark.parametrize("batch, splits", [(1055, True), (1056, False)])
def test_a_batch_of_many_rows_a_part_is_not_split(batch, splits):
    assert may_split(batch, 66) == splits
    held, _ = pieces([100] * 8 + [2000] * 8, 1, 64)
    assert sum(end - start for _, start, end in held[0]) == 8 * 2 + 8 * 32
