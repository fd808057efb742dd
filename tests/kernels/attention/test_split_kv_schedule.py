"""How a batch's pages are dealt out: every page once, and about as many to each part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.bench.attention.mla import lengths as bench_lengths
from jaxattn.kernels.attention.split_kv_schedule import (
    FEW_MERGE_COST,
    FEW_ROWS_COST,
    MERGE_COST,
    MIN_PART,
    ROW_COST,
    compute_max_pieces,
    make_schedule,
    may_split,
)
from jaxattn.kernels.mla.decode.decode_schedule import decode_schedule

schedule_of = jax.jit(
    make_schedule, static_argnames=("parts", "max_pages", "row_cost", "merge_cost", "pieces")
)
# Few rows, parts and pages, since each of these is compiled: fewer rows than parts, and more.
sizes = st.sampled_from([(1, 5, 32), (4, 5, 4), (4, 1, 32), (12, 1, 4), (12, 5, 32)]).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(0, 3000), min_size=size[0], max_size=size[0]),
        *map(st.just, size[1:]),
    )
)


def pieces(lens, parts, max_pages, most=0, row_cost=ROW_COST, merge_cost=MERGE_COST):
    """[(row, first page, end)] of each part, as the kernel's blocks walk them."""
    schedule = schedule_of(
        jnp.asarray(lens, jnp.int32),
        parts=parts,
        max_pages=max_pages,
        row_cost=row_cost,
        merge_cost=merge_cost,
        pieces=most,
    )
    places, pages = np.asarray(schedule.places), np.asarray(schedule.pages)
    assert (schedule.order is not None) == (len(lens) > parts)
    order = np.asarray(batch_order(lens) if schedule.order is None else schedule.order)
    assert sorted(order) == batch_order(lens)
    held = []
    for part in range(parts):
        mine = []
        for place in range(places[part], places[part + 1] + (pages[part + 1] > 0)):
            row = int(order[place])
            start = pages[part] if place == places[part] else 0
            whole = min(-(-lens[row] // 64), max_pages)
            end = pages[part + 1] if place == places[part + 1] else whole
            if start < end:
                mine.append((row, start, end))
        held.append(mine)
    return held, jax.tree.map(np.asarray, schedule)


def batch_order(lens):
    return list(range(len(lens)))


def dealt(lens, parts, max_pages, row_cost=ROW_COST):
    """The rows of each part, whole rows dealt out in turns; and the longest part's cost."""
    cost = np.minimum(-(-np.asarray(lens) // 64), max_pages) + row_cost
    real = np.flatnonzero(lens)
    if len(real) > parts:
        real = real[np.argsort(-cost[real], kind="stable")]
    held = [[] for _ in range(parts)]
    for turn, first in enumerate(range(0, len(real), parts)):
        forth_or_back = held[:: -1 if turn % 2 else 1]
        for part, row in zip(forth_or_back, real[first : first + parts], strict=False):
            part.append(int(row))
    return held, max(sum(cost[part]) for part in held)


def load_of(held, row_cost=ROW_COST):
    return [sum(end - start + row_cost for _, start, end in mine) for mine in held]


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_every_page_belongs_to_one_part(size):
    lens, parts, max_pages = size
    costs = (FEW_ROWS_COST, FEW_MERGE_COST) if max_pages == 4 else (ROW_COST, MERGE_COST)
    held, schedule = pieces(lens, parts, max_pages, 0, *costs)
    walked = [
        (row, page) for mine in held for row, start, end in mine for page in range(start, end)
    ]
    expected = [
        (row, page) for row, n in enumerate(lens) for page in range(min(-(-n // 64), max_pages))
    ]
    assert sorted(walked) == expected
    if schedule.pages.any():  # of rows that are cut, the kernel takes the place for the row
        assert walked == expected
        assert schedule.order is None or schedule.order.tolist() == batch_order(lens)
    taken = []
    for row in range(len(lens)):
        own = [(part, row != schedule.places[part]) for part, mine in enumerate(held)
               if row in [r for r, _, _ in mine]]  # fmt: skip
        assert schedule.slots[1, row] == (len(own) if len(own) > 1 else 0)
        if len(own) > 1:  # the kernel puts a part's first piece in its slot 0, another one in 1
            slots = [int(schedule.slot_of(schedule.slots[:, row], i)) for i in range(len(own))]
            assert slots == [2 * part + second for part, second in own]
            taken += slots
    assert len(set(taken)) == len(taken)
    for mine in held:  # what the two partial results of a part are kept for
        whole = [end - start == min(-(-lens[row] // 64), max_pages) for row, start, end in mine]
        assert all(whole[1:-1])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([4, 7]).flatmap(
        lambda rows: st.lists(st.integers(1, 3000), min_size=rows, max_size=rows)
    ),
    st.data(),
)
def test_padding_rows_do_not_move_the_cuts(lens, data):
    places = data.draw(st.lists(st.integers(0, len(lens)), min_size=4, max_size=4))
    padded = list(lens)
    for place in sorted(places, reverse=True):
        padded.insert(place, 0)
    plain, _ = pieces(lens, 5, 64)
    beside, _ = pieces(padded, 5, 64)
    real = [row for row, n in enumerate(padded) if n]
    renamed = [[(real.index(row), start, end) for row, start, end in mine] for mine in beside]
    assert renamed == plain


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_equal_pieces_do_not_depend_on_the_other_rows(size):
    lens, parts, max_pages = size
    most = compute_max_pieces(len(lens), parts)
    held, schedule = pieces(lens, parts, max_pages, most)
    expected = []
    for row, n in enumerate(lens):
        pages = min(-(-n // 64), max_pages)
        size = max(-(-pages // min(max(pages // MIN_PART, 1), most)), 1)
        expected += [(row, at, min(at + size, pages)) for at in range(0, pages, size)]
    walked = [one for mine in held for one in mine]
    assert (walked if schedule.order is None else sorted(walked)) == expected
    numbers = [sum(row == r for r, _, _ in expected) for row in range(len(lens))]
    assert schedule.slots[1].tolist() == [number if number > 1 else 0 for number in numbers]
    if len(lens) > parts:
        assert [[row for row, _, _ in mine] for mine in held] == dealt(lens, parts, max_pages)[0]
        return
    assert all(len(mine) <= 1 for mine in held)  # no part has more than another has to
    for row, number in enumerate(numbers):
        assert number <= most
        parts_of_row = [part for part, mine in enumerate(held) if mine and mine[0][0] == row]
        slots = [int(schedule.slot_of(schedule.slots[:, row], i)) for i in range(number)]
        assert number == 1 or slots == [2 * part for part in parts_of_row]
    assert len(lens) * most <= parts  # a part for each piece
    assert may_split(len(lens), parts) or most == 1


@pytest.mark.sampled
@pytest.mark.parametrize("rows, pages", [(1, 1024), (16, 128), (40, 64), (8, 48)])
@pytest.mark.parametrize("wider", [1, 16])
def test_equal_pieces_keep_every_part_busy_however_wide_the_table(rows, pages, wider):
    most = compute_max_pieces(rows, 66)
    held, schedule = pieces([pages * 64] * rows, 66, wider * pages, most)
    assert sum(map(bool, held)) == rows * max(1, int(schedule.slots[1, 0])) >= 40


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=12, max_size=12), st.integers(0, 40))
def test_more_rows_than_parts_are_dealt_out_whole_unless_a_part_is_much_longer(lens, more):
    lens[-1] += 64 * more
    held, schedule = pieces(lens, 5, 88)
    rows, longest = dealt(lens, 5, 88)
    total = sum(-(-n // 64) + ROW_COST for n in lens if n)
    size = -(-total // min(max(total // MIN_PART, 1), 5))
    merging = MERGE_COST if np.count_nonzero(lens) > 5 else 0
    if longest <= size + max(size // 16, merging):
        assert [[row for row, _, _ in mine] for mine in held] == rows
        assert not schedule.pages.any() and not schedule.slots[1].any()
    else:
        assert schedule.order.tolist() == batch_order(lens)
        assert max(load_of(held)) <= size + 2 * ROW_COST  # of a row begun before, of one not begun


@pytest.mark.parametrize("batch, parts", [(32, 2), (40, 1)])
def test_rows_that_may_not_be_split_are_dealt_out_whole(batch, parts):
    assert not may_split(batch, parts)
    lens = np.random.default_rng(batch).integers(0, 4097, batch).tolist()
    lens[3] = 10**6
    held, schedule = pieces(lens, parts, 2048)
    assert [[row for row, _, _ in mine] for mine in held] == dealt(lens, parts, 2048)[0]
    assert not schedule.slots[1].any()


def test_rows_of_a_length_stay_whole_and_so_do_drawn_ones():
    held, _ = pieces([4096] * 128, 66, 64)
    assert all(end - start == 64 for mine in held for _, start, end in mine)

    lens = bench_lengths(128, "1-8192").tolist()
    held, schedule = pieces(lens, 66, 128)
    assert not schedule.pages.any()
    assert max(load_of(held)) == dealt(lens, 66, 128)[1] <= 148  # evenly: 138


def test_one_row_more_than_parts():
    lens = [4096] * 66
    held, schedule = pieces([64, *lens], 66, 64)  # beside the last of those that are as long
    assert not schedule.pages.any() and [row for row, _, _ in held[-1]] == [66, 0]
    held, schedule = pieces([4096, *lens], 66, 64)
    assert schedule.pages.any() and max(load_of(held)) <= 71 + ROW_COST


def test_a_very_long_row_among_more_rows_than_parts_is_cut():
    held, schedule = pieces([500] * 60 + [65536] + [500] * 39, 66, 1024)
    assert schedule.slots[1, 60] >= 28
    assert max(load_of(held)) <= 1.2 * np.mean(load_of(held))


def test_a_long_row_alone_takes_every_part_and_a_short_one_few():
    held, schedule = pieces([65536], 66, 1024)
    assert sum(map(bool, held)) == 64 and schedule.slots.tolist() == [[0], [64], [0]]
    held, _ = pieces([512], 66, 1024)
    assert [mine for mine in held if mine] == [[(0, 0, 4)], [(0, 4, 8)]]


@pytest.mark.parametrize("lens", [[8192] * 16, [2048] * 32, [4096, 8192] * 7, [640, 64] * 20])
def test_no_part_has_two_rows_where_equal_pieces_are_no_longer(lens):
    held, _ = pieces(lens, 66, 1024)
    assert all(len(mine) <= 1 for mine in held)
    size = -(-sum(-(-n // 64) + ROW_COST for n in lens) // 66)
    assert max(load_of(held)) <= size + ROW_COST


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=12, max_size=12))
def test_no_part_of_fewer_rows_than_parts_is_longer_than_its_share_and_a_row(lens):
    held, _ = pieces(lens, 20, 150)
    total = sum(-(-n // 64) + ROW_COST for n in lens if n)
    size = -(-total // min(max(total // MIN_PART, 1), 20))
    assert max(load_of(held)) <= size + ROW_COST


@pytest.mark.parametrize("batch, splits", [(1055, True), (1056, False)])
def test_a_batch_of_many_rows_a_part_is_not_split(batch, splits):
    assert may_split(batch, 66) == splits
    held, _ = pieces([100] * 8 + [2000] * 8, 1, 64)
    assert sum(end - start for _, start, end in held[0]) == 8 * 2 + 8 * 32


decode_schedule = jax.jit(decode_schedule, static_argnames=("q_len", "num_heads", "max_pages"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "rows, tokens, number, longest", [(1, 4096, 32, 2), (2, 4096, 32, 2), (8, 4096, 16, 4)]
)
def test_few_rows_of_few_heads_have_a_page_for_each_warpgroup(rows, tokens, number, longest):
    lens = jnp.full((rows,), tokens, jnp.int32)
    schedule = decode_schedule(lens, q_len=1, num_heads=20, max_pages=tokens // 64)
    assert schedule.slots[1].tolist() == [number] * rows
    starts = np.asarray(schedule.pages)[: rows * number].reshape(rows, number)
    assert np.diff(starts, axis=1).max() <= longest
    many = decode_schedule(lens, q_len=1, num_heads=25, max_pages=tokens // 64)
    assert many.parts < schedule.parts
