"""Families of inputs that broke published attention kernels, against float64 on XLA and on a GPU.

Every case has NaN in unowned pages, in tails and left of windows (`gqa_case`). What a family adds
is its name; a comment says where it was seen. The interpreter runs few of them: test_kernel.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa
from jaxattn.bench.harness.timing import TimedOp
from jaxattn.core.cache.formats import FP8, FP8_MAX
from tests.helpers.at_once import at_once
from tests.helpers.gqa_cases import (
    GQACase,
    assert_gqa_close,
    expected_shape,
    gqa_case,
    gqa_oracle,
)
from tests.helpers.kernel_cases import relative

on_both = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
EACH_HEAD = [[1.0, 0.01], [40.0, 0.5]]


# Compiled once for all tests of the same shapes.
op = jax.jit(gqa.gqa_decode, static_argnames=("implementation", "window", "soft_cap"))


def attend(case: GQACase, implementation: str, **more):
    """Traced, since a table with no page left of a window is refused where it is known."""
    given = {**case.options, **more}
    return op(*case.args, layer=case.layer, implementation=implementation, **given)


def several(*cases: dict) -> list:
    """The first case on XLA as well, all of them on a GPU."""
    first = [pytest.param("xla", cases[0])]
    return first + [pytest.param("mosaic_gpu", case, marks=pytest.mark.gpu) for case in cases]


GROUPS = [
    dict(lens=[70, 0, 129], group=group, dim=dim)
    for dim in (64, 128, 256)
    for group in range(1, 17)
]
PACKED = [
    dict(lens=[130, 9], group=group, q_len=q_len, kv_heads=1, dim=64)
    for group, q_len in ((13, 5), (7, 1), (7, 2), (7, 3), (7, 4), (5, 8), (16, 4))
]  # 65, 7, 14, 21, 28, 40 and 64 rows
LENGTHS = [
    dict(lens=[page - 1, page, page + 1, 1, 63, 64, 65, 97], page=page, dim=64)
    for page in (16, 32, 64, 128)
]
EMPTY = [dict(lens=[0, 0, 0], dim=64), dict(lens=[0, 70, 0, 1, 0], sinks=True, gate=True)]
SHORTER = [
    dict(lens=[1, 2, 3, 4, 5], q_len=4, dim=64),
    dict(lens=[1, 2, 3], q_len=2, sinks=True),
]
FEW_STEPS = [dict(lens=list(range(1, 34)), group=8, kv_heads=4, dim=64)]
WINDOWS = [
    dict(lens=[300, 64, 65, 2], window=window, page=page, sinks=sinks, q_len=q_len, dim=64)
    for window, page, sinks, q_len in (
        (64, 16, True, 2), (1, 16, False, 1), (63, 64, True, 1), (65, 64, False, 3),
        (1000, 32, True, 1), (129, 128, True, 4),
    )
]  # fmt: skip
SINKS = [
    dict(lens=[700, 70], sinks=True, soft_cap=cap, q_len=q_len, scales=scales, dim=64)
    for cap, q_len, scales in ((3.0, 4, EACH_HEAD), (None, 4, None), (3.0, 1, None))
]
SCALED = [
    dict(lens=[200, 0, 65, 1], scales=EACH_HEAD, dim=dim, page=page, group=group, **more)
    for dim, page, group, more in (
        (64, 16, 5, dict(sinks=True)),
        (128, 64, 4, dict(q_len=3)),
        (256, 128, 8, dict(gate=True)),
        (128, 32, 7, dict(window=100, dtype=jnp.float16)),
    )
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "implementation, options",
    [
        *several(*GROUPS),  # flashinfer#996, #2896, #3563
        *several(*PACKED),
        *several(*LENGTHS),  # vllm#54035
        *several(*EMPTY),  # vllm#57017, flashinfer#1533, #4452
        *several(*SHORTER),  # flashinfer#348
        *several(*FEW_STEPS),
        *several(*WINDOWS),  # flashinfer#4972
        *several(*SINKS),  # ROCm/rocm-libraries#12227, #12229
        *several(*SCALED),  # vllm#51363, sglang#37785
    ],
    ids=str,
)
def test_matches_float64(implementation, options):
    case = gqa_case(**options)
    assert_gqa_close(case, *attend(case, implementation))


def test_a_page_that_no_step_divides_runs_in_xla_alone():
    """192 tokens on steps of 128: TileOPs#1787 lost 64 of them."""
    case = gqa_case([191, 193, 400], page=192, dim=64)
    assert_gqa_close(case, *attend(case, "xla"))
    with pytest.raises(NotImplementedError, match="pages of 16, 32, 64 or 128 tokens, got 192"):
        attend(case, "mosaic_gpu_interpret")


