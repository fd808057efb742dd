"""Log-probabilities of a prompt's tokens, of what a prefill step gave for the head.

The host says which tokens are wanted, a slice of them per call. So the logits of one slice are all
that exists at a time, whatever the chunk, and a step without such prompts pays for nothing.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.engine.sampling.logprobs import logprobs
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_step import EngineStep, int32, on_device
from jaxattn.memory.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model

# Tokens of a call. The head's matrix is read once for them, and their float32 logits are there
# twice: 150,000 tokens of vocabulary take 154 MB.
SLICE = 128
Head = Callable[[Any, Float[Array, "S hidden"]], Float[Array, "S vocab"]]


@dataclasses.dataclass(frozen=True)
class ScoreStep(EngineStep):
    """Scores tokens behind a prefill step of so many: (hidden, weights, wanted) -> (hidden, told).

    `wanted` is int32 [S + 1, 2]: (place among the step's tokens, the token behind it), and in the
    last line how many of the likeliest tokens are told.

    Attributes:
        tokens: of prompts in the prefill step, of all data groups together.
    """

    tokens: int

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Behind a prefill step of so many tokens of each data group."""
        return cls(limits.groups * tokens)

    def __str__(self) -> str:
        return f"score of {self.tokens} tokens"

    @property
    def slice(self) -> int:
        """Tokens of a call."""
        return min(SLICE, self.tokens)

    @property
    def lines(self) -> int:
        """Of `wanted`."""
        return self.slice + 1

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return self.with_head(head_of(model, tree))

    def with_head(self, head: Head) -> Callable:
        """The step, of (weights, hidden [S, hidden]) -> logits."""
        return partial(_score, head)

    def hidden(self, model: Model) -> jax.ShapeDtypeStruct:
        """What the prefill step gives for the head, as a shape."""
        each = model.hidden_shape
        return jax.ShapeDtypeStruct((self.tokens, *each.shape), each.dtype)

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return self.hidden(model), tuple(jax.tree.leaves(params)), int32(self.lines, 2)

    def given(self, model: Model, limits: Limits) -> Any:
        return self.hidden(model), int32(self.lines, 2)

    def padding(self, model: Model, limits: Limits) -> Any:
        hidden = self.hidden(model)
        return np.zeros(hidden.shape, hidden.dtype), np.zeros((self.lines, 2), np.int32)

    def call(
        self, executable: Any, given: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        hidden, wanted = given
        _, told = executable(on_device(hidden), weights, wanted)
        return state, rows, told


def head_of(model: Model, tree: Any) -> Head:
    """The model's head, of the leaves of the packed parameters."""

    def head(weights: Any, hidden: Float[Array, "S hidden"]) -> Float[Array, "S vocab"]:
        return model.head(jax.tree.unflatten(tree, weights), hidden)

    return head


def wanted_tokens(
    step: ScoreStep, places: list[tuple[int, int]], most: int
) -> list[Int[np.ndarray, "S+1 2"]]:
    """`wanted` of as many calls as these places need; what is left of the last one is padding.

    Args:
        places: (place among the tokens of the step, the token behind it).
        most: of the likeliest tokens.
    """
    found = []
    for first in range(0, len(places), step.slice):
        own = places[first : first + step.slice]
        lines = np.zeros((step.slice + 1, 2), np.int32)
        lines[: len(own)] = own
        lines[-1] = most
        found.append(lines)
    return found


@jax.named_scope("score")
def _score(
    head: Head, hidden: Float[Array, "N hidden"], weights: Any, wanted: Int[Array, "S+1 2"]
) -> tuple[Float[Array, "N hidden"], Int[Array, "S 2+2*20"]]:
    """(`hidden` as it was, the rank of each token among all and `logprobs`)."""
    at, tokens = wanted[:-1, 0], wanted[:-1, 1]
    logits = head(weights, hidden[at])
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + (logits > own).sum(axis=1, keepdims=True, dtype=jnp.int32)
    told = logprobs(logits, tokens, wanted[-1, 0])
    return hidden, jnp.concatenate([rank, told], axis=1)
