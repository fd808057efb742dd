"""Prompts over a TurboQuant cache by the kernel that reads prompts, a block of tokens at a time."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxattn.core.turboquant.codec import HEAD_DIMS, PRESETS, TurboFormat
from jaxattn.ops.turboquant import prefill_mosaic
from jaxattn.ops.turboquant.attention import turbo_attention
from jaxattn.ops.turboquant.prefill_mosaic import UNPACKED_BYTES
from tests.helpers.kernel_cases import both_devices, slow, slow_interpreted
from tests.helpers.turbo_cancel import SCORE, cancelling_case, crafted
from tests.helpers.turbo_cases import (
    assert_turbo_close,
    hadamard64,
    read_page,
    turbo_case,
    turbo_oracle,
)
from tests.helpers.turbo_compiled import page_slots, slot_pages
from tests.helpers.turbo_outliers import bounds_of_rounded_keys, common64, outlier_case

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")
traced = jax.jit(turbo_attention, static_argnames=("form", "window", "soft_cap", "implementation"))
# Keys, values and weights in float16.
BOUNDS = {"error": 4e-3, "lse_error": 4e-3}


def attend(case, implementation):
    # What runs beside the interpreter may wait for it, and it for that.
    return jax.block_until_ready(
        traced(
            *case.args, form=case.form, layer=case.layer, implementation=implementation,
            **case.options,
        )
    )  # fmt: skip


@pytest.mark.slow_cases(
    reason="ragged rows in blocks; found by the other lengths there and by the same test on a GPU "
    "too"
)
@both_devices
@pytest.mark.parametrize(
    "lens, preset, options",
    [
        slow([150, 0, 20], "4bit_nc", dict(q_len=20, query_lens=[20, 5, 9], gate=True)),
        ([140, 9], "k8v4", dict(q_len=9, window=40, sinks=True, page=32)),
    ],
)
def test_blocks_are_one_softmax(lens, preset, options, implementation, monkeypatch):
    """Of blocks of 64 tokens; a row without tokens, and windows that begin within a block."""
    monkeypatch.setattr(prefill_mosaic, "LEAST_BLOCK", 64)
    monkeypatch.setattr(prefill_mosaic, "UNPACKED_BYTES", 1)
    prefill_mosaic.turbo_prefill_mosaic.clear_cache()
    case = turbo_case(lens, preset, group=2, kv_heads=1, **options)
    assert_turbo_close(case, *attend(case, implementation), **BOUNDS)
    prefill_mosaic.turbo_prefill_mosaic.clear_cache()


@pytest.mark.sampled
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_cancel(preset, dim):
    """A key of an eighth of the weight, whose score is above 6; nothing is left of the values but
    a 24th and what quantization adds to it. XLA rounds the output alone."""
    case = cancelling_case([150, 64], preset, q_len=9, group=2, kv_heads=2, dim=dim)
    expected, lse = turbo_oracle(case)
    lengths = np.linalg.norm(crafted(case, expected), axis=-1)
    assert (lengths < 0.15 * dim**0.5).all() and (crafted(case, lse) > SCORE).all()
    assert_turbo_close(case, *attend(case, "xla"), error=4e-3)


@pytest.mark.slow(
    reason="a rounding of large values that cancel; found by the same values in XLA there and by "
    "the same test on a GPU too"
)
@both_devices
@pytest.mark.parametrize(
    "preset, dim, page",
    [
        slow("k3v4_nc", 128, 64),
        ("4bit_nc", 64, 32),
        *(slow(preset, dim, 64) for preset in PRESETS for dim in HEAD_DIMS),
        slow("3bit_nc", 256, 16),
    ],
)
def test_the_kernel_of_values_that_cancel(preset, dim, page, implementation):
    """Pages of whole steps have a kernel that unpacks them."""
    case = cancelling_case([150, 64], preset, q_len=9, group=2, kv_heads=2, dim=dim, page=page)
    assert_turbo_close(case, *attend(case, implementation), **BOUNDS)


@pytest.mark.slow_cases(
    reason="errors of one preset's codes; found by other presets and dims there too"
)
@slow_interpreted(
    "errors of one preset's codes; found by dims far from zero that differ from token to token too"
)
@pytest.mark.parametrize(
    "preset, dim, size, more",
    [
        ("4bit_nc", 64, 12, {}),
        slow("4bit_nc", 64, 24, {}),
        slow("4bit_nc", 64, 12, dict(dims=3, page=32)),
        slow("k3v4_nc", 128, 12, dict(dims=2)),
        slow("3bit_nc", 256, 12, {}),
        slow("k8v4", 64, 12, {}),
    ],
)
def test_dims_far_from_zero(preset, dim, size, more, implementation):
    """Of every key. A score's bound as docs/caches.md gives it, and the error asked of all."""
    case = outlier_case([150, 64], preset, size, q_len=9, group=2, kv_heads=2, dim=dim, **more)
    out, lse = attend(case, implementation)
    assert_within_bounds(case, out, lse)
    assert_turbo_close(case, out, lse, **BOUNDS)


