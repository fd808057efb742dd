"""FP8 in blocks of 128 x 128: products with the scales, rounded once, at every edge."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.fp8_block_scaling import block_counts, dequantize, quantize


def numbers_of(*shape: int, seed: int = 0) -> np.ndarray:
    """All finite e4m3 numbers, in a random order."""
    bits = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0  # NaN
    return bits.view(jnp.float8_e4m3fn.dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(128, 128), (576, 130), (1, 1), (129, 127), (2, 200, 300)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_number_is_multiplied_by_its_blocks_scale_and_rounded_once(shape, dtype):
    numbers = numbers_of(*shape)
    counts = block_counts(*shape[-2:])
    scales = np.random.default_rng(1).uniform(1e-4, 3, (*shape[:-2], *counts)).astype(np.float32)
    expected = np.zeros(shape, np.float32)
    for place in np.ndindex(shape):
        *batch, row, column = place
        scale = scales[(*batch, row // 128, column // 128)]
        expected[place] = np.float32(numbers[place]) * scale
    found = dequantize(numbers, scales, dtype)
    np.testing.assert_array_equal(found, expected.astype(jnp.dtype(dtype)))


def test_what_is_quantized_is_as_near_as_three_bits_of_mantissa_allow():
    weights = np.random.default_rng(2).normal(size=(3, 200, 260)).astype(np.float32)
    weights[0, :128, :128] = 0
    numbers, scales = quantize(weights)
    assert (numbers.dtype, scales.shape) == (jnp.float8_e4m3fn, (3, 2, 3))
    assert scales[0, 0, 0] == 0
    found = np.asarray(dequantize(numbers, scales, jnp.float32))
    # Half a unit of the last of 3 bits, and of the smallest subnormal number 2**-9.
    wide = np.repeat(np.repeat(scales, 128, 1), 128, 2)[:, :200, :260]
    error = np.abs(found - weights)
    assert (error <= np.maximum(2**-4 * np.abs(weights), 2**-10 * wide) * 1.001).all()
    np.testing.assert_array_equal(found[0, :128, :128], 0)
