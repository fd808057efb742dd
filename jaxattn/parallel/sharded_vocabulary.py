"""A vocabulary sharded over GPUs: each GPU has the logits of some ids, and none has all.

The likeliest token of a row is the best of the GPUs' best tokens. So each GPU sends a pair of
numbers per row; the logits of 128 rows would be megabytes.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.parallel.layout import Parallel


@dataclasses.dataclass(frozen=True)
class ShardedVocabulary:
    """The ids of a GPU's logits.

    Attributes:
        columns: V, the number of ids per GPU; those after the last token are padding.
        axes: The mesh axes over which the ids are divided; () if one GPU has all.
        parts: The number of GPUs that share the vocabulary.
    """

    columns: int
    axes: tuple[str, ...] = ()
    parts: int = 1

    @classmethod
    def of(cls, columns: int, parallel: Parallel) -> "ShardedVocabulary":
        return cls(columns, parallel.axes("tensor"), parallel.size("tensor"))

    @property
    def first(self) -> Int[Array, ""] | int:
        """The id of this GPU's first logit."""
        return lax.axis_index(self.axes) * self.columns if self.axes else 0

    @property
    def ids(self) -> Int[Array, "V"]:
        return self.first + jnp.arange(self.columns)

    def best(self, logits: Float[Array, "B V"]) -> tuple[Int[Array, "B"], Float[Array, "B 1"]]:
        """Returns the most likely id of each row, the lowest in a tie, and its logit.

        A row with a NaN gives NaN.
        """
        best = jnp.argmax(logits, axis=-1)
        most = jnp.take_along_axis(logits, best[:, None], axis=-1)
        if not self.axes:
            return best, most
        # Float32 holds an id exactly up to 2**24, so one gather is enough instead of two.
        pair = jnp.concatenate([most, (best + self.first)[:, None].astype(most.dtype)], axis=-1)
        pairs = lax.all_gather(pair, self.axes)
        winner = jnp.argmax(pairs[..., 0], axis=0)
        found = jnp.take_along_axis(pairs, winner[None, :, None], axis=0)[0]
        return found[:, 1].astype(best.dtype), found[:, :1]