@on_both
@pytest.mark.parametrize("offset", [-6e4, 3e4])
def test_no_score_is_taken_for_a_mask(offset, implementation):
    """All scores far below or above 0 (flashinfer#4451): a constant dim shifts every score."""
    case = gqa_case([70, 200], dim=64, group=4, dtype=jnp.float16)
    q = case.q.at[..., 0].set(8.0)
    cache = case.kv_cache.at[:, :, 0, :, :, 0].set(jnp.asarray(offset, jnp.float16))
    case = dataclasses.replace(case, q=q, kv_cache=cache)
    out, lse = attend(case, implementation)
    expected, expected_lse = gqa_oracle(case)
    np.testing.assert_allclose(lse, expected_lse, rtol=4 * 2.0**-23, atol=0)
    # Scores of so many thousands are 2**-9 apart in float32, and weights by as much.
    assert relative(out, expected) < 3e-2


@on_both
@pytest.mark.parametrize("scale", [1.0, 0.01, 40.0])
def test_an_fp8_cache_of_extremes(scale, implementation):
    """448, -448, the smallest subnormal number and 0, and bytes 0x7F in what no row owns."""
    case = gqa_case([97], dim=128, scales=[[scale] * 2] * 2)
    case = dataclasses.replace(case, q=case.q / 64)  # scores of thousands are tested elsewhere
    page = int(case.block_tables[0, 0])
    edges = jnp.asarray([FP8_MAX, -FP8_MAX, 2.0**-9, 0.0], FP8)
    each = jnp.arange(4)  # in dims of their own: a difference of two would show P's rounding
    cache = case.kv_cache.at[case.layer, page, 1, each, 0, each].set(edges)
    cache = cache.at[case.layer, page, 0, 5, 0, :4].set(edges)
    case = dataclasses.replace(case, kv_cache=cache)
    assert_gqa_close(case, *attend(case, implementation))


@on_both
def test_large_queries_meet_fp8_keys_of_256_dims(implementation):
    """Queries beyond float16's largest number and keys at e4m3's: no product overflows."""
    case = gqa_case([80], dim=256, group=8, scales=[[2.0**-10] * 2, [1.0] * 2])
    case = dataclasses.replace(case, q=case.q * 2.0**17)
    assert_gqa_close_in_bits(case, attend(case, implementation))


def assert_gqa_close_in_bits(case: GQACase, found) -> None:
    """The LSE within 4 float32 ulp of the largest score, and the output of what is then known."""
    out, lse = found
    expected, expected_lse = gqa_oracle(case)
    assert np.isfinite(np.asarray(lse)).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=16 * 2.0**-23)
    assert relative(out, expected) < 2e-2


