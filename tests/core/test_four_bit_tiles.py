"""Tiles of 4-bit weights: codes and scales come back, and mean what the formats say."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat, pack, unpack
from tests.helpers.four_bit_compiled import dequantize, quantize

MXFP4 = FourBitFormat("mxfp4", 32, "e8m0")
FORMS = [
    MXFP4,
    FourBitFormat("int4", 32),
    FourBitFormat("int4", 32, zeros=True),
    FourBitFormat("int4", 128, "float16"),
    FourBitFormat("int4", 128, "float16", zeros=True),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def drawn(form, rows=128, columns=256):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (2, rows, columns)).astype(np.uint8)
    groups = (2, rows, columns // form.group)
    if form.scale == "e8m0":
        scales = rng.integers(100, 150, groups).astype(np.uint8)
    else:
        scales = rng.uniform(0.01, 1, groups).astype(jnp.dtype(form.scale))
    zeros = rng.integers(0, 16, groups).astype(np.uint8) if form.zeros else None
    return codes, scales, zeros


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_number_is_its_code_times_its_scale(form):
    codes, scales, zeros = drawn(form)
    tiles = pack(jnp.asarray(codes), jnp.asarray(scales), zeros, form)
    assert tiles.shape == (2, *form.tiles(128, 256)) and tiles.dtype == jnp.uint8
    for found, wanted in zip(unpack(tiles, form), (codes, scales, zeros), strict=True):
        np.testing.assert_array_equal(found, wanted)
    spread = np.repeat(scales, form.group, -1).astype(np.float64)
    if form is MXFP4:
        wanted = E2M1[codes] * 2.0 ** (spread - 127)
    else:
        wanted = (
            codes - (8.0 if zeros is None else np.repeat(zeros * 1.0, form.group, -1))
        ) * spread
    for dtype in ("float32", "bfloat16"):
        found = dequantize(tiles, form, dtype)
        np.testing.assert_array_equal(found, wanted.astype("f4").astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("form", [MXFP4, FORMS[2]], ids=str)
def test_quantized_numbers_are_the_nearest(form):
    weights = np.random.default_rng(1).normal(size=(64, 128)).astype(np.float32)
    tiles = quantize(jnp.asarray(weights), form)
    found = np.asarray(dequantize(tiles, form, jnp.float32))
    assert np.linalg.norm(found - weights) < 0.15 * np.linalg.norm(weights)
    again = np.asarray(dequantize(quantize(jnp.asarray(found), form), form, jnp.float32))
    assert np.linalg.norm(again - found) < 0.1 * np.linalg.norm(found)


@pytest.mark.parametrize(
    "options",
    [("mxfp4", 32), ("mxfp4", 32, "e8m0", True), ("int4", 64), ("int4", 32, "e8m0")],
    ids=str,
)
def test_other_formats_are_refused_by_name(options):
    with pytest.raises(ValueError, match="is not implemented: MXFP4 needs e8m0 scales of 32"):
        FourBitFormat(*options)


def test_a_matrix_that_is_not_whole_tiles_is_refused():
    with pytest.raises(ValueError, match=r"\[64, 64\] does not divide into tiles of 64 x 128"):
        FourBitFormat("int4", 128).tiles(64, 64)
    assert not FourBitFormat("int4", 32).fits(96, 64)
