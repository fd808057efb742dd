"""The Mosaic GPU kernel of `gqa_decode` against float64, in the interpreter and on a Hopper GPU."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.arena import Arena
from jaxattn.core.cache.formats import FP8
from jaxattn.core.dispatch import traced_for_hopper
from jaxattn.gqa import gqa_decode
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.gqa.decode.split_kv import oversubscription
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import PairSchedule, decode_schedule
from jaxattn.kernels.gqa.decode.split_kv.workspace import scratch
from tests.helpers.at_once import at_once
from tests.helpers.gqa_cases import (
    assert_gqa_close,
    expected_shape,
    gqa_case,
    launch_gqa_decode,
    with_sinks_at_their_ends,
)
from tests.helpers.kernel_cases import both_devices, no_races, slow, slow_interpreted

kernel = jax.jit(
    launch_gqa_decode,
    static_argnames=("scale", "window", "soft_cap", "interpret"),
)
schedule_of = jax.jit(Schedule.of, static_argnames="batch")


def decode(case, implementation, **arguments):
    """In the interpreter with race detection."""
    interpret = implementation == "mosaic_gpu_interpret"
    with no_races() if interpret else contextlib.nullcontext():
        outs = kernel(
            *case.args, scale=case.q.shape[-1] ** -0.5, layer=case.layer, interpret=interpret,
            **case.options, **arguments,
        )  # fmt: skip
        return jax.block_until_ready(outs)


def cut_at(case, cuts):
    """The schedule whose parts begin at these (pair, step)."""
    kv_heads = case.kv_cache.shape[4]
    pairs = case.q.shape[0] * kv_heads
    places, steps = np.array([*cuts, (pairs, 0)], np.int32).T
    line = schedule_of(places, steps, pairs)
    return PairSchedule(line, kv_heads, case.q.shape[1], case.options["window"])


@pytest.mark.slow_cases(
    reason="a row of another head; found by groups of 4 and 5 heads in pieces there, by a group of "
    "one whose table is too short, and by the same test on a GPU, too"
)
@both_devices
@pytest.mark.parametrize("group, dim", [slow(1, 64), slow(5, 128), slow(16, 256)])
def test_matches_float64(group, dim, implementation):
    case = gqa_case([70, 0, 1], group=group, kv_heads=2, dim=dim)
    assert_gqa_close(case, *decode(case, implementation, schedule=cut_at(case, [(0, 0)])))


@pytest.mark.slow_cases(reason="a piece that ends in another page; found by pages of 16 too")
@slow_interpreted("a token of a piece that another row has; found by ragged FP8 rows in pieces too")
@pytest.mark.parametrize("page", [16, slow(128)])
def test_ragged_tokens_of_pieces_that_end_between_pairs(page, implementation):
    """Several tokens of a row, of which some see one piece alone, and a row with fewer keys than
    query tokens."""
    case = gqa_case(
        [200, 2, 130], group=4, kv_heads=1, dim=64, q_len=4, page=page, query_lens=[4, 3, 1],
        sinks=True, gate=True,
    )  # fmt: skip
    schedule = cut_at(case, [(0, 0), (0, 3), (2, 1)])
    assert_gqa_close(case, *decode(case, implementation, schedule=schedule))


@pytest.mark.slow_cases(reason="a window within a page; found by a window of 100 too")
@both_devices
@pytest.mark.parametrize("window, page", [slow(1, 64), slow(64, 16), (100, 128)])
def test_what_lies_left_of_the_window_is_not_read(window, page, implementation):
    case = gqa_case(
        [300, 0, 64], group=8, kv_heads=2, dim=64, q_len=2, page=page, window=window, sinks=True,
        query_lens=[1, 0, 2], table_tail=-1,
    )  # fmt: skip
    with_sinks_at_their_ends(case)
    schedule = cut_at(case, [(0, 0), (1, 1)] if window == 100 else [(0, 0)])
    assert_gqa_close(case, *decode(case, implementation, schedule=schedule))


@pytest.mark.slow_cases(
    reason="a piece of another row at 256 dims; found by 19 pieces at 128 dims too"
)
@both_devices
@pytest.mark.parametrize("pieces, dim", [(19, 128), slow(9, 256)])
def test_pieces_are_merged_by_many_and_then_by_few(pieces, dim, implementation):
    """A pair of many pieces has its sink and its gate once, and so has one of two."""
    case = gqa_case(
        [64 * pieces + 30], group=5, kv_heads=2, dim=dim, sinks=True, gate=True, soft_cap=5.0
    )
    with_sinks_at_their_ends(case)
    cuts = [*((0, step) for step in range(pieces)), (1, 0), (1, 4)]
    assert_gqa_close(case, *decode(case, implementation, schedule=cut_at(case, cuts)))


@pytest.mark.slow_cases(
    reason="a pair that is two parts'; found by long pairs, the last of them in pieces too"
)
@both_devices
@pytest.mark.parametrize("lens", [slow([70, 0, 130, 66]), slow([770, 0, 0])])
def test_long_pairs_are_parts_of_their_own(lens, implementation, monkeypatch):
    """More parts than blocks that run at a time, the longest pair first; or those of a line that is
    cut, and empty ones."""
    monkeypatch.setattr(oversubscription, "LONG_PAIR", 1)
    case = gqa_case(lens, group=4, kv_heads=2, dim=64)
    shape = expected_shape(case) | {"interpret": True}
    schedule = decode_schedule(case.seq_lens, **shape)
    line = schedule.fine.line
    pairs, (places, steps) = 2 * len(lens), np.asarray(line.cuts)
    assert line.parts > schedule.line.parts
    assert sorted(np.asarray(line.order)) == list(range(pairs))
    if max(lens) < 770:
        rows = np.asarray(line.order)[places[:6]] // 2
        assert rows.tolist() == [2, 2, 0, 0, 3, 3] and (places[6:] == 6).all() and not steps.any()
    else:
        assert np.asarray(schedule.line.slots[1]).max() > 1
        assert (places[schedule.line.parts :] == places[-1]).all()
    assert_gqa_close(case, *decode(case, implementation, schedule=schedule))


def pieces_of(line, first_slots, steps):
    """{pair: [(first step, steps, place of the partial result)]} by the cuts; `steps` of pairs."""
    cuts, order = np.asarray(line.cuts).T.tolist(), np.asarray(line.order)
    found = {}
    for begin, end, slot in zip(cuts, cuts[1:], np.asarray(first_slots), strict=False):
        places = range(begin[0], end[0] + (end[1] > 0))
        for place in places:
            pair = order[place]
            start = begin[1] if place == begin[0] else 0
            stop = end[1] if place == end[0] else steps[pair]
            assert len(places) == 1 or stop - start == steps[pair]
            found.setdefault(pair, []).append((start, stop - start, slot))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("rows, cut", [(64, 60), (63, 60), (66, 0), (80, 60)])
def test_the_last_pairs_end_in_short_pieces(rows, cut):
    """512 pairs of 64 rows have a last turn of 116 multiprocessors, and of 528 pairs none is cut.
    Each piece has a partial result of its own."""
    lens = [8192] * rows + [0] * (80 - rows)
    shape = dict(q_len=1, num_heads=32, num_kv_heads=8, head_dim=128, max_pages=128, page_size=64)
    schedule = at_once(decode_schedule, jnp.asarray(lens, jnp.int32), **shape)
    line, steps = schedule.fine.line, np.repeat(np.asarray(lens) // 64, 8)
    found = pieces_of(line, schedule.fine.first_slots, steps)
    slots, taken = np.asarray(line.slots), []
    assert sorted(found) == np.flatnonzero(steps).tolist()
    for pair, pieces in found.items():
        assert sum(count for _, count, _ in pieces) == steps[pair]
        if len(pieces) == 1:
            assert slots[1, pair] == 0
            continue
        assert [begin for begin, _, _ in pieces] == [i * pieces[0][1] for i in range(len(pieces))]
        at = [slot for _, _, slot in pieces]
        assert at == [Schedule.slot_of(slots[:, pair], k) for k in range(slots[1, pair])]
        taken += at
    assert sum(len(pieces) > 1 for pieces in found.values()) == cut
    assert len(set(taken)) == len(taken) and max(taken, default=0) < 2 * schedule.line.parts
    invariant = at_once(decode_schedule, schedule.seq_lens, batch_invariant=True, **shape)
    assert not np.asarray(invariant.fine.line.slots[1]).any()


@slow_interpreted("a piece left out of a merge; found by pieces merged by many and by few too")
def test_the_last_pairs_are_merged_of_halves_and_of_short_pieces(implementation, monkeypatch):
    """Behind whole ones, the longest first, and beside a row without tokens."""
    gpu = implementation == "mosaic_gpu"
    for name, value in {"LONG_PAIR": 1, "LEAST_PIECE": 1, "SHORT": 8 if gpu else 3}.items():
        monkeypatch.setattr(oversubscription, name, value)
    lens = [1000 - i for i in range(63)] if gpu else [129, 0, 770, 300, 290, 280, 200, 190]
    case = gqa_case(lens, group=4, kv_heads=8 if gpu else 1, dim=64, gate=True)
    shape = expected_shape(case) | {"interpret": not gpu}
    schedule = at_once(decode_schedule, case.seq_lens, **shape)
    pieces = np.asarray(schedule.fine.line.slots[1])
    assert pieces.max() == 8 if gpu else pieces.tolist() == [2, 0, 0, 0, 0, 0, 2, 3]
    assert_gqa_close(case, *decode(case, implementation, schedule=schedule))


@pytest.mark.slow(
    reason="a head of a second block; found by the same test and by real shapes on a GPU too"
)
@both_devices
def test_more_packed_rows_than_a_block_has_columns(implementation):
    case = gqa_case([66], group=16, kv_heads=1, dim=256, q_len=2, dtype=jnp.float16, gate=True)
    assert_gqa_close(case, *decode(case, implementation, schedule=cut_at(case, [(0, 0), (0, 1)])))


@pytest.mark.slow(
    reason="a place of the ring that is read too early; found by the same test and by real "
    "shapes on a GPU too"
)
@both_devices
def test_steps_of_a_ring_that_goes_round(implementation):
    """More steps than shared memory holds, of pieces of odd lengths."""
    case = gqa_case([450, 64, 321], group=1, kv_heads=1, dim=256)
    assert_gqa_close(case, *decode(case, implementation, schedule=cut_at(case, [(0, 0)])))


@both_devices
def test_the_ops_own_schedule_and_an_arena_with_poison(implementation):
    """And a row that its table cannot hold, which is padding."""
    case = gqa_case([130, 60, 450], group=4, kv_heads=2, dim=64)
    shape = expected_shape(case)
    spec = scratch(batch=3, **shape)
    lens = np.array(case.seq_lens)
    lens[1] = shape["max_pages"] * 64 + 1
    traced = jax.jit(functools.partial(gqa_decode, implementation=implementation))
    with no_races(when=implementation == "mosaic_gpu_interpret"):
        out, lse, arena = jax.block_until_ready(
            traced(
                *case.args[:3], jnp.asarray(lens), layer=case.layer,
                arena=Arena.allocate(spec).poison(),
            )
        )  # fmt: skip
    padded = dataclasses.replace(case, seq_lens=case.seq_lens.at[1].set(0))
    assert_gqa_close(padded, out, lse)
    arena.check(spec)


SCALES = [[1.0, 0.01], [40.0, 0.5]]  # of two heads' keys, and values


@slow_interpreted(
    "a scale of another head; found by XLA's in test_adversarial, by models/test_cache_formats and "
    "by the same test on a GPU too"
)
@pytest.mark.parametrize(
    "dim, options",
    [
        (64, dict(group=5, page=128, window=70, sinks=True)),
        (128, dict(group=4, q_len=2, page=16, soft_cap=5.0, query_lens=[2, 0, 1])),
        (256, dict(group=8, gate=True, sinks=True, dtype=jnp.float16)),
    ],
)
def test_an_fp8_cache_has_scales_of_each_head(dim, options, implementation):
    case = gqa_case([200, 0, 70], kv_heads=2, dim=dim, scales=SCALES, **options)
    cuts = [(0, 0), (0, 2)] if options.get("window") is None else [(0, 0)]
    assert_gqa_close(case, *decode(case, implementation, schedule=cut_at(case, cuts)))


@pytest.mark.slow(
    reason="a NaN in another row; found by all tests there, where what a row does not own is NaN, "
    "too"
)
def test_a_nan_that_a_row_sees_stays_in_it():
    case = gqa_case([70, 70], group=4, kv_heads=1, dim=64)
    page = int(case.block_tables[0, 0])
    case.kv_cache = case.kv_cache.at[case.layer, page, 1, 3, 0, 5].set(jnp.nan)
    out, lse = decode(case, "mosaic_gpu_interpret", schedule=cut_at(case, [(0, 0)]))
    assert np.isnan(np.asarray(out[0, 0, :, 5])).all()
    assert np.isfinite(np.asarray(out[1])).all() and np.isfinite(np.asarray(lse)).all()


@pytest.mark.parametrize("made_for", [None, 51])
def test_a_schedule_of_another_window_is_refused(made_for):
    case = gqa_case([70], group=1, kv_heads=1, dim=64, window=50)
    other = dataclasses.replace(cut_at(case, [(0, 0)]), window=made_for)
    with pytest.raises(ValueError, match="schedule is for window"):
        launch_gqa_decode(*case.args, scale=0.1, layer=1, window=50, schedule=other, interpret=True)


def test_counts_of_another_number_of_tiles_are_refused():
    """The kernel would count behind their end."""
    case = gqa_case([70, 70], group=4, kv_heads=1, dim=64)
    schedule = cut_at(case, [(0, 0)])
    schedule = dataclasses.replace(schedule, arrived=schedule.arrived_of(1))
    assert len(schedule.arrived_of(1)) == 2
    with pytest.raises(ValueError, match="arrivals of 2 tiles, but this call has 4"):
        schedule.arrived_of(2)


@pytest.mark.parametrize("window", [None, 128])
def test_pairs_have_the_parts_that_their_steps_ask_for(window):
    """Every step of every pair is in one part, and none left of the window."""
    lens = np.array([4096, 0, 1, 70, 1000], np.int32)
    shape = dict(q_len=2, num_heads=32, num_kv_heads=4, head_dim=128, max_pages=64, page_size=64)
    scheduled = jax.jit(functools.partial(decode_schedule, window=window, **shape))
    line = scheduled(jnp.asarray(lens)).line
    begins = np.zeros_like(lens) if window is None else np.maximum(lens - 129, 0) // 64
    steps = np.repeat(-(-lens // 64) - begins, 4)
    places, inside = np.asarray(line.places), np.asarray(line.pages)
    if line.order is not None:
        steps = steps[np.asarray(line.order)]
    reached = np.append(0, np.cumsum(steps))[places] + inside
    assert reached[0] == 0 and reached[-1] == steps.sum() and (np.diff(reached) >= 0).all()
    assert np.diff(reached).max() <= -(-steps.sum() // line.parts) + 8
    if window is not None:
        assert not np.asarray(line.slots[1]).any()  # few steps: no pair is cut


def test_nothing_is_packed_in_memory_beside_the_kernel():
    """A group of 5, sinks and an FP8 cache, for each of which XLA once ran kernels of its own."""
    lens, q = jnp.ones(3, jnp.int32), jnp.zeros((3, 1, 10, 64), jnp.bfloat16)
    cache, tables = jnp.zeros((2, 9, 2, 64, 2, 64), FP8), jnp.zeros((3, 40), jnp.int32)
    shape = dict(num_heads=10, num_kv_heads=2, head_dim=64, max_pages=40, page_size=64)
    options = dict(
        kv_scale=jnp.ones((2, 2)), sinks=jnp.zeros(10), layer=1, implementation="mosaic_gpu",
        schedule=at_once(decode_schedule, lens, q_len=1, **shape),
    )  # fmt: skip
    op = functools.partial(gqa_decode, **options)
    with traced_for_hopper(True):
        traced = jax.make_jaxpr(op)(q, cache, tables, lens).jaxpr
    made = {equation.primitive.name for equation in traced.eqns}
    assert "custom_vmap_call" in made  # the kernel
    moves = {"pad", "slice", "transpose", "concatenate", "gather", "convert_element_type", "mul"}
    assert not made & moves, made


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens, group, kv_heads, dim, options",
    [
        ([8192] * 8, 4, 8, 128, {}),
        ([32768], 4, 8, 128, dict(page=16)),
        ([5000, 0, 8192, 1], 8, 2, 256, dict(gate=True)),
        ([5000, 0, 8192, 1], 16, 2, 256, dict(q_len=4, gate=True, query_lens=[4, 0, 1, 1])),
        ([8192, 3000, 129], 8, 8, 64, dict(sinks=True)),
        ([8192, 3000, 129, 1] * 16, 8, 8, 64, dict(sinks=True, window=128)),
        ([300] * 300, 7, 4, 128, dict(dtype=jnp.float16, page=32)),
        ([8192] * 8, 4, 8, 128, dict(scales=[[0.1] * 8, [3.0] * 8])),
        ([5000, 0, 8192, 1], 8, 2, 256, dict(gate=True, scales=SCALES)),
        ([8192, 3000, 129], 8, 2, 64, dict(sinks=True, scales=SCALES, page=16)),
    ],
)
def test_real_shapes(lens, group, kv_heads, dim, options):
    case = gqa_case(lens, group=group, kv_heads=kv_heads, dim=dim, layers=1, layer=0, **options)
    assert_gqa_close(case, *decode(case, "mosaic_gpu"))


@pytest.mark.slow(
    reason="a sum whose order depends on other rows; found by engine/test_exact_mode in XLA's "
    "steps and by both tests of such bits on a GPU too"
)
@both_devices
@pytest.mark.parametrize("dim", [64, slow(128)])
def test_a_batch_invariant_rows_bits_do_not_depend_on_its_place_in_a_part(dim, implementation):
    """More pairs than parts: a row is the first of a part, or comes behind 7 steps, of which three
    warpgroups have had unlike many, as two have."""
    gpu = implementation == "mosaic_gpu"
    count = 132 if gpu else 4
    case = gqa_case([448] * count + [310] * count, group=8, kv_heads=1, dim=dim, dtype=jnp.float16)
    shape = expected_shape(case) | {"interpret": not gpu}
    runs = []
    for others in (448, 0):
        lens = jnp.asarray([others] * count + [310] * count, jnp.int32)
        schedule = decode_schedule(lens, batch_invariant=True, **shape)
        some = dataclasses.replace(case, seq_lens=lens)
        found = decode(some, implementation, schedule=schedule)
        runs.append([np.asarray(x[count:], np.float32) for x in found[:2]])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
def test_a_batch_invariant_rows_bits_do_not_depend_on_the_others():
    case = gqa_case([4000, 100, 2500], group=4, kv_heads=8)
    shape = expected_shape(case)
    runs = []
    for others in ([100, 2500], [1, 0]):
        lens = jnp.asarray([4000, *others], jnp.int32)
        some = dataclasses.replace(case, seq_lens=lens)
        schedule = decode_schedule(lens, batch_invariant=True, **shape)
        runs.append(np.asarray(decode(some, "mosaic_gpu", schedule=schedule)[0][0]))
    np.testing.assert_array_equal(*runs)
