"""Rope against the published DeepSeek-V3 formulas, written again here in NumPy."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.core.numerics.rope import (
    MOST_FACTOR,
    MOST_THETA,
    Llama3RopeScaling,
    RopeConfig,
    YarnConfig,
    inv_freq,
    rope,
    rotation,
    softmax_scale,
)

DEEPSEEK_V3 = RopeConfig(
    yarn=YarnConfig(factor=40, original_max_position_embeddings=4096, mscale_all_dim=1.0)
)


def published_inv_freq(dim, theta, factor, original, beta_fast=32, beta_slow=1):
    """`precompute_freqs_cis` of DeepSeek-V3's inference/model.py, in its own words and order."""

    def find_correction_dim(num_rotations):
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(find_correction_dim(beta_fast)), 0)
    high = min(math.ceil(find_correction_dim(beta_slow)), dim - 1)
    freqs = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    if low == high:
        high += 0.001
    smooth = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return freqs / factor * (1 - smooth) + freqs * smooth


def rotate_by_complex_numbers(x, positions, freqs):
    """DeepSeek's apply_rotary_emb on [B, T, H, P]: adjacent dims are one complex number."""
    turns = np.exp(1j * positions[..., None] * freqs)[:, :, None, :]
    pairs = x.astype(np.float64).reshape(*x.shape[:-1], -1, 2)
    y = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    return np.stack([y.real, y.imag], axis=-1).reshape(x.shape)


def tokens(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


POSITIONS = np.array([[0, 1, 2, 77, 4095], [5, 9, 4096, 163839, 3]], np.int32)


@pytest.mark.parametrize(
    "dim, theta, factor, original",
    [(64, 10000.0, 40, 4096), (64, 10000.0, 1, 4096), (128, 50000.0, 32, 4096), (32, 1e6, 4, 128)],
)
def test_yarn_frequencies_are_the_published_ones(dim, theta, factor, original):
    config = RopeConfig(dim, theta, yarn=YarnConfig(factor, original))
    freqs = inv_freq(config)
    assert freqs.dtype == np.float32
    expected = published_inv_freq(dim, theta, factor, original)
    np.testing.assert_allclose(freqs, expected, rtol=1e-7)


def test_deepseek_v3_keeps_fast_pairs_and_divides_slow_ones_by_40():
    freqs, plain = inv_freq(DEEPSEEK_V3), inv_freq(RopeConfig())
    np.testing.assert_array_equal(freqs[:11], plain[:11])  # low is 10: the ramp starts after it
    np.testing.assert_allclose(freqs[23:], plain[23:] / 40, rtol=3e-7)  # high is 23
    assert np.all((freqs[11:23] < plain[11:23]) & (freqs[11:23] > plain[11:23] / 40))


@pytest.mark.parametrize(
    "dim, theta, factor, original", [(64, 150000.0, 32, 4096), (32, 1e4, 4, 64)]
)
def test_without_truncation_the_ramp_begins_between_pairs(dim, theta, factor, original):
    """The words of transformers' `_compute_yarn_parameters` with truncate false, as gpt-oss has."""

    def turning(times):
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(turning(32), 0), min(turning(1), dim - 1)
    assert low != math.floor(low) or high != math.ceil(high)
    freqs = theta ** -(np.arange(0, dim, 2) / dim)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    config = RopeConfig(dim, theta, yarn=YarnConfig(factor, original, truncate=False))
    np.testing.assert_allclose(
        inv_freq(config), freqs / factor * ramp + freqs * (1 - ramp), rtol=1e-6
    )
    whole = RopeConfig(dim, theta, yarn=YarnConfig(factor, original))
    assert np.any(inv_freq(whole) != inv_freq(config))


@pytest.mark.parametrize("dim, theta, factor, low, high, original", [
    (128, 5e5, 8.0, 1.0, 4.0, 8192), (64, 5e5, 32.0, 1.0, 4.0, 8192), (32, 1e4, 4.0, 1.0, 2.0, 32),
])  # fmt: skip
def test_llama3_divides_long_waves_as_transformers_does(dim, theta, factor, low, high, original):
    """Pair by pair, in the words of `_compute_llama3_parameters`."""
    scaling = Llama3RopeScaling(factor, low, high, original)
    found = inv_freq(RopeConfig(dim, theta, False, llama3=scaling))
    kinds = set()
    for pair, freq in enumerate(theta ** -(np.arange(0, dim, 2) / dim)):
        wavelength = 2 * math.pi / freq
        if wavelength > original / low:
            kind, expected = "long", freq / factor
        elif wavelength < original / high:
            kind, expected = "short", freq
        else:
            smooth = (original / wavelength - low) / (high - low)
            kind, expected = "between", (1 - smooth) * freq / factor + smooth * freq
        kinds.add(kind)
        assert found[pair] == pytest.approx(expected, rel=1e-6)
    assert kinds == {"long", "short", "between"}


def test_llama3_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="high_freq_factor must be above low_freq_factor; got"):
        Llama3RopeScaling(8, 4, 4, 8192)
    with pytest.raises(ValueError, match=r"Llama3RopeScaling\.factor must be a number"):
        Llama3RopeScaling(0.5, 1, 4, 8192)
    llama3 = Llama3RopeScaling(8, 1, 4, 8192)
    with pytest.raises(ValueError, match="yarn and llama3 both stretch the context"):
        RopeConfig(yarn=YarnConfig(40, 4096), llama3=llama3)
    with pytest.raises(ValueError, match="llama3 and linear both stretch the context"):
        RopeConfig(llama3=llama3, linear=2.0)
    with pytest.raises(
        ValueError, match="theta must be a number, as llama3 scales its frequencies; got None"
    ):
        RopeConfig(theta=None, llama3=llama3)
    with pytest.raises(ValueError, match="as linear scales its frequencies; got None"):
        RopeConfig(theta=None, linear=2.0)


