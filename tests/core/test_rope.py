"""Rope against the published DeepSeek-V3 formulas, written again here in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.rope import RopeConfig, YarnConfig, inv_freq, rope, softmax_scale

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
    with pytest.raises(ValueError, match="dim must be even.*63"):
        RopeConfig(dim=63)
    with pytest.raises(ValueError, match="theta must be more than 1, got 1"):
        RopeConfig(theta=1)
    with pytest.raises(ValueError, match="factor must be at least 1, got 0.5"):
        YarnConfig(0.5, 4096)
    with pytest.raises(ValueError, match="beta_fast=1, beta_slow=32"):
        YarnConfig(40, 4096, beta_fast=1, beta_slow=32)
    with pytest.raises(ValueError, match="original_max_position_embeddings.*got 0"):
        YarnConfig(40, 0)
    with pytest.raises(ValueError, match="qk_head_dim must be at least 1, got 0"):
        softmax_scale(0, RopeConfig())
