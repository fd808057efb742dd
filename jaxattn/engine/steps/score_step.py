"""Log-probabilities of prompt tokens, from the hidden states that a prefill step returns.

The host chooses the tokens to score, a fixed number per call. So only one call's logits exist at a
time, whatever the chunk, and a step without such prompts costs nothing.
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
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model

# Each call reads the head's matrix once. Within these bounds, a call has as many tokens as have
# float32 logits of LOGITS_BYTES.
LOGITS_BYTES, FEWEST, MOST = 2**29, 128, 1024
Head = Callable[[Any, Float[Array, "S hidden"]], Float[Array, "S vocab"]]


@dataclasses.dataclass(frozen=True)
class ScoreControls:
    """The parameters of a call's scores, stored in the last lines of `targets`.

    Attributes:
        num_likeliest: The number of likeliest tokens to return.
        temperature: The temperature of the distribution; 1 gives the model's own.
        top_k, top_p, min_p: The filters of the distribution, as in `Request`.
    """

    num_likeliest: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    LINES = 3

    @classmethod
    def of(cls, request: Request) -> Self:
        """Returns the controls of a request's prompt, with `num_likeliest` as 1 if it asks for any
        likeliest tokens. A call returns the maximum over its prompts."""
        most = min(request.prompt_logprobs or 0, 1)
        if not request.processed_logprobs:
            return cls(most)
        names = "temperature", "top_k", "top_p", "min_p"
        return cls(most, *(getattr(request, name) for name in names))

    @property
    def lines(self) -> Int[np.ndarray, "3 2"]:
        numbers = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.int32)
        last = *numbers, int(self.filtered)
        return np.array([self.num_likeliest, self.top_k, *last], np.int32).reshape(self.LINES, 2)

    @staticmethod
    def filters(targets: Int[np.ndarray, "S+3 2"]) -> bool:
        """Whether `targets` has the controls of a filtered score."""
        return bool(targets[-1, 1])

    @property
    def filtered(self) -> bool:
        """Whether the score searches the vocabulary, for which it needs a `FilteredScoreStep`."""
        return self.num_likeliest > 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class HiddenStep(EngineStep):
    """A step on hidden states of tokens: (hidden, weights, targets) -> (hidden, scores).

    Attributes:
        tokens: The number of tokens with hidden states.
    """

    tokens: int

    @abc.abstractmethod
    def lines(self, model: Model) -> int:
        """Returns the number of lines of `targets`, int32 [lines, 2]."""

    @abc.abstractmethod
    def with_head(self, head: Head) -> Callable:
        """Returns the step for a head (weights, hidden [S, hidden]) -> logits."""

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return self.with_head(head_of(model, tree))

    def hidden(self, model: Model) -> jax.ShapeDtypeStruct:
        """Returns the shape of the hidden states."""
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
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        hidden, wanted = inputs
        _, told = executable(on_device(hidden), weights, wanted)
        return state, rows, told


@dataclasses.dataclass(frozen=True)
class ScoreStep(HiddenStep):
    """Scores tokens whose hidden states come from a `GatherStep`.

    `targets` is int32 [S + 3, 2]: (the token's index in the prefill step, the token after it), and
    `ScoreControls` in the last lines.

    Attributes:
        tokens: The prompt tokens of the largest prefill step, over all data groups.
    """

    @classmethod
    def of(cls, limits: Limits) -> Self:
        """Returns the step that scores the prefill steps of an engine."""
        return cls(limits.groups * limits.prefill_sizes[-1])

    def __str__(self) -> str:
        return f"score of {self.tokens} tokens"

    def size(self, vocab_size: int) -> int:
        """Returns S, the number of tokens per call."""
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
    """Scores the first R tokens of a call like a `ScoreStep`, with filters or likeliest tokens.

    It is a separate step because the host would have to wait for XLA's conditional searches.

    `targets` is int32 [R + 3, 2], like that of a `ScoreStep`.
    """

    def __str__(self) -> str:
        return f"filtered score of {self.tokens} tokens"

    def lines(self, model: Model) -> int:
        return min(self.size(model.vocab_size), FEWEST) + ScoreControls.LINES

    def wanted(self, lines: Int[np.ndarray, "S+3 2"]) -> Int[np.ndarray, "R+3 2"]:
        """Converts the `targets` of a `ScoreStep`; the places become indices among the S tokens."""
        count = min(len(lines) - ScoreControls.LINES, FEWEST)
        found = np.concatenate([lines[:count], lines[-ScoreControls.LINES :]])
        found[:count, 0] = np.arange(count)
        return found

    def with_head(self, head: Head) -> Callable:
        return partial(_filtered_score, head)


@dataclasses.dataclass(frozen=True)
class GatherStep(HiddenStep):
    """Gathers the hidden states of a `ScoreStep`'s tokens from a prefill step: its result is
    [S, hidden].

    Attributes:
        score: The step that reads them.
    """

    score: ScoreStep

    @classmethod
    def of(cls, limits: Limits, tokens: int) -> Self:
        """Returns the step that follows a prefill step of `tokens` tokens per data group."""
        return cls(limits.groups * tokens, ScoreStep.of(limits))

    def __str__(self) -> str:
        return f"gather of {self.tokens} tokens"

    def lines(self, model: Model) -> int:
        return self.score.lines(model)

    def with_head(self, head: Head) -> Callable:
        return _gathered


def head_of(model: Model, tree: Any) -> Head:
    """Returns the model's head as a function of the leaves of the packed parameters."""

    def head(weights: Any, hidden: Float[Array, "S hidden"]) -> Float[Array, "S vocab"]:
        return model.head(jax.tree.unflatten(tree, weights), hidden)

    return head


def wanted_tokens(
    size: int, places: Int[np.ndarray, "n 2"], controls: ScoreControls, count: int
) -> list[Int[np.ndarray, "S+3 2"]]:
    """Returns the `targets` arrays of all calls that score these places; the last is padded.

    Args:
        size: S, the number of tokens per call.
        places: The index of each token in the prefill step, and the token after it.
        count: The number of tokens per call that are used, at most `size`.
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
    """The logits of a call's tokens, and the values that both kinds of score need."""

    logits: Float[Array, "S vocab"]
    max_logits: Float[Array, "S 1"]
    tokens: Int[Array, "S"]
    token_logits: Float[Array, "S 1"]
    temperature: Float[Array, ""]

    @classmethod
    def of(cls, head: Head, hidden: Array, weights: Any, targets: Array) -> Self:
        tokens, logits = targets[: -ScoreControls.LINES, 1], head(weights, hidden)
        own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        temperature = lax.bitcast_convert_type(targets[-2, 0], jnp.float32)
        heat = jnp.where(temperature > 0, temperature, 1.0)  # it is 0 in the warm-up's padding
        return cls(logits, logits.max(axis=1, keepdims=True), tokens, own, heat)

    def told(self, values: Int[Array, "S n"]) -> Int[Array, "S 1+n"]:
        """Returns each token's rank and the found values, which begin with the bits of its
        log-probability. These are NaN if logits are not finite; a filtered token has -inf."""
        rank = 1 + (self.logits > self.token_logits).sum(axis=1, keepdims=True, dtype=jnp.int32)
        finite = jnp.isfinite(self.max_logits) & jnp.isfinite(self.token_logits)
        nan = lax.bitcast_convert_type(jnp.float32(jnp.nan), jnp.int32)
        return jnp.concatenate([rank, jnp.where(finite, values[:, :1], nan), values[:, 1:]], axis=1)


def _gathered(
    hidden: Float[Array, "N hidden"], weights: Any, targets: Int[Array, "S+3 2"]
) -> tuple[Float[Array, "N hidden"], Float[Array, "S hidden"]]:
    """Returns (`hidden` unchanged, the hidden states at the places)."""
    return hidden, hidden[targets[: -ScoreControls.LINES, 0]]


@jax.named_scope("score")
def _score(
    head: Head, hidden: Float[Array, "S hidden"], weights: Any, targets: Int[Array, "S+3 2"]
) -> tuple[Float[Array, "S hidden"], Int[Array, "S 2"]]:
    """Returns (`hidden` unchanged, each token's rank and the bits of its log-probability).

    It reads the logits twice: once for the maximum, and once for all sums.
    """
    scored = _Scored.of(head, hidden, weights, targets)
    warmth = 1 / scored.temperature  # dividing each logit would take as long as reading it
    sums = jnp.exp((scored.logits - scored.max_logits) * warmth).sum(axis=1, keepdims=True)
    chance = (scored.token_logits - scored.max_logits) * warmth - jnp.log(sums)
    return hidden, scored.told(lax.bitcast_convert_type(chance, jnp.int32))


@jax.named_scope("filtered score")
def _filtered_score(
    head: Head, hidden: Float[Array, "S hidden"], weights: Any, targets: Int[Array, "R+3 2"]
) -> tuple[Float[Array, "S hidden"], Int[Array, "R 2+2*20"]]:
    """Returns (`hidden` unchanged, each token's rank and `logprobs`)."""
    rows = hidden[targets[: -ScoreControls.LINES, 0]]
    scored = _Scored.of(head, rows, weights, targets)
    (num_likeliest, top_k), (_, top_p), (min_p, _) = targets[-ScoreControls.LINES :]
    top_p, min_p = (lax.bitcast_convert_type(x, jnp.float32) for x in (top_p, min_p))
    each_of = partial(jnp.full, len(scored.tokens))
    filtered = each_of(scored.temperature), each_of(top_k), each_of(top_p), each_of(min_p)
    sampling = SamplingBatch(*filtered, jnp.zeros(len(scored.tokens), jnp.uint32))
    filters = (top_k > 0) | (top_p < 1) | (min_p > 0)
    drawn_from = lax.cond(
        filters,
        lambda logits: masked_logits(logits, sampling, scored.max_logits),
        lambda logits: logits / scored.temperature,
        scored.logits,
    )
    return hidden, scored.told(logprobs(drawn_from, scored.tokens, num_likeliest))
