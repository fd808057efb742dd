"""Log-probabilities of a prompt's tokens, of what a prefill step gave for the head.

The host says which tokens are wanted, a slice of them per call. So the logits of one slice are all
that exists at a time, whatever the chunk, and a step without such prompts pays for nothing.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.engine.requests.request import Request
from jaxattn.engine.sampling.logprobs import logprobs
from jaxattn.engine.sampling.sampler import SamplingBatch, masked_logits
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.step_interface import EngineStep, int32, on_device
from jaxattn.memory.engine_limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model

# The head's matrix is read once for the tokens of a call: they are as many as have float32 logits
# of so many bytes, within these bounds.
LOGITS_BYTES, FEWEST, MOST = 2**29, 128, 1024
Head = Callable[[Any, Float[Array, "S hidden"]], Float[Array, "S vocab"]]


@dataclasses.dataclass(frozen=True)
class ScoreControls:
    """How the tokens of a call are scored, as the last lines of `wanted` say.

    Attributes:
        most: of the likeliest tokens, that are told.
        temperature: of the distribution; 1 is the model's own.
        top_k, top_p, min_p: which tokens it has, as in `Request`.
    """

    most: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    LINES = 3

    @classmethod
    def of(cls, request: Request) -> Self:
        """Those of a request's prompt; `most` is 1 where it asks for any of the likeliest tokens:
        a call tells as many as one of its prompts asks for."""
        most = min(request.prompt_logprobs or 0, 1)
        if not request.processed_logprobs:
            return cls(most)
        names = "temperature", "top_k", "top_p", "min_p"
        return cls(most, *(getattr(request, name) for name in names))

    @property
    def lines(self) -> Int[np.ndarray, "3 2"]:
        numbers = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.int32)
        last = *numbers, int(self.filtered)
        return np.array([self.most, self.top_k, *last], np.int32).reshape(self.LINES, 2)

    @staticmethod
    def filters(wanted: Int[np.ndarray, "S+3 2"]) -> bool:
        """Whether these lines are `filtered`."""
        return bool(wanted[-1, 1])

    @property
    def filtered(self) -> bool:
        """Whether the vocabulary is searched, for which there is a step of its own."""
        return self.most > 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class HiddenStep(EngineStep):
    """Reads hidden states of tokens: (hidden, weights, wanted) -> (hidden, told).

    Attributes:
        tokens: whose states these are.
    """

    tokens: int

    @abc.abstractmethod
    def lines(self, model: Model) -> int:
        """Of `wanted`, int32 [lines, 2]."""

    @abc.abstractmethod
    def with_head(self, head: Head) -> Callable:
        """The step, of (weights, hidden [S, hidden]) -> logits."""

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return self.with_head(head_of(model, tree))

    def hidden(self, model: Model) -> jax.ShapeDtypeStruct:
        """The hidden states, as a shape."""
        each = model.hidden_shape
        return jax.ShapeDtypeStruct((self.tokens, *each.shape), each.dtype)

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return self.hidden(model), tuple(jax.tree.leaves(params)), int32(self.lines(model), 2)

    def given(self, model: Model, limits: Limits) -> Any:
        return self.hidden(model), int32(self.lines(model), 2)

    def padding(self, model: Model, limits: Limits) -> Any:
        hidden = self.hidden(model)
        return np.zeros(hidden.shape, hidden.dtype), np.zeros((self.lines(model), 2), np.int32)

    def call(
        self, executable: Any, given: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        hidden, wanted = given
        _, told = executable(on_device(hidden), weights, wanted)
        return state, rows, told


@dataclasses.dataclass(frozen=True)
class ScoreStep(HiddenStep):
    """Scores tokens whose hidden states a `GatherStep` gave.

    `wanted` is int32 [S + 3, 2]: (place among the tokens of the prefill step, the token behind it),
    and in the last lines `ScoreControls`.

    Attributes:
        tokens: of prompts in the largest prefill step, of all data groups together.
    """

    @classmethod
    def of(cls, limits: Limits) -> Self:
        """Behind the prefill steps of an engine."""
        return cls(limits.groups * limits.prefill_sizes[-1])

    def __str__(self) -> str:
        return f"score of {self.tokens} tokens"

    def size(self, vocab_size: int) -> int:
        """S: tokens of a call."""
        fit = max(LOGITS_BYTES // (4 * vocab_size), 1)
        return min(self.tokens, max(FEWEST, min(2 ** (fit.bit_length() - 1), MOST)))

    def lines(self, model: Model) -> int:
        return self.size(model.vocab_size) + ScoreControls.LINES

    def hidden(self, model: Model) -> jax.ShapeDtypeStruct:
        each = model.hidden_shape
        return jax.ShapeDtypeStruct((self.size(model.vocab_size), *each.shape), each.dtype)

    def with_head(self, head: Head) -> Callable:
        return partial(_score, head)


@dataclasses.dataclass(frozen=True)
class FilteredScoreStep(ScoreStep):
    """Filters the vocabulary, or looks for the likeliest tokens, in the place of a `ScoreStep`: of
    the first R tokens of a call. XLA has the host wait for such searches.

    `wanted` is int32 [R + 3, 2], as of a `ScoreStep`.
    """

    def __str__(self) -> str:
        return f"filtered score of {self.tokens} tokens"

    def lines(self, model: Model) -> int:
        return min(self.size(model.vocab_size), FEWEST) + ScoreControls.LINES

    def wanted(self, lines: Int[np.ndarray, "S+3 2"]) -> Int[np.ndarray, "R+3 2"]:
        """Of the lines of a `ScoreStep`; the places are those among the S tokens."""
        count = min(len(lines) - ScoreControls.LINES, FEWEST)
        found = np.concatenate([lines[:count], lines[-ScoreControls.LINES :]])
        found[:count, 0] = np.arange(count)
        return found

    def with_head(self, head: Head) -> Callable:
        return partial(_filtered_score, head)


@dataclasses.dataclass(frozen=True)
class GatherStep(HiddenStep):
    """What the head reads of a `ScoreStep`'s tokens, behind a prefill step of so many: `told` is
    [S, hidden].

    Attributes:
        score: what reads it.
    """

    score: ScoreStep

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Behind a prefill step of so many tokens of each data group."""
        return cls(limits.groups * tokens, ScoreStep.of(limits))

    def __str__(self) -> str:
        return f"gather of {self.tokens} tokens"

    def lines(self, model: Model) -> int:
        return self.score.lines(model)

    def with_head(self, head: Head) -> Callable:
        return _gathered


