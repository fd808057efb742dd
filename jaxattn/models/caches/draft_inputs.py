"""The next input of a draft head for each row: what the output head read of its newest tokens.

It lies by row of the engine and not by slot: no request resumes with it, so prefixes keep no copy.
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
    """`draft_hidden` [B, S, hidden] and `draft_pairs` int32 [B]: so many of a row's S are there.

    Attributes:
        features: hidden.
        dtype: of what the head reads.
    """

    name: str = DRAFT
    layers: int = 1
    features: int
    dtype: DTypeLike

    recurrent = False

    @classmethod
    def of(cls, stream: Any) -> Self:
        """Of a decoder's stream."""
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
