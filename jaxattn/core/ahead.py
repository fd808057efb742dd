"""Weights that a later kernel reads, asked for now."""

import dataclasses
import math

from jaxtyping import Array, Float

from jaxattn.core.layers import LayerOf


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
    """Some of a layer's weights, to be brought into the L2 cache by a kernel that runs before.

    A step of few tokens has small kernels in it, and memory rests while they run. It is a hint: no
    result depends on it.

    Attributes:
        weights: of all layers.
        layer: the one that is asked for.
        rows: the first and the last + 1 along the second axis; None is all of them.
    """

    weights: Float[Array, "L R *rest"]
    layer: LayerOf
    rows: tuple[int, int] | None = None

    @property
    def span(self) -> tuple[int, int, int]:
        """(bytes from a layer to the next, bytes before what is asked for, bytes of it)."""
        of_row = math.prod(self.weights.shape[2:]) * self.weights.dtype.itemsize
        first, last = self.rows or (0, self.weights.shape[1])
        return self.weights.shape[1] * of_row, first * of_row, (last - first) * of_row
