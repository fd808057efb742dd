"""Embeddings of prompts: sums of the hidden states that a prefill step returned for the head.

The host adds the sums of a prompt's chunks and divides by its tokens. The sum of a last token has
one term.
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
from jaxattn.limits import Limits
from jaxattn.models.interface import Model

RANGES = 8  # ranges per call


@dataclasses.dataclass(frozen=True)
class PoolingStep(HiddenStep):
    """Sums ranges of a prefill step's hidden states. It needs no head: its result is float32
    [8, hidden].

    `ranges` is int32 [8, 2]: ranges of the step's tokens, as begin and end.
    """

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Returns the step that follows a prefill step of `tokens` tokens per data group."""
        return cls(limits.groups * tokens)

    def __str__(self) -> str:
        return f"pooling of {self.tokens} tokens"

    def lines(self, model: Model) -> int:
        return RANGES

    def with_head(self, head: Head) -> Callable:
        return _sums


def wanted_ranges(ranges: Sequence[tuple[int, int]]) -> list[Int[np.ndarray, "8 2"]]:
    """Returns the `ranges` arrays of all calls; unused ranges of the last one are empty."""
    found = []
    for first in range(0, len(ranges), RANGES):
        own = ranges[first : first + RANGES]
        lines = np.zeros((RANGES, 2), np.int32)
        lines[: len(own)] = own
        found.append(lines)
    return found


@jax.named_scope("pooling")
def _sums(
    hidden: Float[Array, "N hidden"], weights: object, ranges: Int[Array, "8 2"]
) -> tuple[Float[Array, "N hidden"], Float[Array, "8 hidden"]]:
    """Returns (`hidden` unchanged, the float32 sum of each range)."""
    place = jnp.arange(len(hidden))
    inside = (ranges[:, :1] <= place) & (place < ranges[:, 1:])
    sums = jnp.dot(
        inside.astype(hidden.dtype),
        hidden,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return hidden, sums
