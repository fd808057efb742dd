"""The next tile of a grouped product's CTA, and the location of rows of operands and results."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.kernels.moe.tile_config import GROUP


@dataclasses.dataclass(frozen=True)
class PanelMatrix:
    """A matrix [rows, K] in a 2-D array: panels of `width` columns, one below the other.

    Attributes:
        first: The row of the array where it begins.
        rows: Rows of a panel.
    """

    first: int
    rows: int
    width: int

    def at(self, ref: Any, row: Any, rows: int, column: Any, columns: int) -> Any:
        """Returns some of its rows and columns, which must lie in one panel."""
        of_panel, inside = lax.div(column, self.width), lax.rem(column, self.width)
        row = pl.multiple_of(self.first + of_panel * self.rows + row, GROUP)
        return ref.at[pl.ds(row, rows), pl.ds(pl.multiple_of(inside, columns), columns)]


class GroupedGemmTile(NamedTuple):
    """The next item of a CTA."""

    expert: jax.Array
    source: jax.Array  # first row of its tokens
    target: jax.Array  # first row of its results
    groups: jax.Array  # of 8 tokens
    place: jax.Array  # index among the expert's pieces of rows
