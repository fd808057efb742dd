"""The next input of a draft head for each row: the output head's input for its newest tokens.

The arrays are indexed by the engine's row instead of by slot. No request resumes from them, so the
prefix cache keeps no copy.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxattn.models.caches.layer_cache import (
    DRAFT,
    DRAFT_HIDDEN,
    DRAFT_PAIRS,
    Arrays,
    CacheSize,
    LayerCache,
)
from jaxattn.parallel import Parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftInputs(LayerCache):
    """The draft head's inputs `draft_hidden` [B, S, hidden], and their counts `draft_pairs` [B].

    Attributes:
        features: hidden.
        dtype: Dtype of the output head's input.
    """

    name: str = DRAFT
    layers: int = 1
    features: int
    dtype: DTypeLike

    recurrent = False

    @classmethod
    def of(cls, stream: Any) -> Self:
        """Returns the cache for a decoder's stream."""
        return cls(features=stream.hidden_size, dtype=jnp.dtype(stream.dtype))

    def shapes(self, size: CacheSize) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (size.slots, 1 + size.drafts, self.features)
        return {
            DRAFT_HIDDEN: jax.ShapeDtypeStruct(shape, self.dtype),
            DRAFT_PAIRS: jax.ShapeDtypeStruct(shape[:1], jnp.int32),
        }

    def spec(self, array: str, parallel: Parallel) -> PartitionSpec:
        return PartitionSpec(parallel.axes("data"))

    def describe(self, array: str, shape: jax.ShapeDtypeStruct) -> str:
        if array == DRAFT_PAIRS:
            return f"{shape.shape[0]} rows x the number of tokens that the draft head reads next"
        rows, tokens, features = shape.shape
        return f"{rows} rows x {tokens} tokens x {features} {shape.dtype.name} for the draft head"

    def copy_slots(
        self, arrays: Arrays, source: Int[Array, " n"], target: Int[Array, " n"]
    ) -> Arrays:
        return arrays
