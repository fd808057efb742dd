"""Transforms of a published tensor's blocks of rows on their way to the parameters."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxattn.core.numerics.four_bit_tiles import ROWS as TILE_ROWS
from jaxattn.core.numerics.fp8_block_scaling import interleave_columns


@dataclasses.dataclass(frozen=True)
class WeightTransform:
    """What is done to a tensor's rows.

    Attributes:
        columns_axis: of the parameter, counted from its last: where a matrix's columns go one after
            another; None: nowhere.
        anywhere: the same change of rows wherever they go; one program places all blocks of it.
    """

    columns_axis: ClassVar[int | None] = None

    @property
    def anywhere(self) -> "WeightTransform":
        return self

    @property
    def rows_together(self) -> int:
        """A block has a multiple of so many of the tensor's leading rows."""
        return 1

    def block(self, rows: Array) -> Array:
        """The part of the parameter that a block of rows becomes."""
        return rows

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        """Where that part begins in the parameter, for a block that begins at `row`."""
        return (row, *(0,) * (dims - 1))


@dataclasses.dataclass(frozen=True)
class Identity(WeightTransform):
    columns_axis: ClassVar[int | None] = -1


@dataclasses.dataclass(frozen=True)
class WriteRowsAt(WeightTransform):
    """As it is, below the first `first` rows of the parameter."""

    first: int

    columns_axis: ClassVar[int | None] = -1

    @property
    def anywhere(self) -> WeightTransform:
        return Identity()

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first + row, *(0,) * (dims - 1))


@dataclasses.dataclass(frozen=True)
class WriteIndex(WeightTransform):
    """As it is, number `number` along an axis that the parameter has before the tensor's."""

    number: int

    columns_axis: ClassVar[int | None] = -1

    @property
    def anywhere(self) -> WeightTransform:
        return WriteIndex(0)

    def block(self, rows: Array) -> Array:
        return rows[None]

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.number, row, *(0,) * (dims - 2))


@dataclasses.dataclass(frozen=True)
class WriteTiles(WeightTransform):
    """Tiles of a matrix of 4 bits as they are, below the first `first` rows of the parameter.

    Attributes:
        number: along an axis that the parameter has before them; None: it has none.
    """

    number: int | None = None
    first: int = 0

    columns_axis: ClassVar[int | None] = -2

    @property
    def anywhere(self) -> WeightTransform:
        return WriteTiles(None if self.number is None else 0)

    def block(self, rows: Array) -> Array:
        return rows if self.number is None else rows[None]

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        before = () if self.number is None else (self.number,)
        tile = (self.first + row) // TILE_ROWS
        return (*before, tile, *(0,) * (dims - 1 - len(before)))


@dataclasses.dataclass(frozen=True)
class SplitExpertRows(WeightTransform):
    """Of a matrix as wide as several experts, `width` rows for each: experts `first` and on, and
    in each of them the place `within`."""

    width: int
    first: int
    within: tuple[int, ...]

    columns_axis: ClassVar[int | None] = -1

    @property
    def anywhere(self) -> WeightTransform:
        return SplitExpertRows(self.width, 0, (0,) * len(self.within))

    @property
    def rows_together(self) -> int:
        return self.width

    def block(self, rows: Array) -> Array:
        experts = rows.reshape(-1, self.width, rows.shape[-1])
        return experts[:, None] if len(self.within) == 3 else experts

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first + row // self.width, *self.within)


@dataclasses.dataclass(frozen=True)
class SplitExpertColumns(WeightTransform):
    """Of a matrix as wide as several experts, `width` columns for each: experts `first` and on."""

    width: int
    first: int

    def block(self, rows: Array) -> Array:
        return rows.reshape(rows.shape[0], -1, self.width).swapaxes(0, 1)

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first, row, 0)


@dataclasses.dataclass(frozen=True)
class TransposeExperts(WeightTransform):
    """Of experts [E, in, out] the matrices [E, out, in].

    Attributes:
        parts: so many matrices have their columns in turn; then all rows of one follow each other.
    """

    parts: int = 1

    def block(self, rows: Array) -> Array:
        experts, inner, columns = rows.shape
        split = jnp.transpose(rows.reshape(experts, inner, -1, self.parts), (0, 3, 2, 1))
        return split.reshape(experts, columns, inner)


