"""INT4 weights whose groups have zero points, as AWQ and GPTQ publish them.

For a linear "x.weight" [out, in], a folder contains `x.qweight`, `x.scales` [in / group, out] and
`x.qzeros` [in / group, out / 8]. A weight is (code - zero point) * scale. An I32 word holds eight
numbers, with the first in its lowest bits:

    AWQ   qweight [in, out / 8]; the eight are outputs 0 2 4 6 1 3 5 7 of the word, also in qzeros
    GPTQ  qweight [in / 8, out]; the eight are consecutive inputs, in qzeros consecutive outputs

GPTQ's first version subtracts 0x11111111 from words of zero points, so a zero point of 0 borrows
from the next one. A symmetric matrix has 8 everywhere. Some folders store it in the second
version's form but claim to be of the first. `x.g_idx` holds the group of each input.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxattn.models.weight_map.encodings import (
    FLOATS,
    INT4_PER_WORD,
    EncodedTensor,
    Int4Encoding,
    Shape,
)

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of its outputs
IN_ORDER = tuple(range(INT4_PER_WORD))
ONES = 0x11111111
SYMMETRIC = (0x77777777, 0x88888888 - 2**32)  # words of zero points of 8, by version


@dataclasses.dataclass(frozen=True)
class ZeroPointEncoding(Int4Encoding):
    """Codes and zero points of 4 bits in words."""

    @property
    def zeros(self) -> bool:
        """Whether groups have zero points other than 8."""
        return True

    @property
    def by_columns(self) -> bool:
        return True

    @property
    def rows_together(self) -> int:
        return self.group

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        if len(shape) != 2 or shape[1] % self.group or shape[0] % INT4_PER_WORD:
            raise ValueError(
                f"{name!r} is stored in INT4 with zero points, but {list(shape)} is not a matrix "
                f"with a multiple of {INT4_PER_WORD} rows and a multiple of {self.group} columns"
            )
        out, inner = shape
        groups, stem = inner // self.group, name.removesuffix("weight")
        zeros = (groups, out // INT4_PER_WORD)
        return (
            self._numbers(f"{stem}qweight", out, inner),
            EncodedTensor(f"{stem}scales", (groups, out), FLOATS, rows=self.group),
            EncodedTensor(f"{stem}qzeros", zeros, ("int32",), rows=self.group),
        )

    @abc.abstractmethod
    def _numbers(self, name: str, out: int, inner: int) -> EncodedTensor:
        """Returns the tensor of codes."""


@dataclasses.dataclass(frozen=True)
class AwqEncoding(ZeroPointEncoding):
    def _numbers(self, name: str, out: int, inner: int) -> EncodedTensor:
        return EncodedTensor(name, (inner, out // INT4_PER_WORD), ("int32",))

    def codes(self, parts: Sequence[Array]) -> tuple[Int[Array, "n rows columns"], Array, Array]:
        words, scales, zeros = parts
        numbers, zeros = (_numbers_of(each, AWQ_PLACES) for each in (words, zeros))
        return _swapped(numbers), _swapped(scales), _swapped(zeros)


@dataclasses.dataclass(frozen=True)
class GptqEncoding(ZeroPointEncoding):
    """GPTQ's words of inputs.

    Attributes:
        offset: Offset of the zero points: 1 in the first version, 0 in "gptq_v2". None means
            symmetric, with 8 everywhere.
    """

    offset: int | None = None

    @property
    def zeros(self) -> bool:
        return self.offset is not None

    def parts(self, name: str, shape: Shape) -> tuple[EncodedTensor, ...]:
        (*found, zeros), inner = super().parts(name, shape), shape[1]
        if not self.zeros:
            zeros = dataclasses.replace(zeros, rows=0, allowed_values=SYMMETRIC)
        groups = EncodedTensor(
            f"{name.removesuffix('weight')}g_idx",
            (inner,),
            ("int32",),
            rows=0,
            numbers=_groups(inner, self.group),
        )
        return *found, zeros, groups

    def _numbers(self, name: str, out: int, inner: int) -> EncodedTensor:
        shape = (inner // INT4_PER_WORD, out)
        return EncodedTensor(name, shape, ("int32",), rows=INT4_PER_WORD)

    def codes(
        self, parts: Sequence[Array]
    ) -> tuple[Int[Array, "n rows columns"], Array, Array | None]:
        words, scales, *zeros = parts
        numbers, scales = _numbers_of(_swapped(words), IN_ORDER), _swapped(scales)
        if self.offset is None:
            return numbers, scales, None
        stored = zeros[0] + jnp.int32(self.offset * ONES)
        return numbers, scales, _swapped(_numbers_of(stored, IN_ORDER))


def _numbers_of(words: Int[Array, "n a b"], places: Sequence[int]) -> Int[Array, "n a c"]:
    """Returns the eight numbers of each word, by their places in it."""
    numbers = words[..., None] >> (4 * jnp.array(places, jnp.int32)) & 15
    return numbers.reshape(*words.shape[:2], -1)


def _swapped(x: Array) -> Array:
    return jnp.swapaxes(x, 1, 2)


@functools.cache
def _groups(inner: int, group: int) -> tuple[int, ...]:
    """Returns the group of each input, in order."""
    return tuple(i // group for i in range(inner))
