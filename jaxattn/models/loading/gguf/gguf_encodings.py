"""Decoding of GGUF's weight blocks to float32 on the device.

    F32 F16 BF16    the numbers themselves
    Q8_0            32 numbers of one byte, after a float16 scale
    Q4_0            32 numbers of 4 bits less 8, and a scale: the low halves of 16 bytes, then the
                    high ones
    Q4_1            the same with a scale and a minimum instead of the offset 8
    Q5_0, Q5_1      Q4_0 less 16, and Q4_1, with a fifth bit of each number in 4 bytes
    Q2_K            256 numbers of 2 bits in 16 groups, scales and minima of 4 bits
    Q3_K            256 numbers of 3 bits in 16 groups, scales of 6 bits less 32
    Q4_K            256 numbers in 8 groups, with scales and minima of 6 bits
    Q5_K            the same with a fifth bit of each number in 32 bytes
    Q6_K            256 numbers of 6 bits less 32 in 16 groups, with scales of one byte

The results equal those of the package `gguf` bit for bit (tests/models/test_gguf.py).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from jaxattn.models.loading.gguf.gguf_header import GgmlType
from jaxattn.models.weight_map.encodings import EncodedTensor, Shape, WeightEncoding

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
type Blocks = UInt[Array, "N bytes"]
type Numbers = Float[Array, "N numbers"]


@dataclasses.dataclass(frozen=True)
class GgufEncoding(WeightEncoding):
    """A tensor of a GGUF file.

    Attributes:
        kind: Type of the numbers.
        paired: Rows of a head in which llama.cpp stores rotated pairs as neighbors. Decoding puts
            them half a head apart, as on the Hub. 1 means that the rows keep their order.
    """

    kind: GgmlType
    paired: int = 1

    @property
    def rows_together(self) -> int:
        return self.paired

    @property
    def dtype(self) -> str:
        """The dtype in which the file's bytes are read."""
        return FLOATS.get(self.kind.name, "uint8")

    def stored_shape(self, shape: Shape) -> Shape:
        """Returns the shape in numbers of `dtype`."""
        if self.kind.block_size == 1:
            return shape
        return *shape[:-1], shape[-1] // self.kind.block_size * self.kind.nbytes

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        if shape[-1] % self.kind.block_size:
            raise ValueError(
                f"{name!r} is stored in {self.kind.name}, but {list(shape)} does not divide into "
                f"blocks of {self.kind.block_size} columns"
            )
        return (EncodedTensor(name, self.stored_shape(shape), (self.dtype,)),)

    def decode(self, parts: Sequence[Array]) -> Array:
        [stored] = parts
        found = stored
        if self.kind.block_size > 1:
            blocks = stored.reshape(-1, self.kind.nbytes)
            found = _WIDENED[self.kind.name](blocks).reshape(*stored.shape[:-1], -1)
        if self.paired == 1:
            return found
        halves = found.reshape(len(found), -1, self.paired // 2, 2, found.shape[-1])
        return halves.swapaxes(2, 3).reshape(found.shape)


def _read_float16(blocks: Blocks, offset: int) -> Float[Array, "N 1"]:
    """Returns the float16 at a byte of each block, as float32."""
    pair = blocks[:, offset : offset + 2]
    return lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[:, None]


def _signed(blocks: Blocks) -> Array:
    return lax.bitcast_convert_type(blocks, jnp.int8).astype(jnp.float32)


def _split_nibbles(data: Blocks) -> Array:
    """Returns the low halves of the bytes, then the high ones, uint8."""
    return jnp.concatenate([data & 15, data >> 4], axis=-1)


def _sum(product: Array, other: Array) -> Array:
    """Adds in float32 without fusing a multiplication, which would round once instead of twice."""
    return lax.optimization_barrier(product) + other


def _q8_0(blocks: Blocks) -> Numbers:
    return _signed(blocks[:, 2:]) * _read_float16(blocks, 0)


def _q4_0(blocks: Blocks) -> Numbers:
    return (_split_nibbles(blocks[:, 2:]).astype(jnp.float32) - 8) * _read_float16(blocks, 0)


def _q4_1(blocks: Blocks) -> Numbers:
    numbers = _split_nibbles(blocks[:, 4:]).astype(jnp.float32)
    return _sum(_read_float16(blocks, 0) * numbers, _read_float16(blocks, 2))


def _fifth(blocks: Blocks, offset: int) -> Array:
    """Returns uint8 [N, 32], 16 for numbers whose fifth bit is set; 4 bytes hold these bits."""
    each = blocks[:, offset : offset + 4, None] >> jnp.arange(8, dtype=jnp.uint8)
    return (each.reshape(-1, 32) & 1) << 4


def _q5_0(blocks: Blocks) -> Numbers:
    numbers = _split_nibbles(blocks[:, 6:]) | _fifth(blocks, 2)
    return (numbers.astype(jnp.float32) - 16) * _read_float16(blocks, 0)


def _q5_1(blocks: Blocks) -> Numbers:
    numbers = _split_nibbles(blocks[:, 8:]) | _fifth(blocks, 4)
    return _sum(_read_float16(blocks, 0) * numbers.astype(jnp.float32), _read_float16(blocks, 2))


def _unpack_2bit(data: Blocks) -> Array:
    """Returns uint8 [N, 256]: for each 32 of 64 bytes, the lowest two bits, then the next."""
    shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]
    return ((data.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 256)


def _unpack_1bit(data: Blocks) -> Array:
    """Returns uint8 [N, 8, 32]: the lowest bits of 32 bytes, then the next."""
    return (data[:, None] >> jnp.arange(8, dtype=jnp.uint8)[:, None]) & 1


def _q2_k(blocks: Blocks) -> Numbers:
    packed = blocks[:, :16]
    scale = _read_float16(blocks, 80) * (packed & 15).astype(jnp.float32)
    least = _read_float16(blocks, 82) * (packed >> 4).astype(jnp.float32)
    numbers = _unpack_2bit(blocks[:, 16:80]).reshape(-1, 16, 16).astype(jnp.float32)
    return _sum(scale[..., None] * numbers, -least[..., None]).reshape(len(blocks), -1)


def _q3_k(blocks: Blocks) -> Numbers:
    high = _unpack_1bit(blocks[:, :32]).reshape(-1, 256) << 2
    numbers = (_unpack_2bit(blocks[:, 32:96]) | high).astype(jnp.float32) - 4
    low, two = _split_nibbles(blocks[:, 96:104]), blocks[:, 104:108, None]
    two = (two >> jnp.arange(0, 8, 2, dtype=jnp.uint8)) & 3  # bits of scale i are in byte i % 4
    codes = (low | (two.swapaxes(1, 2).reshape(-1, 16) << 4)).astype(jnp.float32) - 32
    scale = _read_float16(blocks, 108) * codes
    return (scale[..., None] * numbers.reshape(-1, 16, 16)).reshape(len(blocks), -1)


def _q4_k(blocks: Blocks, high: Array | None = None) -> Numbers:
    """Decodes Q4_K, or Q5_K if `high` has the fifth bits of the numbers."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & 63, (third & 15) | ((first >> 6) << 4)]
    least = [second & 63, (third >> 4) | ((second >> 6) << 4)]
    factors = [jnp.concatenate(each, axis=1).astype(jnp.float32) for each in (scales, least)]
    scale, below = _read_float16(blocks, 0) * factors[0], _read_float16(blocks, 2) * factors[1]
    pairs = blocks[:, -128:].reshape(-1, 4, 32)  # two groups in the halves of 32 bytes
    numbers = jnp.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
    numbers = numbers if high is None else numbers | (high << 4)
    product = scale[..., None] * numbers.astype(jnp.float32)
    return _sum(product, -below[..., None]).reshape(len(blocks), -1)


def _q5_k(blocks: Blocks) -> Numbers:
    return _q4_k(blocks, _unpack_1bit(blocks[:, 16:48]))


def _q6_k(blocks: Blocks) -> Numbers:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    # Each half of a block has 64 low halves and 64 high ones, and two more bits for each quarter.
    four = _split_nibbles(low).reshape(-1, 2, 4, 32)
    shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]
    two = (high[:, :, None] >> shifts) & 3
    numbers = (four | (two << 4)).astype(jnp.float32) - 32
    scales = _read_float16(blocks, 208) * _signed(blocks[:, 192:208])
    return (numbers.reshape(-1, 16, 16) * scales[..., None]).reshape(len(blocks), -1)


_WIDENED: dict[str, Callable[[Blocks], Numbers]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
