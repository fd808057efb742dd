"""Encodings of published weights, and their decoding on the device.

    FloatEncoding      the weight itself, bfloat16, float16 or float32
    Fp8BlockEncoding   F8_E4M3 numbers, and a scale `weight_scale_inv` for each 128 x 128 block
    Fp8ScaledEncoding  F8_E4M3 numbers, and a scale for each row or for all
    Mxfp4Encoding      two 4-bit numbers in a byte of `_blocks`, a power of two for 32 of them
    Int4GroupEncoding  eight numbers in an I32 word of `weight_packed`, a scale for 32 or 128
                       columns, and with `weight_zero_point` a zero point
    ZeroPointEncoding  as AWQ and GPTQ store them (`zero_point_encodings.py`)
    FourBitEncoding    one of the previous three, kept in 4 bits, in tiles with its scales
    Fp8NumberEncoding  FP8 numbers that stay FP8
    ScaleEncoding      scales that stay next to them

`decode` runs on the device, on whole blocks of a weight's leading rows, or of its columns if these
come first in the tensors.
"""

import abc
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.numerics import four_bit_tiles
from jaxattn.core.numerics.four_bit_tiles import MXFP4_GROUP, FourBitFormat, from_e2m1
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, block_counts, dequantize

FLOATS = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
SHAPES = ("int32", "int64")  # compressed-tensors writes int64 since 0.20
INT4_PER_WORD = 8

type Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class EncodedTensor:
    """A tensor in which a weight is stored, or one of several.

    Attributes:
        name: Name of the tensor.
        shape: Required shape.
        dtypes: Allowed dtypes.
        rows: Number of the weight's rows in one of its rows, or of columns if the encoding is
            `by_columns`. 0 means that the tensor is not loaded, and must contain `numbers` or
            `allowed_values`.
        numbers: Required contents of a tensor that is not loaded.
        allowed_values: Allowed values of each of its numbers.
    """

    name: str
    shape: Shape
    dtypes: tuple[str, ...]
    rows: int = 1
    numbers: tuple[int, ...] = ()
    allowed_values: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class WeightEncoding(abc.ABC):
    """The storage format of a weight. Equal objects decode alike."""

    @property
    def by_columns(self) -> bool:
        """Whether the tensors begin with the axis of the weight's columns, and blocks divide it."""
        return False

    @property
    def rows_together(self) -> int:
        """The number of rows, or columns, of which a block has a multiple."""
        return 1

    @property
    def column_step(self) -> int:
        """The number of columns per step along the parameter's axis of columns."""
        return 1

    @abc.abstractmethod
    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        """Returns the tensors of a weight with this name and shape.

        Raises:
            ValueError: A weight of this shape cannot be stored in this format.
        """

    @abc.abstractmethod
    def decode(self, parts: Sequence[Array]) -> Array:
        """Decodes parts [n, ...] to weights [n, rows, ...] of n blocks, float32 or as stored."""


@dataclasses.dataclass(frozen=True)
class FloatEncoding(WeightEncoding):
    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        return (EncodedTensor(name, shape, FLOATS),)

    def decode(self, parts: Sequence[Array]) -> Array:
        return parts[0]


@dataclasses.dataclass(frozen=True)
class Fp8NumberEncoding(FloatEncoding):
    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        return (EncodedTensor(name, shape, (FP8,)),)


@dataclasses.dataclass(frozen=True)
class ScaleEncoding(WeightEncoding):
    """Floats of 16 or 32 bits, or powers of two in E8M0; the parameters are float32."""

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        return (EncodedTensor(name, shape, SCALES),)

    def decode(self, parts: Sequence[Array]) -> Array:
        return _scales(parts[0])