@dataclasses.dataclass(frozen=True)
class SplitInterleaved(WeightTransform):
    """Of vectors [E, N] whose numbers are of `parts` vectors in turn, those one after another."""

    parts: int

    def block(self, rows: Array) -> Array:
        return rows.reshape(len(rows), -1, self.parts).swapaxes(1, 2).reshape(rows.shape)


@dataclasses.dataclass(frozen=True)
class Transpose(WeightTransform):
    """[out, in] becomes [in, out], of a wider parameter the columns from `first` on."""

    first: int = 0

    columns_axis: ClassVar[int | None] = -2

    @property
    def anywhere(self) -> WeightTransform:
        return Transpose()

    def block(self, rows: Array) -> Array:
        return rows.T

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (0, self.first + row)


@dataclasses.dataclass(frozen=True)
class SplitGroupRows(WeightTransform):
    """Of each group of `group` rows the `size` rows from `begin` on. Those of all groups become the
    rows from `first` on."""

    group: int
    begin: int
    size: int
    first: int

    columns_axis: ClassVar[int | None] = -1

    @property
    def anywhere(self) -> WeightTransform:
        return dataclasses.replace(self, first=0)

    @property
    def rows_together(self) -> int:
        return self.group

    def block(self, rows: Array) -> Array:
        groups = rows.reshape(-1, self.group, rows.shape[-1])
        return groups[:, self.begin : self.begin + self.size].reshape(-1, rows.shape[-1])

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first + row // self.group * self.size, *(0,) * (dims - 1))


@dataclasses.dataclass(frozen=True)
class SplitGroupColumns(SplitGroupRows):
    """The rows of `SplitGroupRows`, transposed: they become the columns from `first` on."""

    columns_axis: ClassVar[int | None] = -2

    def block(self, rows: Array) -> Array:
        return super().block(rows).T

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (0, self.first + row // self.group * self.size)


@dataclasses.dataclass(frozen=True)
class PairColumns(WeightTransform):
    """Another change of FP8 numbers, whose columns are then put in pairs."""

    of: WeightTransform

    @property
    def anywhere(self) -> WeightTransform:
        return PairColumns(self.of.anywhere)

    @property
    def rows_together(self) -> int:
        return self.of.rows_together

    def block(self, rows: Array) -> Array:
        return interleave_columns(self.of.block(rows))

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return self.of.start(row, dims)


@dataclasses.dataclass(frozen=True)
class AddOne(WeightTransform):
    """1 + w, added in float32."""

    def block(self, rows: Array) -> Array:
        return 1 + rows.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class SqueezeConvTaps(WeightTransform):
    """[channels, 1, taps] becomes [channels, taps], below the parameter's first `first` rows."""

    first: int = 0

    @property
    def anywhere(self) -> WeightTransform:
        return SqueezeConvTaps()

    def block(self, rows: Array) -> Array:
        return rows[:, 0]

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first + row, 0)


@dataclasses.dataclass(frozen=True)
class Flatten(WeightTransform):
    """A tensor with one leading row becomes a vector."""

    def block(self, rows: Array) -> Array:
        return rows.reshape(-1)

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (0,)


@dataclasses.dataclass(frozen=True)
class SplitKeyHeads(WeightTransform):
    """Of `kv_b_proj` [H * (U + V), R] the keys, [H, U, R]."""

    keys: int
    values: int

    columns_axis: ClassVar[int | None] = -1

    @property
    def rows_together(self) -> int:
        return self.keys + self.values

    def block(self, rows: Array) -> Array:
        return rows.reshape(-1, self.keys + self.values, rows.shape[-1])[:, : self.keys]

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (row // self.rows_together, 0, 0)


@dataclasses.dataclass(frozen=True)
class SplitValueHeads(SplitKeyHeads):
    """Of `kv_b_proj` [H * (U + V), R] the values, [H, R, V]."""

    columns_axis: ClassVar[int | None] = -2

    def block(self, rows: Array) -> Array:
        heads = rows.reshape(-1, self.keys + self.values, rows.shape[-1])
        return jnp.swapaxes(heads[:, self.keys :], 1, 2)