@on_both
def test_one_needle_in_fp8_is_found(implementation):
    """vllm#23813, flash-attention#2250: sums of 14 bits over many tokens lost it."""
    tokens = 131_072 if implementation == "mosaic_gpu" else 3000
    case = gqa_case(
        [tokens], kv_heads=1, group=4, dim=128, scales=[[0.05], [0.05]], layers=1, layer=0
    )
    at = tokens // 3
    page, slot = int(case.block_tables[0, at // 64]), at % 64
    direction = np.sign(np.asarray(case.q[0, 0, 0], np.float32))
    cache = case.kv_cache.at[0, page, 0, slot, 0].set(jnp.asarray(direction * 28, FP8))
    cache = cache.at[0, page, 1, slot, 0].set(jnp.asarray(100.0, FP8))
    case = dataclasses.replace(case, kv_cache=cache)
    out, lse = attend(case, implementation)
    expected, expected_lse = gqa_oracle(case)
    assert abs(expected[0, 0, 0]).mean() > 1  # it is found in float64 too
    assert relative(out, expected) < 4e-3
    np.testing.assert_allclose(lse, expected_lse, atol=3e-5)


@on_both
def test_two_halves_of_a_context_merge_into_the_whole(implementation):
    """The LSE's layout with several KV heads and tokens (hpc-ops#6)."""
    case = gqa_case([192, 128], q_len=3, dim=64)
    whole, lse = (np.asarray(x, np.float64) for x in attend(case, implementation))
    last = dataclasses.replace(
        case, block_tables=case.block_tables[:, 1:], seq_lens=case.seq_lens - 64
    )
    # Every new token sees all of the first page, as if it were the newest there.
    q = case.q.reshape(6, 1, *case.q.shape[2:])
    tables = jnp.repeat(case.block_tables[:, :1], 3, axis=0)
    first = dataclasses.replace(case, q=q, block_tables=tables, seq_lens=jnp.full(6, 64, jnp.int32))
    parts = [attend(each, implementation) for each in (first, last)]
    outs = [np.asarray(out, np.float64).reshape(whole.shape) for out, _ in parts]
    lses = [np.asarray(lse, np.float64).reshape(whole.shape[:-1]) for _, lse in parts]
    merged = np.logaddexp(*lses)
    weights = [np.exp(each - merged)[..., None] for each in lses]
    np.testing.assert_allclose(merged, lse, atol=2e-5)
    assert relative(sum(w * x for w, x in zip(weights, outs, strict=True)), whole) < 4e-3


@on_both
@pytest.mark.parametrize("value, share", [(0.0, 0.5), (np.inf, 1.0), (-np.inf, 0.0)])
def test_a_gate_at_its_ends(value, share, implementation):
    case = gqa_case([70, 0], dim=64)
    plain, _ = attend(case, implementation)
    case.options["gate"] = jnp.full(case.q.shape, value, case.q.dtype).at[1].set(jnp.nan)
    gated, _ = attend(case, implementation)
    # bfloat16 rounds half a number as the number.
    np.testing.assert_array_equal(
        np.asarray(gated, np.float32), np.asarray(plain, np.float32) * share
    )


def test_a_schedule_of_other_rows_is_refused():
    case = gqa_case([70, 3], dim=64)
    shape = expected_shape(case)
    other = at_once(gqa.decode_schedule, jnp.asarray([70, 3, 1]), interpret=True, **shape)
    with pytest.raises(ValueError, match="schedule is for B = 3, but this call has 2"):
        attend(case, "mosaic_gpu_interpret", schedule=other)
    wider = shape | {"max_pages": 9}
    longer = at_once(gqa.decode_schedule, case.seq_lens, interpret=True, **wider)
    with pytest.raises(ValueError, match="steps of 64 tokens"):
        attend(case, "mosaic_gpu_interpret", schedule=longer)


@pytest.mark.slow(
    reason="a length that is not compared; found on a GPU, and by MLA decode in what both share, "
    "too"
)
@pytest.mark.parametrize(
    "implementation",
    ["mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
def test_rows_of_which_the_schedule_knows_another_length_are_nan(implementation):
    """Longer, shorter, without tokens before, and without them now: the others are as they were."""
    case = gqa_case([70, 300, 0, 129, 40, 0, 200], kv_heads=1, dim=64, sinks=True, gate=True)
    scheduled_lens = jnp.asarray([70, 129, 33, 300, 0, 0, 200])
    schedule, whole = (
        at_once(
            gqa.decode_schedule, lens, interpret=implementation != "mosaic_gpu",
            **expected_shape(case),
        )
        for lens in (scheduled_lens, case.seq_lens)
    )  # fmt: skip
    known = np.array([True, False, False, False, False, True, True])
    for found, expected in zip(
        attend(case, implementation, schedule=schedule),
        attend(case, implementation, schedule=whole),
        strict=True,
    ):
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        assert np.isnan(found[~known]).all()
        np.testing.assert_allclose(found[known], expected[known], rtol=1e-2, atol=1e-3)
    again = attend(case, implementation, schedule=schedule)  # which counts in the same `arrived`
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (found, again[1])))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["up", "down", "random"])
@pytest.mark.parametrize("scales", [None, [[0.05], [0.05]]])
def test_one_long_row_among_255_short_ones(order, scales):
    """131,072 tokens, by value."""
    lens = [*(1 + np.random.default_rng(0).integers(0, 64, 255)).tolist(), 131_072]
    if order == "random":
        lens = np.random.default_rng(1).permutation(lens).tolist()
    lens = lens[::-1] if order == "down" else lens
    case = gqa_case(lens, kv_heads=1, group=4, scales=scales, layers=1, layer=0)
    assert_gqa_close(case, *attend(case, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.large  # and by time, which other processes on the card disturb
@pytest.mark.parametrize("order", ["up", "down"])
def test_one_long_row_is_not_waited_for(order):
    """Of 131,072 tokens among 255 short rows: all take less than twice its own time."""
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_len": 1, "page_size": 64}
    long, short = 131_072, 1 + np.random.default_rng(0).integers(0, 64, 255).astype(np.int32)

    def seconds(lens):
        width = -(-int(lens.max()) // 64)
        counts = -(-lens // 64)
        table = np.zeros((len(lens), width), np.int32)
        table[np.arange(width) < counts[:, None]] = np.arange(counts.sum())
        cache = jnp.ones((1, counts.sum(), 2, 64, 8, 128), jnp.bfloat16)
        q = jnp.ones((len(lens), 1, 32, 128), jnp.bfloat16)
        schedule = gqa.decode_schedule(jnp.asarray(lens), max_pages=width, **heads)

        def call(operands, state, layer):
            *args, schedule = operands
            out = gqa.gqa_decode(*args, layer=layer, schedule=schedule, implementation="mosaic_gpu")
            return out, state

        operands = q, cache, jnp.asarray(table), jnp.asarray(lens), schedule
        return TimedOp(call, [operands]).loop_seconds(
            1e-4
        )  # without a profile, which not all can have

    rows = np.array([*short, long] if order == "up" else [long, *short], np.int32)
    assert seconds(rows) < 2 * seconds(np.array([long], np.int32))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype, pages", [(jnp.bfloat16, 17_000), (FP8, 33_000)])
def test_offsets_beyond_2_to_the_31_elements(dtype, pages):
    """vllm#50427, flashinfer#3136: the last pages of a pool of more elements, and 2**32 bytes."""
    scales = None if dtype == jnp.bfloat16 else [[0.05] * 8] * 2
    small = gqa_case([300, 65], kv_heads=8, group=4, scales=scales, layers=1, layer=0)
    count = small.kv_cache.shape[1]
    assert pages * 2 * 64 * 8 * 128 > 2**31
    pool = jnp.zeros((1, pages, *small.kv_cache.shape[2:]), small.kv_cache.dtype)
    pool = jax.jit(lambda pool, some: pool.at[:, -count:].set(some), donate_argnums=0)(
        pool, small.kv_cache
    )
    beyond = small.block_tables >= count
    tables = jnp.where(beyond, small.block_tables, small.block_tables + pages - count)
    large = dataclasses.replace(small, kv_cache=pool, block_tables=tables)
    found, wanted = attend(large, "mosaic_gpu"), attend(small, "mosaic_gpu")
    for some, same in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(some, np.float32), np.asarray(same, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [None, [[0.05] * 8] * 2])
def test_a_row_has_its_bits_alone_with_others_and_permuted(scales):
    lens = [4000, 100, 2500, 64]
    case = gqa_case(lens, kv_heads=8, scales=scales)
    shape = expected_shape(case)

    def rows(order: list[int]) -> np.ndarray:
        at = jnp.asarray(order)
        some = dataclasses.replace(
            case, q=case.q[at], block_tables=case.block_tables[at], seq_lens=case.seq_lens[at]
        )
        schedule = gqa.decode_schedule(some.seq_lens, batch_invariant=True, **shape)
        return np.asarray(attend(some, "mosaic_gpu", schedule=schedule)[0])

    straight, turned = rows([0, 1, 2, 3]), rows([3, 2, 1, 0])
    np.testing.assert_array_equal(straight, turned[::-1])
    np.testing.assert_array_equal(rows([0, 1, 2, 3]), straight)
