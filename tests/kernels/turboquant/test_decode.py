"""The Mosaic GPU kernel over TurboQuant pages against float64, in the interpreter and on Hopper."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.turboquant.codec import PRESETS
from jaxattn.kernels.attention.split_kv_schedule import Schedule
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import PairSchedule
from jaxattn.ops.turboquant.attention import turbo_attention
from tests.helpers.kernel_cases import both_devices, no_races, slow, slow_interpreted
from tests.helpers.turbo_cancel import cancelling_case
from tests.helpers.turbo_cases import (
    assert_turbo_close,
    launch_turbo_decode,
    turbo_case,
    turbo_oracle,
)
from tests.helpers.turbo_compiled import page_slots, slot_pages
from tests.helpers.turbo_outliers import bounds_of_rounded_keys, outlier_case

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
kernel = jax.jit(
    launch_turbo_decode,
    static_argnames=(
        "form",
        "scale",
        "window",
        "soft_cap",
        "interpret",
    ),
)
# Queries and P as two e4m3 terms.
BOUNDS = {"error": 1e-2, "lse_error": 3e-2}
schedule_of = jax.jit(Schedule.of, static_argnames="batch")


def decode(case, implementation, **arguments):
    """In the interpreter with race detection."""
    interpret = implementation == "mosaic_gpu_interpret"
    with no_races() if interpret else contextlib.nullcontext():
        outs = kernel(
            *case.args, form=case.form, scale=case.q.shape[-1] ** -0.5, layer=case.layer,
            interpret=interpret, **case.options, **arguments,
        )  # fmt: skip
        return jax.block_until_ready(outs)


def cut_at(case, cuts):
    """The schedule whose parts begin at these (pair, step)."""
    kv_heads = case.kv_cache.shape[2]
    pairs = case.q.shape[0] * kv_heads
    places, steps = np.array([*cuts, (pairs, 0)], np.int32).T
    line = schedule_of(places, steps, pairs)
    return PairSchedule(line, kv_heads, case.q.shape[1], case.options["window"])


@pytest.mark.slow_cases(
    reason="bits in another place; found by 4bit_nc and other tests of k3v4_nc too"
)
@both_devices
@pytest.mark.parametrize("preset", ["4bit_nc", slow("k3v4_nc"), slow("3bit_nc")])
def test_steps_two_at_a_time_and_one_that_is_left(preset, implementation):
    """Of three warpgroups each has four steps, and one has a fifth, of the next row. k3v4_nc has
    four of three steps, which they take one by one."""
    case = turbo_case([12 * 64 - 7, 64], preset, group=4, kv_heads=1, dim=64)
    schedule = cut_at(case, [(0, 0)])
    assert_turbo_close(case, *decode(case, implementation, schedule=schedule), **BOUNDS)


@pytest.mark.slow_cases(
    reason="bits of 3 or 4 in another place at 128 or 256 dims; found by the ring's steps in 3 and "
    "4 bits and 8 bits at 64 dims too"
)
@both_devices
@pytest.mark.parametrize(
    "preset, group, dim", [("k8v4", 5, 64), slow("4bit_nc", 16, 256), slow("3bit_nc", 4, 128)]
)
def test_matches_float64(preset, group, dim, implementation):
    """More steps than warpgroups, a row without tokens and one with a single one."""
    case = turbo_case([300, 0, 1], preset, group=group, kv_heads=1, dim=dim)
    out = decode(case, implementation, schedule=cut_at(case, [(0, 0)]))
    assert_turbo_close(case, *out, **BOUNDS)


@pytest.mark.slow_cases(reason="errors of one preset's codes; found by 3-bit keys at 64 dims too")
@slow_interpreted(
    "errors of one preset's codes; found by ops/turboquant/test_prefill's values that cancel too"
)
@pytest.mark.parametrize(
    "preset, dim",
    [("k3v4_nc", 64), *(slow(preset, dim) for preset in PRESETS for dim in (128, 256))],
)
def test_values_that_cancel(preset, dim, implementation):
    """A key of an eighth of the weight is the opposite of all others."""
    case = cancelling_case([150, 64], preset, group=2, kv_heads=2, dim=dim)
    assert_turbo_close(case, *decode(case, implementation), **BOUNDS)


@pytest.mark.slow_cases(
    reason="a row of another token; found by ragged FP8 rows in gqa/decode/test_kernel and by "
    "the same test on a GPU too"
)
@both_devices
@pytest.mark.parametrize("page", [slow(16), slow(128)])
def test_ragged_tokens_of_pieces_that_end_between_pairs(page, implementation):
    """Several tokens of a row, sinks and gates, over pages that copies of 16 tokens bring."""
    case = turbo_case(
        [200, 2, 130], "k3v4_nc", group=4, kv_heads=1, q_len=4, page=page, query_lens=[4, 3, 1],
        sinks=True, gate=True,
    )  # fmt: skip
    schedule = cut_at(case, [(0, 0), (0, 3), (2, 1)])
    assert_turbo_close(case, *decode(case, implementation, schedule=schedule), **BOUNDS)


@pytest.mark.slow(
    reason="a step left of the window that is read; found by a window in "
    "ops/turboquant/test_attention and by the same test on a GPU too"
)
@both_devices
def test_what_lies_left_of_the_window_is_not_read(implementation):
    case = turbo_case(
        [300, 0, 64], "4bit_nc", group=8, q_len=2, page=32, window=100, query_lens=[1, 0, 2],
        sinks=True, soft_cap=5.0,
    )  # fmt: skip
    schedule = cut_at(case, [(0, 0), (1, 1)])
    out = decode(case, implementation, schedule=schedule)
    assert_turbo_close(case, *out, **BOUNDS)


@pytest.mark.slow_cases(reason="a rotation of fewer bits' codes; found by 3-bit keys too")
@slow_interpreted(
    "a rotation left out; found by ops/turboquant/test_prefill's dims far from zero too"
)
@pytest.mark.parametrize(
    "preset, options",
    [
        ("k3v4_nc", dict(window=40)),
        slow("k3v4_nc", dict(sinks=True, gate=True)),
        slow("4bit_nc", dict(window=40)),
    ],
)
def test_dims_far_from_zero_that_differ_from_token_to_token(preset, options, implementation):
    """The bound that docs/caches.md gives for a score, and what a softmax makes of it."""
    case = outlier_case(
        [150, 40], preset, 24, dims=3, differs=True, group=4, kv_heads=1, dim=128,
        dtype=jnp.float16, **options,
    )  # fmt: skip
    out, lse = (np.asarray(x, np.float64) for x in decode(case, implementation))
    expected, expected_lse = turbo_oracle(case)
    of_scores, of_results = bounds_of_rounded_keys(case, split=True)
    assert (abs(lse - expected_lse) <= of_scores + 4e-5).all()
    assert (abs(out - expected) <= of_results + 2**-11 * abs(expected) + 1e-5).all()


@slow_interpreted("a place of the ring that is read too early; found by steps two at a time too")
def test_steps_of_a_ring_that_goes_round(implementation):
    """More steps than shared memory holds, in pieces whose ends differ for each warpgroup."""
    case = turbo_case([64 * 20 + 5, 64, 321], "3bit_nc", group=1, kv_heads=1)
    out = decode(case, implementation, schedule=cut_at(case, [(0, 0)]))
    assert_turbo_close(case, *out, **BOUNDS)


@pytest.mark.slow(
    reason="a page behind the table that is read; found by the same row in "
    "kernels/gqa/decode/test_kernel and in models/test_turboquant_caches too"
)
def test_a_row_beyond_its_table_is_padding_to_the_kernel():
    """Traced, so that it cannot be refused; no kernel of XLA's looks at the lengths before."""
    case = turbo_case([70, 0, 20], "4bit_nc", kv_heads=1)
    width = case.block_tables.shape[1] * case.form.page_size(case.kv_cache)
    lens = jnp.where(case.seq_lens == 0, jnp.int32(width + 1), case.seq_lens)

    @jax.jit
    def attend(lens):
        return turbo_attention(
            case.q, case.kv_cache, case.block_tables, lens, form=case.form, layer=case.layer,
            implementation="mosaic_gpu_interpret", **case.options,
        )  # fmt: skip

    assert_turbo_close(case, *attend(lens), **BOUNDS)