@pytest.mark.slow_cases(reason="errors of 4-bit codes; found by 3-bit keys at 128 dims too")
@slow_interpreted("a common key that some keys have not; found by a key unlike all others too")
@pytest.mark.parametrize("preset, dim, share", [slow("4bit_nc", 64, 0.5), ("k3v4_nc", 128, 0.1)])
def test_a_dim_far_from_zero_in_some_keys(preset, dim, share, implementation):
    """One key cannot be what all have in common: a score's bound holds, and no less than 1e-2."""
    case = outlier_case([150, 64], preset, 12, share=share, q_len=9, group=2, kv_heads=2, dim=dim)
    out, lse = attend(case, implementation)
    assert_within_bounds(case, out, lse)
    assert_turbo_close(case, out, lse, error=1e-2, lse_error=1e-2)


@pytest.mark.slow_cases(reason="a rotation of fewer bits' codes; found by 3-bit keys too")
@both_devices
@pytest.mark.parametrize(
    "preset, options",
    [
        ("k3v4_nc", dict(window=40, sinks=True, gate=True)),
        slow("4bit_nc", dict(window=40)),
    ],
)
def test_dims_far_from_zero_that_differ_from_token_to_token(preset, options, implementation):
    """No common key has them, and the softmax is sharp: a score's bound holds, and it is far less
    than what the errors of other data allow."""
    case = outlier_case(
        [150, 40], preset, 24, dims=3, differs=True, q_len=33, group=2, kv_heads=1, dim=128,
        dtype=jnp.float16, **options,
    )  # fmt: skip
    out, lse = attend(case, implementation)
    assert_within_bounds(case, out, lse)
    of_scores, _ = bounds_of_rounded_keys(case)
    assert of_scores.max() > 0.02  # of which a softmax makes 4%


def assert_within_bounds(case, out, lse):
    expected, expected_lse = turbo_oracle(case)
    of_scores, of_results = bounds_of_rounded_keys(case)
    off = abs(np.asarray(out, np.float64) - expected)
    # The result is bfloat16 or float16; sums in float32.
    rounding = 2**-8 if case.q.dtype == jnp.bfloat16 else 2**-11
    assert (off <= of_results + rounding * abs(expected) + 1e-5).all()
    assert (abs(np.asarray(lse, np.float64) - expected_lse) <= of_scores + 4e-5).all()


@pytest.mark.slow(
    reason="a common key that is not added again; found by dims far from zero there too"
)
@both_devices
@pytest.mark.parametrize(
    "lens, options",
    [
        # A row's own tokens alone, one cached token, a row of one token, and padding.
        ([9, 10, 1, 0], dict(query_lens=[9, 9, 1, 0], sinks=True, gate=True)),
        slow([150, 40], dict(soft_cap=20.0)),
        slow([150, 40], dict(soft_cap=20.0, sinks=True, dims=3, group=3, page=128)),
        slow([150, 40], dict(window=30, sinks=True)),
        slow([150, 40], dict(window=3, soft_cap=5.0, page=16)),
        slow([700, 300], dict(q_len=260, soft_cap=30.0, kv_heads=1)),
    ],
    ids=str,
)
def test_what_all_keys_have_in_common_comes_back(lens, options, implementation):
    """In the log-sum-exp, beside sinks and below a soft cap. All that a row does not own is NaN."""
    options = {"q_len": 9, "group": 2, "kv_heads": 2, "dims": 2} | options
    case = outlier_case(lens, "4bit_nc", 12, **options)
    assert_turbo_close(case, *attend(case, implementation), **BOUNDS)


@pytest.mark.slow_cases(reason="a key that is cut too short; found by a key of NaN too")
@both_devices
@pytest.mark.parametrize("length, norm", [(80, np.nan), slow(80, 6e4), slow(81, 2e3)])
def test_a_key_unlike_all_others_counts_for_those_who_see_it(length, norm, implementation):
    """The last token of the first row, beside others in its group of 16 and alone in it."""
    case = outlier_case([length, 80], "4bit_nc", 12, q_len=20, group=2, kv_heads=1)
    expected = turbo_oracle(case)
    slots = np.array(page_slots(case.form, case.kv_cache))
    last = slots[case.layer, int(case.block_tables[0, 1]), 0, length - 65]
    last[-6:-4] = np.array(norm, np.float16)[None].view(np.uint8)
    found = attend(
        dataclasses.replace(case, kv_cache=slot_pages(case.form, jnp.asarray(slots))),
        implementation,
    )
    for x, wanted, most in zip(found, expected, (4e-3, 4e-3), strict=True):
        x = np.asarray(x, np.float64)
        off = np.abs(x - wanted) if x.ndim == 3 else off_rows(x, wanted)
        assert (off[0, :-1] < most).all() and (off[1] < most).all()
        assert np.isfinite(norm) or np.isnan(x[0, -1]).any()


