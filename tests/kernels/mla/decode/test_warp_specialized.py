"""The Mosaic GPU kernel of `mla_decode` against float64, in the interpreter and on a Hopper GPU.

Of up to 24 packed rows the op takes the one of test_swap_ab.py, so most cases have more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.arena import Arena, ArenaSpec
from jaxattn.kernels.attention.split_kv_schedule import Schedule, make_schedule, num_steps
from jaxattn.kernels.mla.decode import combine as mla_combine
from tests.helpers.kernel_cases import (
    assert_mla_close,
    both_devices,
    launch_mla_decode,
    mla_case,
    no_races,
    slow,
    slow_interpreted,
    x64,
)

# Compiled once for all tests of the same shapes.
op = jax.jit(mla.mla_decode, static_argnames=("scale", "implementation"))
kernel = jax.jit(
    launch_mla_decode,
    static_argnames=("scale", "columns", "output_by_tma", "interpret"),
)
schedule_of = jax.jit(Schedule.of, static_argnames=("batch", "max_pages"))
made_schedule = jax.jit(
    make_schedule, static_argnames=("parts", "max_pages", "row_cost", "merge_cost", "pieces")
)
decode_schedule = jax.jit(
    mla.decode_schedule,
    static_argnames=("q_len", "num_heads", "max_pages", "batch_invariant", "interpret"),
)


def decode(case, implementation, *, cuts=None, **arguments):
    """`cuts` are the (row, page) that each part begins at; None leaves them to the op."""
    schedule = None if cuts is None else cut_at(case, cuts)
    return run(case, implementation, schedule=schedule, **arguments)


def run(case, implementation, **arguments):
    """By the op; in the interpreter the kernel that the op takes, with race detection."""
    arguments = {"layer": case.layer, "query_lens": case.query_lens, **arguments}
    if implementation != "mosaic_gpu_interpret":
        return op(*case.args, scale=case.scale, implementation=implementation, **arguments)
    with no_races():
        return jax.block_until_ready(
            kernel(*case.args, scale=case.scale, interpret=True, **arguments)
        )


def cut_at(case, cuts):
    batch = case.seq_lens.shape[0]
    rows, pages = np.array([*cuts, (batch, 0)], np.int32).T
    return schedule_of(rows, pages, batch)


def dealt_out(case, parts):
    """The schedule of more rows than parts: whole rows, in an order that is not the batch's."""
    pages = num_steps(case.block_tables.shape[1], case.kv_cache.shape[2])
    schedule = made_schedule(
        case.seq_lens, parts=parts, max_pages=pages, row_cost=3, merge_cost=3, pieces=1
    )
    assert not schedule.pages.any() and (jnp.diff(schedule.order) < 0).any()
    return schedule


def in_the_batchs_order(schedule):
    """The same, as a schedule of more rows than parts says it where rows are cut."""
    order = jnp.arange(schedule.slots.shape[1], dtype=jnp.int32)
    return dataclasses.replace(schedule, order=order)


