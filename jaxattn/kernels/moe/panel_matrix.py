"""Matrices in panels of columns, as operands and results of the grouped products."""

import dataclasses
import math
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from jaxattn.kernels.moe.tile_config import GROUP

WIDEST = 1024  # columns of a panel: the arena's lanes have rows of a power of two up to it


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


def panel(width: int) -> int:
    """Returns the columns of a panel of a matrix of that width."""
    return math.gcd(width, WIDEST)
