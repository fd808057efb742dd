"""Transforms of blocks of a published tensor's rows into parts of parameters."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxattn.core.numerics.four_bit_tiles import ROWS as TILE_ROWS
from jaxattn.core.numerics.fp8_weight_layout import interleave_columns


@dataclasses.dataclass(frozen=True)
class WeightTransform:
    """A transform of a tensor's rows.

    Attributes:
        columns_axis: Axis of the parameter, counted from the last, along which a matrix's columns
            follow one another. None if there is no such axis.
        anywhere: The same transform without its destination, so that one program places all blocks.
    """

    columns_axis: ClassVar[int | None] = None

    @property
    def anywhere(self) -> "WeightTransform":
        return self

    @property
    def rows_together(self) -> int:
        """The number of leading rows of the tensor of which a block has a multiple."""
        return 1

    def block(self, rows: Array) -> Array:
        """Returns the part of the parameter that a block of rows becomes."""
        return rows

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        """Returns where this part begins in the parameter, for a block that begins at `row`."""
        return (row, *(0,) * (dims - 1))


@dataclasses.dataclass(frozen=True)
class Identity(WeightTransform):
    columns_axis: ClassVar[int | None] = -1


@dataclasses.dataclass(frozen=True)
class WriteRowsAt(WeightTransform):
    """Keeps the rows, and writes them after the first `first` rows of the parameter."""

    first: int

    columns_axis: ClassVar[int | None] = -1

    @property
    def anywhere(self) -> WeightTransform:
        return Identity()

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first + row, *(0,) * (dims - 1))


@dataclasses.dataclass(frozen=True)
class WriteIndex(WeightTransform):
    """Keeps the rows, and writes them at index `number` of an additional leading axis."""

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
    """Keeps tiles of a 4-bit matrix, and writes them after the parameter's first `first` rows.

    Attributes:
        number: Index along an additional leading axis. None if there is no such axis.
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
    """Splits a matrix into experts of `width` rows, and writes them from expert `first` on.

    `within` is the place in each expert.
    """

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
    """Splits a matrix into experts of `width` columns, and writes them from expert `first` on."""

    width: int
    first: int

    def block(self, rows: Array) -> Array:
        return rows.reshape(rows.shape[0], -1, self.width).swapaxes(0, 1)

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (self.first, row, 0)


@dataclasses.dataclass(frozen=True)
class TransposeExperts(WeightTransform):
    """Transposes experts [E, in, out] to [E, out, in].

    Attributes:
        parts: Number of matrices whose columns are interleaved; the result has all rows of one
            matrix before those of the next.
    """

    parts: int = 1

    def block(self, rows: Array) -> Array:
        experts, inner, columns = rows.shape
        split = jnp.transpose(rows.reshape(experts, inner, -1, self.parts), (0, 3, 2, 1))
        return split.reshape(experts, columns, inner)


@dataclasses.dataclass(frozen=True)
class SplitInterleaved(WeightTransform):
    """Splits vectors [E, N], which interleave `parts` vectors, into these one after another."""

    parts: int

    def block(self, rows: Array) -> Array:
        return rows.reshape(len(rows), -1, self.parts).swapaxes(1, 2).reshape(rows.shape)


@dataclasses.dataclass(frozen=True)
class Transpose(WeightTransform):
    """Transposes [out, in] to [in, out], the columns from `first` on of a wider parameter."""

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
    """Takes the `size` rows from `begin` on of each group of `group` rows.

    The rows of all groups become the parameter's rows from `first` on.
    """

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
    """The rows of `SplitGroupRows`, transposed to the parameter's columns from `first` on."""

    columns_axis: ClassVar[int | None] = -2

    def block(self, rows: Array) -> Array:
        return super().block(rows).T

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (0, self.first + row // self.group * self.size)


@dataclasses.dataclass(frozen=True)
class PairColumns(WeightTransform):
    """Applies another transform to FP8 numbers, then arranges their columns in pairs."""

    transform: WeightTransform

    @property
    def anywhere(self) -> WeightTransform:
        return PairColumns(self.transform.anywhere)

    @property
    def rows_together(self) -> int:
        return self.transform.rows_together

    def block(self, rows: Array) -> Array:
        return interleave_columns(self.transform.block(rows))

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return self.transform.start(row, dims)


@dataclasses.dataclass(frozen=True)
class AddOne(WeightTransform):
    """Computes 1 + w in float32."""

    def block(self, rows: Array) -> Array:
        return 1 + rows.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class SqueezeConvTaps(WeightTransform):
    """Reshapes [channels, 1, taps] to [channels, taps], from row `first` of the parameter on."""

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
    """Flattens a tensor with one leading row to a vector."""

    def block(self, rows: Array) -> Array:
        return rows.reshape(-1)

    def start(self, row: int, dims: int) -> tuple[int, ...]:
        return (0,)


@dataclasses.dataclass(frozen=True)
class SplitKeyHeads(WeightTransform):
    """Takes the keys, [H, U, R], of `kv_b_proj` [H * (U + V), R]."""

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
    """Takes the values, [H, R, V], of `kv_b_proj` [H * (U + V), R]."""

    columns_axis: ClassVar[int | None] = -2

    def block(self, rows: Array) -> Array:
        heads = rows.reshape(-1, self.keys + self.values, rows.shape[-1])
        return jnp.swapaxes(heads[:, self.keys :], 1, 2)
