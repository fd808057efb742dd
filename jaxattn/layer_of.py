"""A layer of a repeated pattern, named so that a kernel works out its number itself."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class LayerOf:
    """A layer of a repeated pattern, `repeat * per_repeat + place`, for the kernel to work out.

    In a loop over repeats XLA would run a kernel of its own for each such number.
    """

    repeat: jax.Array
    per_repeat: int
    place: int

    @property
    def index(self) -> jax.Array:
        return self.repeat * self.per_repeat + self.place
