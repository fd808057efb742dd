"""The index of a layer of a repeated pattern, in a form from which a kernel computes it."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class LayerIndex:
    """The index of a layer of a repeated pattern, `repeat * per_repeat + place`.

    The kernel computes the index, because in a loop over repeats XLA would launch a separate kernel
    for each.
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
    """Returns (n, (a, b), index) with `index = a * n + b`; a kernel takes n, a and b."""
    if isinstance(layer, LayerIndex):
        return layer.repeat, (layer.per_repeat, layer.place), layer.index
    return layer, (1, 0), layer


def checkable_layer(layer: Any) -> Any:
    """Returns the number that `check_layer` checks: the repeat of a traced `LayerIndex`."""
    if not isinstance(layer, LayerIndex):
        return layer
    return layer.repeat if isinstance(layer.repeat, jax.core.Tracer) else layer.index