def off_rows(x, wanted):
    return np.linalg.norm(x - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.slow(
    reason="a token of another row in the mean; found by kernels/turboquant/test_key_mean too"
)
@pytest.mark.parametrize("preset, dim, page", [("4bit_nc", 64, 16), slow("3bit_nc", 256, 128)])
def test_the_common_key_is_a_mean_of_tokens_of_the_row(preset, dim, page):
    """128 of them, from all parts of it; all else is NaN. The random keys' norms are alike, but for
    a factor of 3: those above twice the least of their group are cut."""
    lens, window = [3000, 150, 17, 1, 0], 2500
    case = turbo_case(lens, preset, dim=dim, page=page, q_len=9, window=window)
    found, pages = common64(case), np.asarray(case.kv_cache)[case.layer]
    norms_of, tables = own_norms(case), np.asarray(case.block_tables)
    for row, length in enumerate(lens):
        begin = max(length - 9 - (window - 1), 0)
        whole = range(begin // 16, -(-length // 16))
        groups = np.array([whole[(2 * i + 1) * len(whole) // 16] for i in range(8) if whole], int)
        tokens = (16 * groups[:, None] + np.arange(16)).ravel()
        tokens = tokens[(tokens >= begin) & (tokens < length)]
        for head in range(found.shape[1]):
            mean = np.zeros(dim)
            if len(tokens):
                held = {
                    place: read_page(case.form, pages[tables[row, place], head])[0]
                    for place in {t // page for t in tokens.tolist()}
                }
                keys = np.array([held[t // page][t % page] for t in tokens.tolist()])
                places = tables[row, tokens // page]
                norms = norms_of[places, head, tokens % page]
                alone = np.array([(np.unique(tokens) // 16 == t // 16).sum() == 1 for t in tokens])
                kept = ~alone | (len(whole) == 1)
                tokens, keys, norms = tokens[kept], keys[kept], norms[kept]
                least = np.array([norms[tokens // 16 == t // 16].min() for t in tokens])
                mean = np.mean(keys * np.minimum(1, 2 * least / norms)[:, None], axis=0)
            np.testing.assert_allclose(found[row, head], mean @ hadamard64(dim), atol=1e-6)


def own_norms(case):
    """float64 [pages, heads, page]: the float16 numbers that tokens' levels are multiplied by."""
    slots = np.asarray(page_slots(case.form, case.kv_cache))[case.layer]
    return np.ascontiguousarray(slots[..., -6:-4]).view(np.float16)[..., 0].astype(np.float64)


def test_the_block_is_bounded_whatever_the_context():
    """No intermediate is larger than a block of unpacked float32 keys and values, of 131,072."""
    form = TurboFormat(preset="4bit_nc", head_dim=64)

    def op(q, cache, tables, lens):
        return turbo_attention(
            q, cache, tables, lens, form=form, implementation="mosaic_gpu_interpret"
        )

    shapes = [((1, 16, 32, 64), jnp.bfloat16), ((2048, 8, 64 * form.slot_bytes), jnp.uint8)]
    shapes += [((1, 2048), jnp.int32), ((1,), jnp.int32)]
    sizes = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            sizes.extend(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.outvars)
            for inner in jaxprs_in_params(eqn.params):
                walk(inner)

    walk(jax.make_jaxpr(op)(*(jax.ShapeDtypeStruct(*each) for each in shapes)).jaxpr)
    assert UNPACKED_BYTES <= max(sizes) <= 2 * UNPACKED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "lens, group, kv_heads, dim, options",
    [
        ([4096, 2048], 4, 8, 128, dict(q_len=2048)),
        ([3000, 0, 700], 8, 2, 256, dict(q_len=300, gate=True, query_lens=[300, 0, 17])),
        ([2500, 129], 8, 8, 64, dict(q_len=100, sinks=True, window=128)),
        # One cached token, a page less one, a page; and a row that decodes.
        ([128, 191, 193, 700], 4, 2, 128, dict(q_len=129, query_lens=[127, 128, 129, 1])),
    ],
)
def test_real_shapes(lens, group, kv_heads, dim, options, preset):
    case = turbo_case(
        lens, preset, group=group, kv_heads=kv_heads, dim=dim, layers=1, layer=0, **options
    )
    assert_as_exact(case, *attend(case, "mosaic_gpu"))


def assert_as_exact(case, out, lse):
    """Each row against XLA's with float32 queries, whose output is not rounded."""
    wide = dataclasses.replace(case, q=case.q.astype(jnp.float32))
    expected, expected_lse = map(np.asarray, attend(wide, "xla"))
    seen = ~np.isneginf(np.asarray(lse))
    np.testing.assert_array_equal(seen, ~np.isneginf(expected_lse))
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=BOUNDS["lse_error"])
    some, other = (np.asarray(x, np.float32)[seen] for x in (out, expected))
    error = np.linalg.norm(some - other, axis=-1) / np.linalg.norm(other, axis=-1)
    assert error.max() < BOUNDS["error"] and (np.asarray(out)[~seen] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_cancel_in_real_shapes(preset, dim):
    case = cancelling_case(
        [4096, 2048, 700, 20_000], preset, q_len=40, group=4, kv_heads=8, dim=dim, layers=1, layer=0
    )
    assert_as_exact(case, *attend(case, "mosaic_gpu"))