def test_a_ramp_without_width_is_a_step():
    config = RopeConfig(4, 10000.0, yarn=YarnConfig(8, 2, beta_fast=1, beta_slow=1))
    np.testing.assert_allclose(inv_freq(config), published_inv_freq(4, 1e4, 8, 2, 1, 1), rtol=1e-7)


def test_softmax_scale_of_deepseek_v3():
    expected = 192**-0.5 * (0.1 * 1.0 * math.log(40) + 1) ** 2
    assert softmax_scale(192, DEEPSEEK_V3) == pytest.approx(expected, rel=1e-12)
    assert softmax_scale(192, DEEPSEEK_V3) == pytest.approx(0.1352, abs=5e-5)


def test_softmax_scale_without_the_correction_is_the_plain_one():
    assert softmax_scale(192, RopeConfig()) == 192**-0.5
    assert softmax_scale(192, RopeConfig(yarn=YarnConfig(40, 4096))) == 192**-0.5


def test_deepseek_v2_corrects_by_mscale_0_707():
    yarn = YarnConfig(40, 4096, mscale=0.707, mscale_all_dim=0.707)
    expected = 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2
    assert softmax_scale(192, RopeConfig(yarn=yarn)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("config", [RopeConfig(), DEEPSEEK_V3], ids=["plain", "yarn"])
def test_interleaved_rope_is_a_complex_rotation(config):
    x = tokens((2, 5, 3, 64))
    expected = rotate_by_complex_numbers(x, POSITIONS, inv_freq(config).astype(np.float64))
    # float32 holds an angle of 163839 radians to 0.008.
    near = POSITIONS < 5000
    got = np.asarray(rope(x, POSITIONS, config))
    np.testing.assert_allclose(got[near], expected[near], atol=2e-3)
    np.testing.assert_allclose(got, expected, atol=0.05)
    np.testing.assert_array_equal(got[0, 0], x[0, 0])


def test_half_split_is_interleaved_with_the_dims_permuted():
    x = tokens((2, 5, 3, 64))
    order = np.arange(64).reshape(2, 32).T.reshape(-1)  # 0, 32, 1, 33, ...
    half = np.asarray(rope(x, POSITIONS, RopeConfig(interleaved=False)))
    interleaved = np.asarray(rope(x[..., order], POSITIONS, RopeConfig()))
    np.testing.assert_allclose(half[..., order], interleaved, atol=1e-6)
    # rotate_half of GPT-NeoX and Llama: (-x2, x1).
    angle = POSITIONS[..., None].astype(np.float32) * inv_freq(RopeConfig())
    cos, sin = (np.concatenate([f(angle)] * 2, -1)[:, :, None] for f in (np.cos, np.sin))
    neox = x * cos + np.concatenate([-x[..., 32:], x[..., :32]], -1) * sin
    np.testing.assert_allclose(half, neox, atol=1e-4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_alone(interleaved):
    config = RopeConfig(interleaved=interleaved, yarn=DEEPSEEK_V3.yarn)
    q, k = tokens((1, 1, 64)), tokens((1, 1, 64), seed=1)
    scores = [
        float((rope(q, [[t + 7]], config) * rope(k, [[t]], config)).sum()) for t in (0, 5, 400)
    ]
    np.testing.assert_allclose(scores, scores[0], atol=1e-3)


def test_without_mscale_all_dim_the_rotated_dims_grow_by_mscale():
    x = tokens((1, 2, 64))
    grown = rope(x, jnp.array([[0, 3]]), RopeConfig(yarn=YarnConfig(40, 4096)))
    same = rope(x, jnp.array([[0, 3]]), DEEPSEEK_V3)
    np.testing.assert_allclose(grown, np.asarray(same) * (0.1 * math.log(40) + 1), rtol=1e-5)


def test_with_and_without_heads_agree_and_the_dtype_stays():
    x = jnp.asarray(tokens((2, 5, 64)), jnp.bfloat16)
    got = rope(x, POSITIONS, DEEPSEEK_V3)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rope(x[:, :, None], POSITIONS, DEEPSEEK_V3)[:, :, 0])
    one = rope(x, POSITIONS[:1], DEEPSEEK_V3)
    np.testing.assert_array_equal(one[0], got[0])


def test_gradient_is_the_rotation_back():
    x, y = tokens((2, 5, 3, 64)), tokens((2, 5, 3, 64), seed=1)
    config = RopeConfig()
    _, pullback = jax.vjp(lambda x: rope(x, POSITIONS, config), jnp.asarray(x))
    back = rope(y, -POSITIONS, config)
    np.testing.assert_allclose(pullback(jnp.asarray(y))[0], back, atol=1e-5)


@pytest.mark.parametrize(
    "x, positions, error, words",
    [
        ((2, 5, 3, 32), (2, 5), ValueError, r"config\.dim=64.*\(2, 5, 3, 32\)"),
        ((2, 5, 3, 64), (5,), ValueError, r"\(2, 5, 3, 64\), positions \(5,\)"),
        ((2, 5, 64), (5,), ValueError, r"\(2, 5, 64\), positions \(5,\)"),
        ((2, 5, 3, 64), (2, 4), ValueError, r"positions \(2, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(x, positions, error, words):
    with pytest.raises(error, match=words):
        rope(jnp.zeros(x), jnp.zeros(positions, jnp.int32), RopeConfig())


def test_dtypes_and_configs_that_do_not_fit_are_named():
    with pytest.raises(TypeError, match=r"positions must be integers, got float32 \(2, 5\)"):
        rope(jnp.zeros((2, 5, 64)), jnp.zeros((2, 5)), RopeConfig())
    with pytest.raises(TypeError, match=r"x must be floating, got int32 \(2, 5, 64\)"):
        rope(jnp.zeros((2, 5, 64), jnp.int32), POSITIONS, RopeConfig())
    with pytest.raises(ValueError, match="qk_head_dim must be an integer from 1 to .*; got 0"):
        softmax_scale(0, RopeConfig())


YARN = dict(factor=40, original_max_position_embeddings=4096)
NOT_FINITE = (math.nan, math.inf, -math.inf)
NO_NUMBER = ("1", None, True, [40], 10**400)


@pytest.mark.parametrize("value", [*NOT_FINITE, "1", True, [40], 1, 0.5, -10000.0, 1e31])
def test_theta_is_a_finite_number_above_1(value):
    with pytest.raises(ValueError, match=r"RopeConfig\.theta must be a number above 1 and at most"):
        RopeConfig(theta=value)


def test_yarn_without_a_theta_is_refused():
    with pytest.raises(
        ValueError, match=r"theta must be a number, as yarn scales its frequencies; got None"
    ):
        RopeConfig(theta=None, yarn=YarnConfig(40, 4096))


def test_without_a_theta_nothing_turns():
    """To the bit, by `rope` itself and by the angles that kernels take."""
    config, x = RopeConfig(8, theta=None), np.linspace(-3, 3, 48, dtype=np.float32).reshape(6, 8)
    positions = np.arange(6) * 1000
    np.testing.assert_array_equal(rope(x, positions, config), x)
    angles = np.asarray(rotation(positions, config).angles)
    assert (angles[:, :8] == 1).all() and (angles[:, 8:] == 0).all()


@pytest.mark.parametrize("value", [63, 0, -2, 2**20, 64.0, "64", True, None])
def test_dim_is_an_even_integer(value):
    with pytest.raises(ValueError, match=r"RopeConfig\.dim must be a multiple of 2 from 2 to"):
        RopeConfig(dim=value)


@pytest.mark.parametrize("value", ["false", 1, 0, None])
def test_interleaved_is_true_or_false(value):
    with pytest.raises(ValueError, match=r"RopeConfig\.interleaved must be true or false; got"):
        RopeConfig(interleaved=value)


def test_yarn_is_a_config_or_none():
    with pytest.raises(ValueError, match=r"RopeConfig\.yarn must be a YarnConfig; got \{'factor"):
        RopeConfig(yarn=YARN)


@pytest.mark.parametrize("value", [*NOT_FINITE, *NO_NUMBER, -1, 1e9])
@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
def test_numbers_of_yarn_are_finite(field, value):
    with pytest.raises(ValueError, match=rf"YarnConfig\.{field} must be a number from"):
        YarnConfig(**YARN | {field: value})


@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow"])
def test_these_are_not_zero(field):
    with pytest.raises(ValueError, match=rf"YarnConfig\.{field} must be a number from .* got 0"):
        YarnConfig(**YARN | {field: 0})


@pytest.mark.parametrize("value", [0, -1, 2**31, 4096.0, "4096", True, math.nan])
def test_the_trained_context_is_a_positive_integer(value):
    name = r"YarnConfig\.original_max_position_embeddings"
    with pytest.raises(ValueError, match=f"{name} must be an integer from 1 to"):
        YarnConfig(40, value)


def test_the_fast_end_of_the_ramp_is_not_below_the_slow_one():
    with pytest.raises(ValueError, match="beta_fast=1, beta_slow=32"):
        YarnConfig(40, 4096, beta_fast=1, beta_slow=32)


@pytest.mark.parametrize("theta, original", [(2.0, 4096), (10000.0, 1)])
def test_a_ramp_that_would_run_backwards_is_refused(theta, original):
    with pytest.raises(ValueError, match="ramp would begin at pair .* and end at pair"):
        RopeConfig(theta=theta, yarn=YarnConfig(40, original))


@settings(deadline=None, max_examples=300)
@given(
    dim=st.integers(1, 64).map(lambda pairs: 2 * pairs),
    theta=st.floats(1, MOST_THETA, exclude_min=True),
    original=st.integers(1, 2**31 - 1),
    values=st.tuples(
        st.floats(1, MOST_FACTOR),
        st.floats(1e-6, 1e6),
        st.floats(1e-6, 1e6),
        st.floats(0, 100),
        st.floats(0, 100),
    ),
)
def test_every_config_that_is_accepted_gives_finite_frequencies_and_scales(
    dim, theta, original, values
):
    factor, *betas, mscale, mscale_all_dim = values
    yarn = YarnConfig(factor, original, max(betas), min(betas), mscale, mscale_all_dim)
    try:
        config = RopeConfig(dim, theta, yarn=yarn)
    except ValueError as error:
        assert "ramp would begin" in str(error)
        return
    freqs = inv_freq(config)
    assert np.all(np.isfinite(freqs)) and np.all(freqs >= np.finfo(np.float32).tiny)
    assert np.all(freqs <= 1)
    assert 0 < softmax_scale(192, config) < math.inf


def test_numbers_of_numpy_become_plain_ones():
    yarn = YarnConfig(np.float32(40), np.int64(4096))
    config = RopeConfig(np.int32(64), np.float64(10000), np.bool_(True), yarn)
    assert config == RopeConfig(yarn=YarnConfig(40, 4096))
    for values in (dataclasses.asdict(config), dataclasses.asdict(yarn)):
        json.dumps(values)
