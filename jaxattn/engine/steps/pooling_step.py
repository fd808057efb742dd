"""Sums of tokens' hidden states, of what a prefill step gave for the head: embeddings of prompts.

The mean of a prompt is the sum of its chunks' sums, divided on the host by its tokens. Its last
token is a sum of one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.engine.steps.score_step import Head, HiddenStep
from jaxattn.memory.engine_limits import Limits
from jaxattn.models.interface import Model

RANGES = 8  # of a call


@dataclasses.dataclass(frozen=True)
class PoolingStep(HiddenStep):
    """Sums behind a prefill step of so many tokens, and needs no head: `told` is float32
    [8, hidden].

    `wanted` is int32 [8, 2]: a range of places among the step's tokens, the second one behind it.
    """

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Behind a prefill step of so many tokens of each data group."""
        return cls(limits.groups * tokens)

    def __str__(self) -> str:
        return f"pooling of {self.tokens} tokens"

    def lines(self, model: Model) -> int:
        return RANGES

    def with_head(self, head: Head) -> Callable:
        return _sums


def wanted_ranges(ranges: Sequence[tuple[int, int]]) -> list[Int[np.ndarray, "8 2"]]:
    """`wanted` of as many calls as these ranges need; what is left of the last one is empty."""
    found = []
    for first in range(0, len(ranges), RANGES):
        own = ranges[first : first + RANGES]
        lines = np.zeros((RANGES, 2), np.int32)
        lines[: len(own)] = own
        found.append(lines)
    return found


@jax.named_scope("pooling")
def _sums(
    hidden: Float[Array, "N hidden"], weights: object, wanted: Int[Array, "8 2"]
) -> tuple[Float[Array, "N hidden"], Float[Array, "8 hidden"]]:
    """(`hidden` as it was, the float32 sum of each range)."""
    place = jnp.arange(len(hidden))
    inside = (wanted[:, :1] <= place) & (place < wanted[:, 1:])
    sums = jnp.dot(
        inside.astype(hidden.dtype),
        hidden,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return hidden, sums