@dataclasses.dataclass(frozen=True)
class Fp8BlockEncoding(WeightEncoding):
    """FP8 numbers with one scale per block; `scale` is the suffix of the scales' name."""

    scale: str = "_scale_inv"

    @property
    def rows_together(self) -> int:
        return BLOCK

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        if len(shape) != 2:
            raise ValueError(f"{name!r} is stored in FP8, but {list(shape)} is not a matrix")
        scale = EncodedTensor(f"{name}{self.scale}", block_counts(*shape), SCALES, rows=BLOCK)
        return EncodedTensor(name, shape, (FP8,)), scale

    def decode(self, parts: Sequence[Array]) -> Array:
        numbers, scales = parts
        return dequantize(numbers, _scales(scales), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fp8ScaledEncoding(WeightEncoding):
    """FP8 numbers with one scale per row ("channel"), or with a single one.

    Attributes:
        by_row: Whether the scales are [rows, 1].
        scale: Suffix of the scales' name.
    """

    by_row: bool
    scale: str = "_scale"

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        if len(shape) != 2:
            raise ValueError(f"{name!r} is stored in FP8, but {list(shape)} is not a matrix")
        scales, rows = ((shape[0], 1), 1) if self.by_row else ((1,), shape[0])
        scale = EncodedTensor(f"{name}{self.scale}", scales, FLOATS, rows=rows)
        return EncodedTensor(name, shape, (FP8,)), scale

    def decode(self, parts: Sequence[Array]) -> Float[Array, "n rows columns"]:
        numbers, scales = (part.astype(jnp.float32) for part in parts)
        return numbers * scales.reshape(len(scales), -1, 1)


@dataclasses.dataclass(frozen=True)
class CodeEncoding(WeightEncoding):
    """Numbers of 4 bits with scales. The first two `parts` are the numbers and the scales."""

    @abc.abstractmethod
    def codes(self, parts: Sequence[Array]) -> tuple[Array, Array, Array | None]:
        """Returns the codes [n, ..., rows, columns], the scales and the zero points.

        Scales [n, ..., rows, groups] have their stored dtype. Zero points are None unless each
        group has its own.
        """


@dataclasses.dataclass(frozen=True)
class Int4Encoding(CodeEncoding):
    """Integers of 4 bits: a weight is (code - zero point) * scale in float32.

    Attributes:
        group: Number of columns that share a scale and a zero point.
    """

    group: int = 32

    def decode(self, parts: Sequence[Array]) -> Float[Array, "n rows columns"]:
        codes, scales, zeros = self.codes(parts)
        numbers = codes.reshape(*scales.shape, self.group)
        numbers = numbers - (8 if zeros is None else zeros[..., None])
        weights = numbers.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
        return weights.reshape(codes.shape)


@dataclasses.dataclass(frozen=True)
class Int4GroupEncoding(Int4Encoding):
    """INT4 in groups, where bits 4 j to 4 j + 3 of word w hold column 8 w + j.

    The zero point is 8, or each group has its own, of which a word holds eight rows.

    Attributes:
        zeros: Whether each group has its own zero point ("symmetric": false).
    """

    zeros: bool = False

    @property
    def rows_together(self) -> int:
        return INT4_PER_WORD if self.zeros else 1

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        if len(shape) != 2 or shape[1] % self.group or shape[0] % self.rows_together:
            of_zeros = f" and a multiple of {INT4_PER_WORD} rows" if self.zeros else ""
            raise ValueError(
                f"{name!r} is stored in INT4, but {list(shape)} is not a matrix with a multiple "
                f"of {self.group} columns{of_zeros}"
            )
        rows, columns = shape
        groups, words = columns // self.group, (rows // INT4_PER_WORD,)
        zeros = EncodedTensor(
            f"{name}_zero_point", (*words, groups), ("int32",), rows=INT4_PER_WORD
        )
        return (
            EncodedTensor(f"{name}_packed", (rows, columns // INT4_PER_WORD), ("int32",)),
            EncodedTensor(f"{name}_scale", (rows, groups), FLOATS),
            *((zeros,) if self.zeros else ()),
            EncodedTensor(f"{name}_shape", (2,), SHAPES, rows=0, numbers=shape),
        )

    def codes(
        self, parts: Sequence[Array]
    ) -> tuple[Int[Array, "n rows columns"], Array, Array | None]:
        words, scales, *zeros = parts
        return _unpack_int4(words, 2), scales, _unpack_int4(zeros[0], 1) if zeros else None


@dataclasses.dataclass(frozen=True)
class Mxfp4Encoding(CodeEncoding):
    """MXFP4 experts [E, in, out], of which `_blocks` stores the columns [E, out] one after another.

    A block is 16 bytes of 32 numbers; the lower half of a byte is the first number. The numbers
    decode to bfloat16, as in transformers.
    """

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        if len(shape) != 3 or shape[1] % MXFP4_GROUP:
            raise ValueError(
                f"{name!r} is stored in MXFP4, but {list(shape)} is not a stack of matrices with "
                f"a multiple of {MXFP4_GROUP} rows"
            )
        experts, inner, out = shape
        groups = (experts, out, inner // MXFP4_GROUP)
        return (
            EncodedTensor(f"{name}_blocks", (*groups, MXFP4_GROUP // 2), ("uint8",)),
            EncodedTensor(f"{name}_scales", groups, ("uint8",)),
        )

    def decode(self, parts: Sequence[Array]) -> Float[Array, "n experts inner out"]:
        codes, scales, _ = self.codes(parts)
        numbers = from_e2m1(codes.reshape(*scales.shape, MXFP4_GROUP), scales[..., None])
        return jnp.swapaxes(numbers.reshape(codes.shape), 2, 3)

    def codes(
        self, parts: Sequence[Array]
    ) -> tuple[Int[Array, "n experts out inner"], Array, None]:
        blocks, scales = parts
        codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
        return codes.reshape(*scales.shape[:3], -1), scales, None


@dataclasses.dataclass(frozen=True)
class FourBitEncoding(WeightEncoding):
    """Numbers of 4 bits that stay 4 bits, in tiles with scales (`core.numerics.four_bit_tiles`).

    Attributes:
        encoding: Format in which the folder stores the numbers.
        interleaved: Number of matrices whose rows MXFP4 experts interleave; the tiles of one matrix
            come before those of the next. 0 means one matrix.
    """

    encoding: CodeEncoding
    form: FourBitFormat
    interleaved: int = 0

    @property
    def by_columns(self) -> bool:
        return self.encoding.by_columns

    @property
    def rows_together(self) -> int:
        if self.by_columns:
            return self.form.columns
        return 1 if isinstance(self.encoding, Mxfp4Encoding) else four_bit_tiles.ROWS

    @property
    def column_step(self) -> int:
        return self.form.columns

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        numbers, scales, *rest = self.encoding.parts(name, shape)
        if self.form.scale != "e8m0":
            scales = dataclasses.replace(scales, dtypes=(self.form.scale,))
        return numbers, scales, *rest

    def decode(self, parts: Sequence[Array]) -> Array:
        codes, scales, zeros = self.encoding.codes(parts)
        if self.interleaved:
            codes, scales = (
                jnp.swapaxes(x.reshape(*x.shape[:2], -1, self.interleaved, x.shape[-1]), 2, 3)
                for x in (codes, scales)
            )
        return four_bit_tiles.pack(codes, scales, zeros, self.form)


def _unpack_int4(words: Int[Array, "n a b"], axis: int) -> Int[Array, "n c d"]:
    """Returns the eight numbers of each word, one after another along an axis."""
    places = jnp.arange(0, 32, 4, dtype=jnp.int32)
    numbers = jnp.expand_dims(words, axis + 1) >> places.reshape(-1, *(1,) * (2 - axis)) & 15
    return numbers.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])


def _scales(stored: Float[Array, "..."] | Int[Array, "..."]) -> Float[Array, "..."]:
    """Converts scales to float32; E8M0, which comes as uint8, is float32's exponent."""
    if stored.dtype != jnp.uint8:
        return stored.astype(jnp.float32)
    exponents = stored.astype(jnp.uint32)
    powers = lax.bitcast_convert_type(exponents << 23, jnp.float32)
    powers = jnp.where(exponents == 0, jnp.float32(2.0**-127), powers)
    return jnp.where(exponents == 255, jnp.nan, powers)
