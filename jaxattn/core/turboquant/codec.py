"""TurboQuant (arXiv 2504.19874): the form in which a compressed cache stores keys and values.

    k8v4      the key as float8_e4m3fn, without a scale        the value in 4 bits
    4bit_nc   the key rotated, 4 bits and a norm               the value in 4 bits
    k3v4_nc   the key rotated, 3 bits and a norm               the value in 4 bits
    3bit_nc   the key rotated, 3 bits and a norm               the value in 3 bits

A key is rotated by the Hadamard matrix and divided by its norm, so that its numbers are nearly
normally distributed for any key. Each becomes the nearest of 8 or 16 levels. The levels are
Lloyd-Max centroids rounded to e4m3 (0.7 % more squared error), which the tensor cores accept
directly. The norm is stored divided by the length of the levels ("nc"), so that no correction is
needed later. A value is quantized evenly between its smallest and its largest number. Sketches of
the residual (QJL) are omitted, as in every implementation whose authors measured them.

slot_layout.py defines the order of the codes in memory.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxattn.core.cache.formats import TURBOQUANT
from jaxattn.core.dispatch import PACKAGE
from jaxattn.core.numerics.rounding_barrier import rounded

PRESETS = TURBOQUANT  # bits of a key's and of a value's numbers
HEAD_DIMS = (64, 128, 256)
E4M3 = jnp.dtype("float8_e4m3fn")
LARGEST_E4M3, LARGEST_F16 = 448.0, 65504.0

# Positive levels of a standard normal number times LEVEL_UNITS; each is an e4m3 number.
LEVELS = {
    4: (0.140625, 0.40625, 0.6875, 1.0, 1.375, 1.75, 2.25, 3.0),
    3: (0.375, 1.125, 2.0, 3.25),
}
LEVEL_UNITS = {4: 1.085, 3: 1.505}


class TurboCodes(NamedTuple):
    """The stored form of tokens [*t], with one number per code.

    Attributes:
        keys: The bytes of e4m3 numbers, or indices of levels in ascending order.
        values: Codes from 0, the minimum, to 2**bits - 1, the maximum.
        norm: The key's norm divided by its levels' length; None for e4m3 keys.
        scale, minimum: value = minimum + scale * code.
    """

    keys: UInt8[Array, "*t D"]
    values: UInt8[Array, "*t D"]
    norm: Float[Array, "*t"] | None
    scale: Float[Array, "*t"]
    minimum: Float[Array, "*t"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurboFormat:
    """A preset for a head dim; one layer's cache is uint8 [N, Hk, C * slot_bytes].

    Attributes:
        preset: "k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc". The last two presets each warn once.
        head_dim: D, 64, 128 or 256.

    Raises:
        ValueError: There is no such preset, or not for that head dim.
    """

    preset: str
    head_dim: int

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            hint = ""
            if isinstance(self.preset, str) and "3" in self.preset:
                hint = "; 3-bit keys lose much accuracy, so they need the full name of a preset"
            names = ", ".join(PRESETS)
            raise ValueError(
                f"TurboFormat: preset must be one of {names}, got {self.preset!r}{hint}"
            )
        if self.head_dim not in HEAD_DIMS:
            why = "the rotation needs a power of two, and kernels a multiple of 64"
            raise ValueError(
                f"TurboFormat: head_dim must be 64, 128 or 256 ({why}), got {self.head_dim}; use "
                "another cache format"
            )
        if self.key_bits == 3:
            _warn_of_three_bits(self.preset, self.head_dim)

    @property
    def key_bits(self) -> int:
        return PRESETS[self.preset][0]

    @property
    def value_bits(self) -> int:
        return PRESETS[self.preset][1]

    @property
    def rotated(self) -> bool:
        """Whether keys are rotated, and therefore queries."""
        return self.key_bits != 8

    @property
    def key_bytes(self) -> int:
        return self.head_dim * self.key_bits // 8

    @property
    def value_bytes(self) -> int:
        return self.head_dim * self.value_bits // 8

    @property
    def meta_bytes(self) -> int:
        """The bytes of the float16 numbers: the key's norm, the value's scale and minimum."""
        return 6 if self.rotated else 4

    @property
    def slot_bytes(self) -> int:
        """The bytes of a token in one layer and key-value head."""
        return self.key_bytes + self.value_bytes + self.meta_bytes

    def page_size(self, kv_cache: jax.Array) -> int:
        """Returns C of a cache [..., Hk, C * slot_bytes]."""
        return int(kv_cache.shape[-1]) // self.slot_bytes


@functools.cache
def _warn_of_three_bits(preset: str, head_dim: int) -> None:
    warnings.warn(
        f"the cache format {preset} at head_dim {head_dim} stores 3 bits per number of a key: it "
        "raised SmolLM2-135M's perplexity by 31 to 37%, compared with 8% for 4bit_nc and 2% for "
        "k8v4; measure your model with python -m jaxattn.bench quality",
        skip_file_prefixes=(PACKAGE,),
    )


def hadamard(dim: int) -> np.ndarray:
    """Returns Sylvester's matrix [D, D] over sqrt(D), which is symmetric and its own inverse."""
    both = np.arange(dim)[:, None] & np.arange(dim)
    odd = np.bitwise_count(both) % 2
    return ((1 - 2.0 * odd) / math.sqrt(dim)).astype(np.float32)


def rotate(x: Float[Array, "*t D"]) -> Float[Array, "*t D"]:
    """Returns x times `hadamard`, in float32; applying it twice gives x."""
    return butterfly(x.astype(jnp.float32)) * np.float32(x.shape[-1] ** -0.5)


