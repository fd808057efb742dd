"""TurboQuant pages as float16 keys and values, against the same in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.turboquant.code_gather import page_codes
from jaxattn.core.turboquant.codec import LARGEST_F16, PRESETS, TurboFormat, dequantize, plain_keys
from jaxattn.kernels.turboquant.cache.dequantization import turbo_unpack_mosaic
from tests.helpers.at_once import at_once
from tests.helpers.kernel_cases import NO_SUCH_PAGE, both_devices, no_races, slow

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


def case(preset, dim, page, *, rows=2, pages=2, heads=2):
    """Random codes, numbers of many sizes, an infinite norm and a page that does not exist."""
    form, rng = TurboFormat(preset=preset, head_dim=dim), np.random.default_rng(dim)
    count = rows * pages
    codes = rng.integers(0, 256, (2, count, heads, page * form.slot_bytes), np.uint8)
    groups = codes.reshape(2, count, heads, page // 16, -1)
    if not form.rotated:  # no NaN in e4m3
        keys = groups[..., : 16 * form.key_bytes]
        keys[(keys & 0x7F) == 0x7F] = 0
    numbers = rng.normal(size=(*groups.shape[:-1], 16 * form.meta_bytes // 2)) * 8
    numbers[1, 0, 0, 0, :3] = [6e4, -6e4, np.inf]
    groups[..., -16 * form.meta_bytes :] = numbers.astype(np.float16).view(np.uint8)
    tables = rng.permutation(count).reshape(rows, pages).astype(np.int32)
    tables[-1, -1] = NO_SUCH_PAGE
    held = np.array([[3, 0], [pages * page - 5, pages * page]], np.int32)
    common = None  # e4m3 keys are float16 numbers as they are
    if form.rotated:
        common = jnp.asarray(20 * rng.normal(size=(rows, heads, dim)), jnp.float32)
    return form, jnp.asarray(codes), jnp.asarray(tables), jnp.asarray(held[:, :rows]), common


def expected(form, cache, tables, held, common):
    """float32 [B, n C, Hk, D] of layer 1."""
    there = np.asarray(tables) < cache.shape[1]
    found = np.asarray(cache)[1, np.where(there, tables, 0)]  # [B, n, Hk, bytes]

    def numbers():
        codes = page_codes(form, jnp.asarray(found))
        keys = plain_keys(form, codes)  # [B, n, Hk, C, D]
        keys = keys if common is None else keys - common[:, None, :, None]
        return keys, dequantize(form, codes)[1]

    for x in map(np.asarray, at_once(numbers)):
        x = np.where(there[:, :, None, None, None], x, np.nan)
        x = np.where(np.isinf(x), x, np.clip(x, -LARGEST_F16, LARGEST_F16))
        x = x.swapaxes(2, 3).reshape(x.shape[0], -1, x.shape[2], x.shape[4])
        token = np.arange(x.shape[1])
        own = (token >= np.asarray(held)[0, :, None]) & (token < np.asarray(held)[1, :, None])
        yield np.where(own[..., None, None], x, 0)


def unpacked(form, *args, interpret):
    *args, common = args
    op = functools.partial(turbo_unpack_mosaic, form=form, interpret=interpret)
    return jax.block_until_ready(jax.jit(op)(*args, jnp.ones(1, jnp.int32), common))


@pytest.mark.slow_cases(reason="a code of another place; found by the other presets and pages too")
@both_devices
@pytest.mark.parametrize(
    "preset, dim, page",
    [
        ("4bit_nc", 128, 64),
        slow("k8v4", 64, 128),
        slow("3bit_nc", 256, 64),
        slow("k3v4_nc", 64, 64),
    ],
)
def test_keys_and_values_are_those_of_plain_jax(preset, dim, page, implementation):
    form, *args = case(preset, dim, page)
    if implementation == "mosaic_gpu_interpret":
        with no_races():
            found = unpacked(form, *args, interpret=True)
    else:
        found = unpacked(form, *args, interpret=False)
    assert_equal(found, expected(form, *args))


def assert_equal(found, expected):
    for x, wanted in zip(found, expected, strict=True):
        x, wanted = np.asarray(x, np.float32), wanted.astype(np.float16).astype(np.float32)
        assert (np.isnan(x) == np.isnan(wanted)).all()
        # A sum may be rounded once or twice before it is rounded to float16.
        np.testing.assert_allclose(x, wanted, rtol=2**-10, atol=2**-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, page", [(64, 64), (128, 128), (256, 64)])
@pytest.mark.parametrize("preset", PRESETS)
def test_many_pages(preset, dim, page):
    form, *args = case(preset, dim, page, pages=40, heads=4)
    assert_equal(unpacked(form, *args, interpret=False), expected(form, *args))


@pytest.mark.gpu
def test_more_steps_than_an_axis_of_blocks_may_have():
    form, cache, tables, held, common = case("4bit_nc", 64, 64, pages=2, heads=1)
    rows = 32_800  # of two pages, each a step
    many = jnp.tile(tables, (rows // 2, 1)), jnp.tile(held, (1, rows // 2))
    many += (jnp.tile(common, (rows // 2, 1, 1)),)
    k, v = unpacked(form, cache, *many, interpret=False)
    for found, wanted in zip((k, v), expected(form, cache, tables, held, common), strict=True):
        assert_equal([found[-2:]], [wanted])