def even_cuts(lens, parts):
    """Cuts of a single long row and what follows it, into parts of as many pages."""
    pages = -(-lens[0] // 64)
    return [(0, pages * part // parts) for part in range(parts)] + [(1, 0)]


@pytest.mark.slow_cases(
    reason="a column or a tile of another token, a padding row; found by 13 heads of two tokens in "
    "the poisoned arena there, by five tokens and columns in test_swap_ab, and on a GPU, too"
)
@both_devices
@pytest.mark.parametrize(
    "lens, q_len, heads",
    [
        slow([140, 0, 128], 1, 26),  # tail page, padding row, whole pages
        slow([1, 63, 64, 65], 1, 3),  # heads as columns
        slow([65], 1, 20),  # 24 of them
        slow([65, 2], 3, 9),  # a row with fewer keys than query tokens; a tile across tokens
        slow([130], 2, 96),  # three tiles, the last one shared by both tokens
    ],
)
def test_matches_float64(lens, q_len, heads, implementation):
    case = mla_case(lens, q_len=q_len, heads=heads)
    assert_mla_close(case, *decode(case, implementation))


@pytest.mark.slow_cases(
    reason="a part read in another place; found by the same test and by 192 heads in two parts "
    "on a GPU too"
)
@both_devices
@pytest.mark.parametrize(
    "lens, q_len, heads",
    [slow([1, 0], 2, 64), pytest.param([66], 1, 128, marks=pytest.mark.gpu), slow([3], 1, 28)],
)
def test_queries_in_two_parts_give_the_bits_of_one(lens, q_len, heads, implementation):
    case = mla_case(lens, q_len=q_len, heads=heads)
    schedule = cut_at(case, [(0, 0)])
    given = dict(scale=case.scale, layer=case.layer, schedule=schedule)
    joined = op(*case.args, **given, implementation=implementation)
    pair = case.q[..., :512], case.q[..., 512:]
    for one, two in zip(
        joined, op(pair, *case.args[1:], **given, implementation=implementation), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.slow_cases(
    reason="a length that is not compared; found by batches that are not invariant, and columns too"
)
@both_devices
@pytest.mark.parametrize("heads, batch_invariant", [(64, False), slow(64, True), (16, True)])
def test_rows_of_which_the_schedule_knows_another_length_are_nan(
    heads, batch_invariant, implementation
):
    """Longer, shorter, without tokens before, and without them now: the others are as they were.
    Both kernels, rows in pieces and whole."""
    case = mla_case([70, 200, 0, 129, 0], heads=heads)
    shape = dict(
        q_len=1, num_heads=heads, max_pages=case.block_tables.shape[1],
        batch_invariant=batch_invariant, interpret=implementation != "mosaic_gpu",
    )  # fmt: skip
    scheduled_lens = jnp.asarray([70, 129, 33, 200, 0], jnp.int32)
    known = np.asarray(scheduled_lens == case.seq_lens)
    out, lse = map(
        np.asarray, run(case, implementation, schedule=decode_schedule(scheduled_lens, **shape))
    )
    assert np.isnan(out[~known]).all() and np.isnan(lse[~known]).all()
    rows = {name: getattr(case, name)[known] for name in ("q", "block_tables", "seq_lens")}
    assert_mla_close(dataclasses.replace(case, **rows), out[known], lse[known])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens, q_len, heads", [([196, 0, 1, 64], 1, 28), ([4096, 700], 2, 128)]
)  # the interpreter's is among those of test_no_race_in_the_interpreter
def test_latents_without_rotated_dims(lens, q_len, heads):
    case = mla_case(lens, q_len=q_len, heads=heads, dim=512)
    assert_mla_close(case, *decode(case, "mosaic_gpu"))


@pytest.mark.slow_cases(
    reason="a piece of another row; found by such pieces in test_combine and rows merged side by "
    "side too"
)
@both_devices
@pytest.mark.parametrize("lens", [slow([330, 64, 0, 1])])
def test_splits_that_see_nothing(lens, implementation):
    case = mla_case(lens, heads=26)
    cuts = [(0, 0), (0, 2), (0, 3), (0, 5), (1, 0), (4, 0)]
    assert_mla_close(case, *decode(case, implementation, cuts=cuts))


@pytest.mark.slow_cases(
    reason="an index past the row; found by tables that end in 2,147,480,000 too"
)
@slow_interpreted(
    "an index past the row; found by every case there, whose tables end in 2,147,480,000, too"
)
@pytest.mark.parametrize("table_tail", [slow(-1), 2147480000])
def test_table_entries_past_the_row_are_not_read(table_tail, implementation):
    case = mla_case([65, 66], heads=28, table_tail=table_tail)
    assert_mla_close(case, *decode(case, implementation))


@pytest.mark.slow_cases(reason="an index into another page; found by the next test's pages too")
@both_devices
@pytest.mark.parametrize("page", [slow(16), slow(128)])  # 32 in the next test
def test_pages_of_other_sizes(page, implementation):
    case = mla_case([page + 1, 0, 145], heads=27, page=page)
    cuts = [(0, 0), (2, 1)]  # in 64 tokens
    assert_mla_close(case, *decode(case, implementation, cuts=cuts))


@pytest.mark.slow(
    reason="a query token that a row does not have; found by rows with fewer tokens in "
    "test_warp_specialized_fp8 too"
)
@both_devices
def test_rows_with_fewer_query_tokens_than_others(implementation):
    case = mla_case([70, 130, 2, 64], heads=9, q_len=3, page=32)
    case.query_lens = jnp.asarray([1, 2, 3, 0], jnp.int32)
    # A token beyond a row's own may hold anything.
    beyond = jnp.arange(3) >= case.query_lens[:, None]
    case.q = jnp.where(beyond[..., None, None], jnp.nan, case.q)
    out, lse = decode(case, implementation, cuts=[(0, 0), (1, 1), (2, 0)])
    assert_mla_close(case, out, lse)
    assert (np.asarray(out)[np.asarray(beyond)] == 0).all()


@pytest.mark.slow(
    reason="pieces that depend on other rows; found by the same test on a GPU, and by "
    "models/test_batch in XLA's steps, too"
)
@both_devices
@pytest.mark.parametrize("heads", [2, 26])  # heads as columns, and as rows
def test_a_row_has_the_bits_that_it_has_beside_others(heads, implementation):
    both = mla_case([780, 70], heads=heads)  # pieces of 7 and 6 pages
    alone = dataclasses.replace(both, seq_lens=jnp.asarray([780, 0], jnp.int32))
    outs = []
    for case in (alone, both):
        schedule = decode_schedule(
            case.seq_lens, q_len=1, num_heads=heads, max_pages=case.block_tables.shape[1],
            batch_invariant=True, interpret=implementation != "mosaic_gpu",
        )  # fmt: skip
        assert schedule.slots[1, 0] > 1
        outs.append(run(case, implementation, layer=case.layer, schedule=schedule))
        assert_mla_close(case, *outs[-1])
    for one, other in zip(*outs, strict=True):
        np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(other[0]))


@pytest.mark.slow(
    reason="a number that is converted to another dtype; found by the other dtypes there and by "
    "the same test on a GPU too"
)
@both_devices
@pytest.mark.parametrize("heads", [8, 28])  # heads as columns, and as rows
def test_float16(heads, implementation):
    case = mla_case([70], heads=heads, dtype=jnp.float16)
    assert_mla_close(case, *decode(case, implementation))


@pytest.mark.slow_cases(reason="a place of another cut; found by other cuts there too")
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize(
    "q_len, heads, dim, cuts",
    [
        (2, 13, 576, None),
        slow(2, 13, 576, [(0, 0), (0, 1), (0, 3)]),
        slow(1, 9, 576, None),
        slow(1, 9, 576, [(0, 0), (0, 1), (0, 3)]),
        slow(1, 9, 512, [(0, 0), (0, 1), (0, 3)]),
    ],
)
def test_writes_into_a_poisoned_arena(q_len, heads, dim, cuts, implementation):
    """The regions, and not what lies behind them; few packed rows have another kernel, and fewer
    rows of the region."""
    case = mla_case([200, 0, 70], heads=heads, q_len=q_len, dim=dim)
    case.block_tables = jnp.pad(case.block_tables, ((0, 0), (0, 10)), constant_values=-1)
    pages = case.block_tables.shape[1]  # as many as may be split into three parts
    sizes = dict(batch=3, q_len=q_len, num_heads=heads, max_pages=pages)
    spec = mla.scratch(**sizes)
    assert spec.region("out").shape[1] == (16 if q_len == 1 else 64)
    behind = ArenaSpec.of("behind", **{name: ((1024,), name) for name in spec.sizes})
    arena = jax.tree.map(lambda lane: jnp.full_like(lane, jnp.nan), Arena.allocate(spec + behind))
    out, lse, arena = decode(case, implementation, arena=arena, cuts=cuts)
    assert_mla_close(case, out, lse)
    kept = arena.read(spec, "out")[:, : q_len * heads].reshape(out.shape)
    np.testing.assert_array_equal(kept, out)
    for name in spec.sizes:
        assert np.isnan(arena.after(spec).read(behind, name)).all()


@slow_interpreted(
    "a merge of another row; found by cut rows in test_swap_ab and by the same test on a GPU too"
)
def test_rows_are_merged_side_by_side(implementation, monkeypatch):
    monkeypatch.setattr(mla_combine, "BLOCKS", 4)
    case = mla_case([200, 70, 0], heads=28)
    out, lse = decode(case, implementation, cuts=[(0, 0), (0, 1), (0, 3), (1, 1)])
    assert_mla_close(case, out, lse)


@slow_interpreted(
    "a NaN in another row; found by one in test_warp_specialized_fp8, which has the same masks, "
    "and by the same test on a GPU too"
)
def test_a_nan_among_a_rows_own_keys_shows_in_that_row_alone(implementation):
    case = mla_case([70, 70], heads=28)
    case.kv_cache = case.kv_cache.at[1, case.block_tables[0, 1], 3, 5].set(jnp.nan)
    out, lse = decode(case, implementation)
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


@pytest.mark.slow_cases(reason="an underflow in a tile of 26 heads; found by 64 heads too")
@slow_interpreted(
    "a maximum of another row; found by pieces that see nothing much, in test_combine, too"
)
@pytest.mark.parametrize("heads", [slow(26), pytest.param(8, marks=pytest.mark.gpu), 64])
def test_a_row_whose_every_score_is_far_below_the_others(heads, implementation):
    case = mla_case([1, 3], heads=heads)
    page = int(case.block_tables[0, 0])
    case.q = case.q.at[0, 0, 0].set(0).at[0, 0, 0, 7].set(-1e16)
    case.kv_cache = case.kv_cache.at[case.layer, page, 0, 7].set(1e16)
    out, lse = decode(case, implementation, cuts=[(0, 0)])
    np.testing.assert_array_equal(out[0, 0, 0], case.kv_cache[case.layer, page, 0, :512])
    score = float(case.q[0, 0, 0, 7]) * float(case.kv_cache[case.layer, page, 0, 7]) * case.scale
    np.testing.assert_allclose(lse[0, 0, 0], score, rtol=1e-5)


@pytest.mark.slow(
    reason="a token before a row's first that reads a NaN; found by a NaN in "
    "test_warp_specialized_fp8, which has the same masks, too"
)
@both_devices
@pytest.mark.parametrize("cuts", [None, [(0, 0), (1, 1)]])
def test_a_token_before_the_rows_first_is_zero_though_the_row_holds_nan(cuts, implementation):
    case = mla_case([2, 70], heads=9, q_len=3)
    case.kv_cache = case.kv_cache.at[1, case.block_tables[0, 0], 1, 5].set(jnp.nan)
    out, lse = decode(case, implementation, cuts=cuts)
    assert (np.asarray(out[0, 0]) == 0).all() and np.isneginf(lse[0, 0]).all()
    assert np.isnan(out[0, 2]).all() and np.isfinite(out[1]).all()


@slow_interpreted(
    "a length that the table cannot hold; found by ops/mla/test_addressing with heads as columns "
    "too"
)
def test_a_length_beyond_the_table_is_padding(implementation):
    case = mla_case([64, 128], heads=27)
    case.block_tables = case.block_tables[:, :2]
    run = functools.partial(
        op, case.q, case.kv_cache, case.block_tables, scale=case.scale, layer=case.layer
    )
    (within, *_), beyond = (
        run(case.seq_lens.at[1].add(more), implementation=implementation) for more in (0, 1)
    )
    out, lse = beyond
    assert not np.asarray(out[1], np.float32).any() and np.isneginf(lse[1]).all()
    np.testing.assert_array_equal(np.asarray(out[0]), np.asarray(within[0]))


@pytest.mark.slow_cases(
    reason="int64 addresses; found by x64 of every kernel in ops/test_transforms too"
)
@both_devices
@pytest.mark.parametrize("cuts", [slow(None), slow([(0, 0), (0, 1)])])
def test_with_x64_enabled(cuts, implementation):
    case = mla_case([70, 0], heads=13, q_len=2)
    with x64():
        assert_mla_close(case, *decode(case, implementation, cuts=cuts))


@pytest.mark.slow_cases(reason="padding as columns; found by heads as rows too")
@slow_interpreted(
    "padding that is computed; found by rows without tokens in pieces and by tests/padding too"
)
@pytest.mark.parametrize("q_len, heads", [slow(1, 9), (4, 7)])  # heads as columns, and as rows
@pytest.mark.parametrize("padding", [3, pytest.param(127, marks=pytest.mark.gpu)])
def test_one_real_row_among_padding(q_len, heads, padding, implementation):
    alone = mla_case([70], heads=heads, q_len=q_len)
    beside = mla_case([70] + [0] * padding, heads=heads, q_len=q_len)
    out, lse = decode(alone, implementation)
    beside.kv_cache, layer = alone.kv_cache, alone.layer
    beside.q = beside.q.at[0].set(alone.q[0]).at[1:].set(jnp.nan)
    tables = jnp.full_like(beside.block_tables, 2147480000)
    beside.block_tables = tables.at[0].set(alone.block_tables[0])
    out_beside, lse_beside = decode(beside, implementation, layer=layer)
    np.testing.assert_array_equal(out_beside[0], out[0])
    np.testing.assert_array_equal(lse_beside[0], lse[0])
    assert (np.asarray(out_beside[1:]) == 0).all() and np.isneginf(lse_beside[1:]).all()


@pytest.mark.slow_cases(
    reason="a race of pieces with a merge; found by the poisoned arena, of the same tiles in "
    "pieces, which detects races too"
)
@pytest.mark.parametrize(
    "lens, q_len, dim, cuts, output_by_tma",
    [
        slow([150, 1], 2, 576, [(0, 0), (0, 1), (1, 0)], False),
        ([150, 1], 2, 576, [(0, 0), (0, 2)], True),
        ([260], 1, 512, [(0, 0)], False),  # P has its slots to itself, and they come round
    ],
)
def test_no_race_in_the_interpreter(lens, q_len, dim, cuts, output_by_tma):
    case = mla_case(lens, heads=13, q_len=q_len, dim=dim)
    outs = decode(case, "mosaic_gpu_interpret", cuts=cuts, output_by_tma=output_by_tma)
    assert_mla_close(case, *outs)


@pytest.mark.slow(
    reason="a part that ends before its last row; found by more rows than parts in test_swap_ab "
    "too, with the same schedule"
)
@pytest.mark.sampled
@both_devices
@pytest.mark.parametrize("q_len", [1, 2])
def test_more_rows_than_parts(q_len, implementation):
    """Places in another order than the rows', the last one's without tokens; with q_len 2 rows of
    one token too."""
    case = mla_case([3, 0, 130, 5], heads=26, q_len=q_len)
    if q_len > 1:
        case.query_lens = jnp.asarray([2, 0, 1, 2], jnp.int32)
    assert_mla_close(case, *run(case, implementation, schedule=dealt_out(case, 2)))


@pytest.mark.slow(
    reason="a merge of another row's pieces; found by cut rows of the races there and in "
    "test_swap_ab too"
)
@both_devices
def test_more_rows_than_parts_that_are_cut(implementation):
    """With an order, the batch's own, and a row that is cut."""
    case = mla_case([5, 0, 70], heads=26)
    schedule = cut_at(case, [(0, 0), (2, 1)])
    assert schedule.slots[1].tolist() == [0, 0, 2]
    schedule = in_the_batchs_order(schedule)
    assert_mla_close(case, *run(case, implementation, schedule=schedule))


@slow_interpreted(
    "a token that sees one piece alone; found by five tokens with heads as columns, in "
    "test_swap_ab, too"
)
def test_queries_whose_tokens_differ_in_the_pieces_that_they_see(implementation):
    """Two of three see nothing of the second piece. One layer's cache, and a table that is wider
    than it has pages."""
    case = mla_case([65], heads=9, q_len=3)
    case.block_tables = jnp.pad(case.block_tables, ((0, 0), (0, 8)), constant_values=-1)
    lone = dataclasses.replace(case, kv_cache=case.kv_cache[case.layer], layer=None)
    assert lone.block_tables.shape[1] > lone.kv_cache.shape[0]
    assert_mla_close(case, *decode(lone, implementation, cuts=[(0, 0), (0, 1)]))


@pytest.mark.slow(
    reason="a head of another tile; found by 33 heads of two tokens in test_warp_specialized_fp8 "
    "too"
)
@both_devices
@pytest.mark.parametrize("heads, in_two_parts", [(130, False), (192, True)])
def test_more_heads_than_two_tiles(heads, in_two_parts, implementation):
    """And each number as close as FlashMLA's tests want it, of their data."""
    case = mla_case([20, 3], heads=heads, clamped=True)
    queries = (case.q[..., :512], case.q[..., 512:]) if in_two_parts else case.q
    given = dataclasses.replace(case, q=queries)
    assert_mla_close(case, *decode(given, implementation, cuts=[(0, 0)]), each=True)


@pytest.mark.gpu
def test_more_rows_than_blocks_at_real_shapes():
    rng = np.random.default_rng(80)
    lens = [int(n) for n in rng.integers(1, 1200, 78)] + [0, 1]
    case = mla_case(lens, heads=128)
    schedule = mla.decode_schedule(
        case.seq_lens, q_len=1, num_heads=128, max_pages=case.block_tables.shape[1]
    )
    assert (jnp.diff(schedule.order) < 0).any()
    assert_mla_close(case, *run(case, "mosaic_gpu", layer=case.layer, schedule=schedule))


def test_a_schedule_of_another_batch_is_an_error():
    case = mla_case([64, 3], heads=2)
    schedule = decode_schedule(case.seq_lens[:1], q_len=1, num_heads=2, max_pages=1)
    with pytest.raises(ValueError, match=r"schedule is for 1 rows, but q \(2, 1, 2, 576\) has 2"):
        mla.mla_decode(*case.args, scale=1.0, layer=0, schedule=schedule)


def test_a_schedule_of_another_width_is_an_error():
    """A row that is longer than its table was would end with its last cut."""
    case = mla_case([800, 3], heads=2)
    schedule = decode_schedule(
        case.seq_lens, q_len=1, num_heads=2, max_pages=13, batch_invariant=True
    )
    case.block_tables = jnp.pad(case.block_tables, ((0, 0), (0, 200)))
    words = (
        "schedule is for rows of up to 13 times 64 tokens, but block_tables and kv_cache have 215"
    )
    with pytest.raises(ValueError, match=words):
        run(case, None, layer=0, schedule=schedule)


def test_refuses_what_it_has_no_code_for():
    case = mla_case([64], heads=2)
    with pytest.raises(
        NotImplementedError, match=r"pages of 16, .*kv_cache \(2, 32, 8, 576\) has 8"
    ):
        cache = case.kv_cache.reshape(2, -1, 8, 576)
        launch_mla_decode(case.q, cache, *case.args[2:], scale=1.0, layer=0, interpret=True)
    with pytest.raises(NotImplementedError, match="q float32, kv_cache bfloat16"):
        launch_mla_decode(
            case.q.astype(jnp.float32), *case.args[1:], scale=1.0, layer=0, interpret=True
        )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for a machine without a GPU")
def test_without_a_gpu_the_kernel_says_what_it_needs():
    case = mla_case([64], heads=2)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        decode(case, "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, q_len",
    [(1, 4), (3, 2), (9, 2), (16, 2), (63, 1), (96, 4), (126, 2), (128, 1), (130, 1), (192, 2)],
)
def test_published_shapes(heads, q_len):
    """Of normal data; and each number as close as FlashMLA's tests want it, of their data, whose
    weights are all alike."""
    rng = np.random.default_rng(heads * 10 + q_len)
    lens = [int(n) for n in rng.integers(0, 700, 6)] + [0, 1, 20, 140, 4096]
    for clamped in (False, True):
        case = mla_case(lens, q_len=q_len, heads=heads, seed=heads, clamped=clamped)
        assert_mla_close(case, *decode(case, "mosaic_gpu"), each=clamped)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("heads, q_len", [(16, 2), (128, 1), (20, 3)])
def test_pages_of_other_sizes_at_real_shapes(heads, q_len, page):
    case = mla_case([1, 15, 16, 17, 0, 127, 128, 129, 3000], q_len=q_len, heads=heads, page=page)
    assert_mla_close(case, *decode(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("heads, q_len", [(16, 8), (128, 4), (3, 16)])
def test_ragged_queries_at_real_shapes(heads, q_len):
    rng = np.random.default_rng(q_len)
    lens = rng.integers(0, 3000, 12)
    case = mla_case([int(n) for n in lens], q_len=q_len, heads=heads)
    case.query_lens = jnp.asarray(rng.integers(0, q_len + 1, 12), jnp.int32)
    assert_mla_close(case, *decode(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 5, 40, 70])
def test_a_row_keeps_its_bits_whoever_is_beside_it(rows):
    rng = np.random.default_rng(rows)
    case = mla_case([5000] + [int(n) for n in rng.integers(1, 5000, rows - 1)], heads=128)
    seen = []
    for others in (case.seq_lens, case.seq_lens.at[1:].set(0), case.seq_lens.at[1:].set(64)):
        now = dataclasses.replace(case, seq_lens=others)
        schedule = mla.decode_schedule(
            others, q_len=1, num_heads=128, max_pages=case.block_tables.shape[1],
            batch_invariant=True,
        )  # fmt: skip
        seen.append(run(now, "mosaic_gpu", layer=case.layer, schedule=schedule)[0][0])
    assert all(bool((one == seen[0]).all()) for one in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [20, 128])
@pytest.mark.parametrize("parts", [1, 2, 7, 16, 132])
def test_parts_of_long_rows(parts, heads):
    lens = [16384, 5000, 0, 64]
    case = mla_case(lens, heads=heads)
    assert_mla_close(case, *decode(case, "mosaic_gpu", cuts=even_cuts(lens, parts)))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("heads", [16, 128])  # heads as columns, and as rows
def test_page_offsets_beyond_2_31_elements(heads):
    first_page = 2**31 // (64 * 576) + 1
    case = mla_case([200, 64], heads=heads, layers=1, layer=0, first_page=first_page)
    assert_mla_close(case, *decode(case, "mosaic_gpu"))


@pytest.mark.gpu
def test_a_large_batch_half_of_which_is_padding():
    rng = np.random.default_rng(128)
    lens = np.clip(rng.normal(4096, 2048, 128), 1, 8192).astype(int)
    lens[rng.permutation(128)[:64]] = 0
    case = mla_case(lens.tolist(), heads=128, q_len=2, layers=1, layer=0, clamped=True)
    assert_mla_close(case, *decode(case, "mosaic_gpu"), each=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens, options",
    [
        ([4096, 1000, 77, 0] * 16, {}),
        ([65536], {}),  # so many parts that several warpgroups merge them
        ([300] * 140, {}),  # more rows than parts
        ([700, 64, 130, 1] * 35, {}),  # and not in the batch's order
        ([4096, 1000, 77, 0] * 8, dict(q_len=2)),
        ([4096, 1000, 77, 0] * 8, dict(dim=512)),
        ([4096, 1000, 77, 0] * 8, dict(dtype=jnp.float16)),
    ],
)
def test_the_same_bits_every_run(lens, options):
    case = mla_case(lens, heads=128, **options)
    step = jax.jit(functools.partial(mla.mla_decode, scale=case.scale, layer=case.layer))
    first = step(*case.args)
    assert_mla_close(case, *first)
    for _ in range(100):
        again = step(*case.args)
        assert all(bool((a == b).all()) for a, b in zip(again, first, strict=True))