@pytest.mark.slow(
    reason="a NaN in another row; found by all tests there, where what a row does not own is NaN, "
    "too"
)
def test_a_nan_that_a_row_sees_stays_in_it():
    case = turbo_case([70, 70], "4bit_nc", kv_heads=1)
    slots = np.array(page_slots(case.form, case.kv_cache))
    slots[case.layer, int(case.block_tables[0, 0]), 0, 3, -4:] = 0xFF  # its scale and minimum
    case.kv_cache = slot_pages(case.form, jnp.asarray(slots))
    schedule = cut_at(case, [(0, 0)])
    out, lse = decode(case, "mosaic_gpu_interpret", schedule=schedule)
    assert np.isnan(np.asarray(out[0], np.float32)).all()
    assert np.isfinite(np.asarray(out[1], np.float32)).all() and np.isfinite(lse).all()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dtype=jnp.float32), "q in bfloat16 or float16, got float32"),
        (dict(page=48), "pages of 16, 32, 64 or 128 tokens, got 48"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(options, message):
    case = turbo_case([20], "4bit_nc", **options)
    with pytest.raises(NotImplementedError, match=message):
        launch_turbo_decode(*case.args, form=case.form, scale=1.0, layer=1, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "lens, group, kv_heads, dim, options",
    [
        ([8192] * 4, 4, 8, 128, {}),
        ([32768], 4, 8, 128, dict(page=16)),
        ([5000, 0, 8192, 1], 8, 2, 256, dict(gate=True)),
        ([5000, 0, 8192, 1], 16, 2, 256, dict(q_len=4, gate=True, query_lens=[4, 0, 1, 1])),
        ([8192, 3000, 129], 8, 8, 64, dict(sinks=True)),
        ([8192, 3000, 129, 1] * 4, 8, 8, 64, dict(sinks=True, window=128)),
        ([300] * 64, 7, 4, 128, dict(dtype=jnp.float16, page=32)),
        ([700] * 3, 8, 4, 128, dict(q_len=8)),
    ],
)
def test_real_shapes(lens, group, kv_heads, dim, options, preset):
    case = turbo_case(
        lens, preset, group=group, kv_heads=kv_heads, dim=dim, layers=1, layer=0, **options
    )
    assert_turbo_close(case, *decode(case, "mosaic_gpu"), **BOUNDS)


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_2_to_the_31_bytes():
    """The last pages of a pool of more bytes give what those of a small one do."""
    small = turbo_case([300, 65], "4bit_nc", kv_heads=8, dim=128, layers=1, layer=0)
    count, each = small.kv_cache.shape[1], small.kv_cache[0, 0].size
    pages = 2**31 // each + 2 * count
    pool = jnp.zeros((1, pages, *small.kv_cache.shape[2:]), jnp.uint8)
    pool = jax.jit(lambda pool, some: pool.at[:, -count:].set(some), donate_argnums=0)(
        pool, small.kv_cache
    )
    there = small.block_tables < count
    tables = jnp.where(there, small.block_tables + pages - count, small.block_tables)
    large = dataclasses.replace(small, kv_cache=pool, block_tables=tables)
    found, wanted = decode(large, "mosaic_gpu"), decode(small, "mosaic_gpu")
    for some, same in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(some, np.float32), np.asarray(same, np.float32))