def head_of(model: Model, tree: Any) -> Head:
    """The model's head, of the leaves of the packed parameters."""

    def head(weights: Any, hidden: Float[Array, "S hidden"]) -> Float[Array, "S vocab"]:
        return model.head(jax.tree.unflatten(tree, weights), hidden)

    return head


def wanted_tokens(
    size: int, places: Int[np.ndarray, "n 2"], controls: ScoreControls, count: int
) -> list[Int[np.ndarray, "S+3 2"]]:
    """`wanted` of as many calls as these places need; what is left of the last one is padding.

    Args:
        size: S.
        places: of each, its place among the tokens of the step, and the token behind it.
        count: of a call, at most `size`.
    """
    found = []
    for first in range(0, len(places), count):
        own = places[first : first + count]
        lines = np.zeros((size + ScoreControls.LINES, 2), np.int32)
        lines[: len(own)] = own
        lines[size:] = controls.lines
        found.append(lines)
    return found


class _Scored(NamedTuple):
    """The logits of the tokens of a call, and what each way to score needs of them."""

    logits: Float[Array, "S vocab"]
    most: Float[Array, "S 1"]
    tokens: Int[Array, "S"]
    own: Float[Array, "S 1"]
    heat: Float[Array, ""]

    @classmethod
    def of(cls, head: Head, hidden: Array, weights: Any, wanted: Array) -> Self:
        tokens, logits = wanted[: -ScoreControls.LINES, 1], head(weights, hidden)
        own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        temperature = lax.bitcast_convert_type(wanted[-2, 0], jnp.float32)
        heat = jnp.where(temperature > 0, temperature, 1.0)  # of the warm-up's padding it is 0
        return cls(logits, logits.max(axis=1, keepdims=True), tokens, own, heat)

    def told(self, found: Int[Array, "S n"]) -> Int[Array, "S 1+n"]:
        """The rank of each token among all and what was found, which begins with the bits of its
        log-probability: NaN where logits are not finite, as a token that is filtered has -inf."""
        rank = 1 + (self.logits > self.own).sum(axis=1, keepdims=True, dtype=jnp.int32)
        finite = jnp.isfinite(self.most) & jnp.isfinite(self.own)
        nan = lax.bitcast_convert_type(jnp.float32(jnp.nan), jnp.int32)
        return jnp.concatenate([rank, jnp.where(finite, found[:, :1], nan), found[:, 1:]], axis=1)


def _gathered(
    hidden: Float[Array, "N hidden"], weights: Any, wanted: Int[Array, "S+3 2"]
) -> tuple[Float[Array, "N hidden"], Float[Array, "S hidden"]]:
    """(`hidden` as it was, those of the places)."""
    return hidden, hidden[wanted[: -ScoreControls.LINES, 0]]


@jax.named_scope("score")
def _score(
    head: Head, hidden: Float[Array, "S hidden"], weights: Any, wanted: Int[Array, "S+3 2"]
) -> tuple[Float[Array, "S hidden"], Int[Array, "S 2"]]:
    """(`hidden` as it was, the rank of each token among all and the bits of its log-probability).

    The logits are read twice: for the largest, then for all sums.
    """
    scored = _Scored.of(head, hidden, weights, wanted)
    warmth = 1 / scored.heat  # a division of each logit would take as long as to read it
    sums = jnp.exp((scored.logits - scored.most) * warmth).sum(axis=1, keepdims=True)
    chance = (scored.own - scored.most) * warmth - jnp.log(sums)
    return hidden, scored.told(lax.bitcast_convert_type(chance, jnp.int32))


@jax.named_scope("filtered score")
def _filtered_score(
    head: Head, hidden: Float[Array, "S hidden"], weights: Any, wanted: Int[Array, "R+3 2"]
) -> tuple[Float[Array, "S hidden"], Int[Array, "R 2+2*20"]]:
    """(`hidden` as it was, the rank of each token among all and `logprobs`)."""
    rows = hidden[wanted[: -ScoreControls.LINES, 0]]
    scored = _Scored.of(head, rows, weights, wanted)
    (most, top_k), (_, top_p), (min_p, _) = wanted[-ScoreControls.LINES :]
    top_p, min_p = (lax.bitcast_convert_type(x, jnp.float32) for x in (top_p, min_p))
    each_of = partial(jnp.full, len(scored.tokens))
    filtered = each_of(scored.heat), each_of(top_k), each_of(top_p), each_of(min_p)
    sampling = SamplingBatch(*filtered, jnp.zeros(len(scored.tokens), jnp.uint32))
    filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
    drawn_from = lax.cond(
        filters,
        lambda logits: masked_logits(logits, sampling, scored.most),
        lambda logits: logits / scored.heat,
        scored.logits,
    )
    return hidden, scored.told(logprobs(drawn_from, scored.tokens, most))