def butterfly(x: Float[Array, "*t D"]) -> Float[Array, "*t D"]:
    """Returns x times `hadamard` and sqrt(D), by sums and differences in the kernels' order."""
    *before, dim = x.shape
    distance = 1
    while distance < dim:
        halves = x.reshape(*before, dim // (2 * distance), 2, distance)
        a, b = halves[..., 0, :], halves[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(*before, dim)
        distance *= 2
    return x


def levels(bits: int) -> np.ndarray:
    """Returns all levels in ascending order, float32; the index is the code."""
    positive = np.array(LEVELS[bits], np.float32)
    return np.concatenate([-positive[::-1], positive])


def of_levels(bits: int, keys: UInt8[Array, "*t D"]) -> Float[Array, "*t D"]:
    """Returns the levels of codes, float32, by selection, which is faster than a table."""
    size = jnp.zeros(keys.shape, jnp.float32)
    half = 2 ** (bits - 1)
    place = jnp.where(keys < half, half - 1 - keys, keys - half)
    for i, level in enumerate(LEVELS[bits]):
        size = jnp.where(place == i, jnp.float32(level), size)
    return jnp.where(keys < half, -size, size)


def key_numbers(form: TurboFormat, keys: UInt8[Array, "*t D"]) -> Float[Array, "*t D"]:
    """Returns keys without their norms, float32: numbers exact in e4m3 and float16."""
    if form.rotated:
        return of_levels(form.key_bits, keys)
    return lax.bitcast_convert_type(keys, E4M3).astype(jnp.float32)


def plain_keys(
    form: TurboFormat, codes: TurboCodes, turn: Callable[[Array], Array] = butterfly
) -> Float[Array, "*t D"]:
    """Returns keys as they were before the rotation, float32.

    The levels' sums are exact, and the norm is applied after them.

    Args:
        turn: Computes the sums, as `butterfly` does.
    """
    keys = key_numbers(form, codes.keys)
    if codes.norm is None:
        return keys
    share = codes.norm.astype(jnp.float32) * np.float32(form.head_dim**-0.5)
    return turn(keys) * share[..., None]


def quantize(form: TurboFormat, k: Float[Array, "*t D"], v: Float[Array, "*t D"]) -> TurboCodes:
    """Returns the stored form of keys and values.

    A NaN or an infinity in a key makes its norm NaN (for e4m3 keys, the number itself), and one in
    a value makes its scale and minimum NaN. The token thus gives NaN to every token that sees it.
    Norms, scales and minima beyond float16, and e4m3 keys beyond 448, saturate.
    """
    values, scale, minimum = _quantize_values(v, form.value_bits)
    k = jnp.where(jnp.isinf(k), jnp.nan, k).astype(jnp.float32)
    if not form.rotated:
        stored = jnp.clip(k, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3)
        keys = lax.bitcast_convert_type(stored, jnp.uint8)
        return TurboCodes(keys, values, None, scale, minimum)
    # Normalized twice, because the squares of numbers like 1e30 exceed float32.
    largest = jnp.max(jnp.abs(k), axis=-1, keepdims=True)
    k = k / jnp.where(largest == 0, 1, largest)
    length = jnp.sqrt(jnp.sum(k * k, axis=-1, keepdims=True))
    unit = rotate(k / jnp.where(length == 0, 1, length))
    table = levels(form.key_bits)
    borders = ((table[1:] + table[:-1]) / 2).tolist()
    wide = unit * np.float32(LEVEL_UNITS[form.key_bits] * math.sqrt(form.head_dim))
    keys = functools.reduce(jnp.add, [(wide >= border).astype(jnp.uint8) for border in borders])
    norm = (largest * length)[..., 0] / level_length(form.key_bits, keys)
    return TurboCodes(keys, values, _as_f16(norm), scale, minimum)


def level_length(bits: int, keys: UInt8[Array, "*t D"]) -> Float[Array, "*t"]:
    """Returns the length of the vector of a key's levels."""
    return jnp.sqrt(jnp.sum(jnp.square(of_levels(bits, keys)), axis=-1))


def _quantize_values(v: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    most = 2**bits - 1
    v = jnp.where(jnp.isinf(v), jnp.nan, v).astype(jnp.float32)
    low, high = jnp.min(v, axis=-1), jnp.max(v, axis=-1)
    minimum = _as_f16(low)
    # Divided first, because the difference of two float32 numbers may overflow. XLA may round only
    # one of the quotients, so that equal numbers would differ.
    scale = _as_f16(jnp.where(high == low, 0, high / most - low / most))
    # With the rounded numbers, which a reader uses.
    above = v - minimum.astype(jnp.float32)[..., None]
    by = scale.astype(jnp.float32)[..., None]
    codes = jnp.where(by > 0, jnp.floor(above / jnp.where(by > 0, by, 1) + 0.5), 0)
    codes = jnp.clip(jnp.where(jnp.isnan(codes), 0, codes), 0, most)
    return codes.astype(jnp.uint8), scale, minimum


def _as_f16(x: jax.Array) -> jax.Array:
    return rounded(jnp.clip(x, -LARGEST_F16, LARGEST_F16), jnp.float16)


def dequantize(
    form: TurboFormat, codes: TurboCodes
) -> tuple[Float[Array, "*t D"], Float[Array, "*t D"]]:
    """Returns (keys, values) in float32; keys stay rotated if the format rotates them.

    The function is differentiable in the norms, scales and minima; the codes are integers.
    """
    keys = key_numbers(form, codes.keys)
    if codes.norm is not None:
        keys = keys * codes.norm.astype(jnp.float32)[..., None]
    scale, minimum = (x.astype(jnp.float32)[..., None] for x in (codes.scale, codes.minimum))
    return keys, minimum + scale * codes.values.astype(jnp.float32)
