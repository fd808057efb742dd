"""A layer of a repeated pattern, named so that a kernel works out its number itself."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class StackedLayer:
    """A layer of a repeated pattern, `repeat * per_repeat + place`, for the kernel to work out.

    In a loop over repeats XLA would run a kernel of its own for each such number.
    """

    repeat: jax.Array
    per_repeat: int
    place: int

    @property
    def index(self) -> jax.Array:
        if (self.per_repeat, self.place) == (1, 0):
            return self.repeat
        return self.repeat * self.per_repeat + self.place


def split_layer_index(layer: Any) -> tuple[Any, tuple[int, int], Any]:
    """(n, (a, b), layer) with `layer = a * n + b` as a number: a kernel takes n, a and b."""
    if isinstance(layer, StackedLayer):
        return layer.repeat, (layer.per_repeat, layer.place), layer.index
    return layer, (1, 0), layer


def checkable_layer(layer: Any) -> Any:
    """The number that `check_layer` checks of a layer: a traced `StackedLayer` gives its repeat."""
    if not isinstance(layer, StackedLayer):
        return layer
    return layer.repeat if isinstance(layer.repeat, jax.core.Tracer) else layer.index
