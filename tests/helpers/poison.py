"""Poison for memory that was never written, and the shapes of the cases that use it.

A test makes a case twice from the same numbers, with zeros and with poison wherever there is no
live token, row or slot. Both run the same executable, and every real bit must agree.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

POISONS = {
    "nan": np.nan,
    "inf": np.inf,
    "minus inf": -np.inf,
    "3e38": 3e38,  # finite, so a check for NaN does not find it
    "0x7F": 0x7F,
    "0xFF": 0xFF,
}
every_poison = pytest.mark.parametrize("poison", list(POISONS))
# Small shapes everywhere, and the kernels' own shapes on a Hopper GPU.
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def fill(shape: tuple[int, ...], dtype: Any, poison: str | None) -> np.ndarray:
    """An array full of poison, or of zeros for None."""
    array = np.zeros(shape, jnp.dtype(dtype))
    if poison is None:
        return array
    if poison.startswith("0x"):
        array.view(np.uint8)[...] = POISONS[poison]
    elif jnp.issubdtype(array.dtype, jnp.floating):
        with np.errstate(over="ignore"):
            array[...] = np.float32(POISONS[poison])
    else:
        array[...] = np.iinfo(array.dtype).max
    return array


@dataclasses.dataclass(frozen=True)
class Dims:
    """Shapes of a device's cases."""

    heads: int
    rank: int
    rope: int
    page: int
    key_heads: int
    value_heads: int
    head: int
    dtype: str
    implementation: str


DIMS = {
    "cpu": Dims(3, 16, 8, 8, 1, 2, 8, "bfloat16", "xla"),
    "gpu": Dims(128, 512, 64, 64, 16, 32, 128, "bfloat16", "mosaic_gpu"),
}


def bits(array: Any) -> np.ndarray:
    """The array's bytes, so that NaN equals itself and 0 differs from -0."""
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)


def same_bits(one: Any, other: Any) -> None:
    assert one.shape == other.shape and one.dtype == other.dtype
    np.testing.assert_array_equal(bits(one), bits(other))


def is_zero(array: Any) -> None:
    """Asserts that every bit is 0."""
    assert not bits(array).any()


def fp8_scale(out: Any) -> tuple[np.ndarray, np.ndarray]:
    """(amax, scale) of per-tensor FP8 quantization of the whole batch, which one NaN ruins."""
    amax = np.abs(np.asarray(out, np.float32)).max()
    return np.asarray(amax), np.asarray(amax / np.float32(448))


def block_scales(out: Any, rows: int = 128) -> np.ndarray:
    """The scale of each tile of rows, which one real row shares with 127 rows of padding."""
    flat = np.abs(np.asarray(out, np.float32)).reshape(out.shape[0], -1).max(axis=1)
    return np.pad(flat, (0, -len(flat) % rows)).reshape(-1, rows).max(axis=1) / 448
