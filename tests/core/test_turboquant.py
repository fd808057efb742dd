"""TurboQuant's numbers and bytes against float64, and how much quantization loses."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.cache.formats import KVFormat
from jaxattn.core.turboquant import codec
from jaxattn.core.turboquant.codec import HEAD_DIMS, PRESETS, TurboFormat
from jaxattn.core.turboquant.slot_layout import GROUP, places
from tests.helpers.turbo_cases import (
    POSITIVE,
    UNITS,
    hadamard64,
    quantize64,
    random_slots,
    read_page,
    table64,
)
from tests.helpers.turbo_compiled import (
    dequantize,
    group,
    pack,
    page_slots,
    quantize,
    rotate,
    slot_pages,
    unpack,
)

# Key and value: a token's bytes at head dims 64, 128 and 256.
SLOT_BYTES = {
    "k8v4": (100, 196, 388),
    "4bit_nc": (70, 134, 262),
    "k3v4_nc": (62, 118, 230),
    "3bit_nc": (54, 102, 198),
}
each_format = pytest.mark.parametrize("dim", HEAD_DIMS)
each_preset = pytest.mark.parametrize("preset", PRESETS)
pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


@each_format
@each_preset
def test_slots_have_the_published_bytes(preset, dim):
    form = TurboFormat(preset=preset, head_dim=dim)
    assert form.slot_bytes == SLOT_BYTES[preset][HEAD_DIMS.index(dim)]
    assert form.slot_bytes == KVFormat(preset, dim).nbytes


def test_qwen3_32b_has_the_published_bytes_of_a_token():
    """k8v4 in 60 layers, bfloat16 in the first and the last two; 8 heads of 128 dims."""
    sizes = [KVFormat(name, 128).nbytes for name in ("k8v4", "bfloat16")]
    assert sizes == [TurboFormat(preset="k8v4", head_dim=128).slot_bytes, 512]
    assert 8 * (60 * sizes[0] + 4 * sizes[1]) == 110_464
    assert 598_784 * 110_464 / 2**30 < 61.61  # the published tokens take what was published


@pytest.mark.sampled
@each_format
@each_preset
def test_every_byte_is_read_as_the_documents_say(preset, dim):
    """All values of each byte, in every place of a slot and in 48 places of a page."""
    form, rng = TurboFormat(preset=preset, head_dim=dim), np.random.default_rng(0)
    slots = random_slots(form, (256, 3 * GROUP), rng)
    first = rng.integers(0, 256, (3 * GROUP, form.slot_bytes))
    codes = form.key_bytes + form.value_bytes
    every = (first + np.arange(256)[:, None, None]).astype(np.uint8)[..., :codes]
    slots[..., :codes] = every
    keys, values = dequantize(form, unpack(form, jnp.asarray(slots)))
    pages = np.asarray(slot_pages(form, jnp.asarray(slots)))
    read = [read_page(form, page) for page in pages[::17]]
    for mine, theirs in zip((keys, values), zip(*read, strict=True), strict=True):
        np.testing.assert_allclose(np.asarray(mine)[::17], np.stack(theirs), rtol=1e-6, atol=1e-6)
    again = pack(form, unpack(form, jnp.asarray(slots)))
    np.testing.assert_array_equal(again, slots)
    np.testing.assert_array_equal(page_slots(form, jnp.asarray(pages)), slots)


@each_format
@each_preset
def test_a_byte_of_a_group_is_one_tokens(preset, dim):
    form = TurboFormat(preset=preset, head_dim=dim)
    at = places(form)
    assert sorted(at.ravel()) == list(range(GROUP * form.slot_bytes))
    slots = random_slots(form, (GROUP,), np.random.default_rng(1))
    grouped = np.asarray(group(form, jnp.asarray(slots)))
    np.testing.assert_array_equal(grouped[at], slots)


@pytest.mark.sampled
@each_format
@each_preset
def test_quantization_agrees_with_float64(preset, dim):
    form, rng = TurboFormat(preset=preset, head_dim=dim), np.random.default_rng(2)
    k, v = rng.normal(size=(2, 300, dim)) * np.exp(rng.normal(size=(2, 300, 1)))
    k, v = (np.asarray(x, np.float32) for x in (k, v))
    keys, values = dequantize(form, quantize(form, jnp.asarray(k), jnp.asarray(v)))
    expected = quantize64(preset, k.astype(np.float64), v.astype(np.float64))
    for mine, theirs in zip((keys, values), expected, strict=True):
        # A number between two levels may fall to either side; its token's norm then differs too.
        off = np.abs(np.asarray(mine) - theirs) > 1e-5 * np.abs(theirs).max(axis=-1, keepdims=True)
        assert off.any(axis=-1).mean() < 0.02


@pytest.mark.parametrize("bits, error", [(4, 0.00950), (3, 0.03455)])
def test_levels_lose_what_lloyd_and_max_do_on_normal_numbers(bits, error):
    x = np.random.default_rng(3).normal(size=400_000)
    table, unit = table64(bits), UNITS[bits]
    np.testing.assert_array_equal(codec.levels(bits), table)
    assert codec.LEVELS[bits] == tuple(POSITIVE[bits])
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, x * unit)
    assert abs(np.mean((table[codes] / unit - x) ** 2) / error - 1) < 0.02


@pytest.mark.sampled
@pytest.mark.parametrize(
    "preset, key_error, value_errors",
    [("4bit_nc", 0.0093, (0.0081, 0.0100, 0.0119)), ("3bit_nc", 0.0340, (0.0371, 0.0458, 0.0545))],
)
@each_format
def test_quantization_loses_what_its_table_says(preset, dim, key_error, value_errors):
    """Keys of any distribution, here of a few large numbers, lose what normal ones do; at 128 dims
    and more. Of 64, each number is bound more by the others."""
    form, rng = TurboFormat(preset=preset, head_dim=dim), np.random.default_rng(4)
    k = rng.standard_t(3, size=(6000, dim)).astype(np.float32)
    v = rng.normal(size=(6000, dim)).astype(np.float32)
    keys, values = dequantize(form, quantize(form, jnp.asarray(k), jnp.asarray(v)))
    assert abs(np.mean((np.asarray(values) - v) ** 2) / value_errors[HEAD_DIMS.index(dim)] - 1) < (
        0.02
    )
    back = np.asarray(rotate(keys), np.float64)
    lost = np.sum((back - k) ** 2, axis=-1) / np.sum(k.astype(np.float64) ** 2, axis=-1)
    assert np.mean(lost) < key_error * 1.03
    if dim == 128:
        assert np.mean(lost) > key_error * 0.9


def test_scores_and_attention_lose_more_by_each_preset():
    rng = np.random.default_rng(5)
    k, v, q = rng.normal(size=(3, 2000, 128)).astype(np.float32)

    def attended(keys, values):
        weights = np.exp(q @ keys.T * 128**-0.5)
        return weights / weights.sum(axis=1, keepdims=True) @ values

    scores, outputs, exact = [], [], attended(k, v)
    for preset in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"):
        form = TurboFormat(preset=preset, head_dim=128)
        keys, values = dequantize(form, quantize(form, jnp.asarray(k), jnp.asarray(v)))
        keys = np.asarray(rotate(keys) if form.rotated else keys)
        scores.append(np.std(np.sum((keys - k) * q, axis=-1)))
        outputs.append(np.std(attended(keys, np.asarray(values)) - exact))
    assert scores[0] < scores[1] < scores[2] and scores[2] == scores[3]
    assert outputs == sorted(outputs) and outputs[0] < outputs[3] / 2


def test_a_rotation_undoes_itself():
    x = np.random.default_rng(6).normal(size=(5, 256)).astype(np.float32)
    np.testing.assert_allclose(rotate(jnp.asarray(x)), x @ hadamard64(256), atol=1e-5)
    np.testing.assert_allclose(rotate(rotate(jnp.asarray(x))), x, atol=1e-5)


@each_preset
def test_extreme_tokens(preset):
    """A zero key, a norm beyond float16, one large number, a constant value, a tiny spread."""
    form = TurboFormat(preset=preset, head_dim=128)
    k = np.zeros((5, 128), np.float32)
    k[1], k[2, 7], k[3], k[4] = 1e30, 3.0, 1e-30, 7000.0
    v = np.zeros((5, 128), np.float32)
    v[0], v[1, 0], v[2], v[3] = 2.5, 1e30, -65504.0, 1 + 1e-9 * np.arange(128)
    v[4] = 1e30
    keys, values = (np.asarray(x) for x in dequantize(form, quantize(form, k, v)))
    assert np.isfinite(keys).all() and np.isfinite(values).all()
    assert (keys[0] == 0).all() and (np.abs(keys[3]) < 1e-6).all()
    np.testing.assert_array_equal(values[[0, 2]], v[[0, 2]])
    np.testing.assert_allclose(values[3], 1)
    assert (values[4] == 65504).all()
    if form.rotated:  # one number alone, rotated, has all codes of one size: nothing is lost
        back = np.asarray(rotate(jnp.asarray(keys)))
        np.testing.assert_allclose(back[2], k[2], atol=3e-3)
        # The norm 7000 sqrt(128) is beyond float16, and what is stored of it is not.
        np.testing.assert_allclose(np.linalg.norm(keys[4]), np.linalg.norm(k[4]), rtol=1e-3)
    else:
        assert np.abs(keys).max() == 448


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_preset
def test_a_nan_stays_in_its_token(preset, bad):
    form = TurboFormat(preset=preset, head_dim=64)
    k, v = np.random.default_rng(7).normal(size=(2, 3, 64)).astype(np.float32)
    k[1, 5] = v[1, 9] = bad
    keys, values = (np.asarray(x) for x in dequantize(form, quantize(form, k, v)))
    assert np.isnan(keys[1]).any() and np.isnan(values[1]).all()
    assert np.isfinite(keys[[0, 2]]).all() and np.isfinite(values[[0, 2]]).all()


def test_the_gradient_reaches_the_float16_numbers():
    form, rng = TurboFormat(preset="4bit_nc", head_dim=64), np.random.default_rng(8)
    codes = quantize(form, *jnp.asarray(rng.normal(size=(2, 64)), jnp.float32))

    def total(norm, scale, minimum):
        some = codes._replace(norm=norm, scale=scale, minimum=minimum)
        return sum(x.sum() for x in dequantize(form, some))

    numbers = [x.astype(jnp.float32) for x in (codes.norm, codes.scale, codes.minimum)]
    by_norm, by_scale, by_minimum = jax.grad(total, (0, 1, 2))(*numbers)
    table = codec.levels(4)
    np.testing.assert_allclose(by_norm, table[np.asarray(codes.keys, int)].sum(), rtol=1e-5)
    assert by_scale == codes.values.astype(jnp.float32).sum() and by_minimum == 64


@pytest.mark.parametrize("preset", ["3bit", "k3v4", "int3", None, 3])
def test_three_bits_are_had_by_a_presets_whole_name_alone(preset):
    with pytest.raises(ValueError, match="preset must be one of k8v4, 4bit_nc, k3v4_nc, 3bit_nc"):
        TurboFormat(preset=preset, head_dim=128)


@pytest.mark.parametrize("dim", [80, 96, 192, 32, 512])
def test_a_head_dim_that_is_no_power_of_two_is_refused(dim):
    with pytest.raises(ValueError, match=f"head_dim must be 64, 128 or 256 .* got {dim}"):
        TurboFormat(preset="4bit_nc", head_dim=dim)


def test_three_bits_warn_once_a_configuration():
    codec._warn_of_three_bits.cache_clear()
    with pytest.warns(UserWarning, match="k3v4_nc at head_dim 128 stores 3 bits"):
        TurboFormat(preset="k3v4_nc", head_dim=128)
    with pytest.warns(UserWarning, match="3bit_nc at head_dim 128"):
        TurboFormat(preset="3bit_nc", head_dim=128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for preset in ("k3v4_nc", "k8v4", "4bit_nc"):
            TurboFormat(preset=preset, head_dim=128)
