"""A request to the engine: a prompt, and the parameters of its continuation."""

import contextlib
import dataclasses
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxattn.engine.requests.stats import GenerationStats as GenerationStats

# Limits of the fixed-size state that a row has on the device.
MOST_BIASES = 300
MOST_PENALTY = 1e30  # float32 holds a logit after this penalty, and a million times that
MOST_LOGPROBS = 20
POOLINGS = ("mean", "last")


class Grammar(Protocol):
    """The grammar state of one row, such as one of llguidance."""

    def mask(self, words: np.ndarray) -> None:
        """Writes which tokens may come next. At least one must be allowed, possibly a stop token.

        Args:
            words: int32 [ceil(vocab / 32)] of zeros, which the method fills in place. Bit t % 32 of
                word t // 32 is 1 if token t may come.
        """

    def accept(self, token: int) -> bool:
        """Advances by a token. Returns False if the text is complete, which ends the row."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the parameters of its continuation.

    Attributes:
        prompt: The token ids; `bytes` for a byte-level model. A list or array is copied.
        max_tokens: The maximum number of tokens to generate; with 0 the engine only reads the
            prompt.
        temperature: The sampling temperature; 0 takes the most likely token.
        top_p: A number in (0, 1]. Sampling uses the fewest most likely tokens whose probabilities
            add up to at least `top_p`.
        top_k: Sampling uses the k most likely tokens; 0 means all.
        min_p: A number in [0, 1]. Sampling uses the tokens whose probability is at least `min_p`
            times that of the most likely one.
        repetition_penalty: A divisor of positive logits and a factor of negative ones, for tokens
            that the prompt or the generated text contains; 1e-30 to 1e30.
        presence_penalty: A number subtracted from the logit of each token that the generated text
            contains; at most 1e30 in size.
        frequency_penalty: A number subtracted from a token's logit once per occurrence in the
            generated text; at most 1e30 in size.
        logit_bias: A mapping from tokens to numbers in [-100, 100], which are added to the logits;
            at most 300 tokens. The request stores it as pairs, sorted by token.
        logprobs: The number of alternatives to return with each token, 0 to 20; None returns no
            log-probabilities. They are the model's own, before biases, penalties and temperature.
        prompt_logprobs: The number of alternatives to return with each prompt token, 0 to 20; None
            returns none. If set, the engine reads the whole prompt, whatever the prefix cache
            holds.
        processed_logprobs: If True, `logprobs` and `prompt_logprobs` are those of the distribution
            after `temperature`, `top_k`, `top_p` and `min_p`, with -inf for excluded tokens.
            Biases, penalties and a grammar apply only to `logprobs`. The temperature must be
            above 0.
        pooling: "mean" or "last" requests an embedding of the prompt: the mean of the hidden
            states after the final norm, or the last one. `max_tokens` must be 0. For "mean" the
            engine reads the whole prompt, whatever the prefix cache holds.
        priority: The scheduling priority. The engine serves lower numbers first, and equal ones in
            order of arrival.
        seed: The random seed, which decides every sample together with the token's position. None
            derives it from `id`.
        stop_tokens: The tokens that end the row, and that the completion leaves out. A single one
            may be given as an integer.
        stop_strings: The strings that end the row. The row's last token is the one that completes a
            stop string. Stop strings need an engine with `detokenize`.
        ends_at: A function that is called with each generated token, in the thread that runs the
            engine. The row ends with the token for which the function returns True; one more step
            may already be in flight, and is wasted. An exception in it ends all rows. Do not share
            it between requests.
        grammar: The grammar state that decides which tokens may come, and that advances with them.
            Each round with such a row waits for the grammar. Do not share it between requests.
        replay: Tokens with which the answer begins. Decode steps read them one by one, as if the
            row had sampled them; then the row continues. Only engines with
            `Limits(reproducible=True)` accept them, and their log-probabilities equal those of the
            original samples.
        cache_salt: A string that separates prefix caches: only prompts with the same salt share
            cached pages. So nobody can infer the prompts of others from response times.
        id: The id of the request in events and callbacks; None lets the engine choose one.

    Raises:
        TypeError: An attribute has the wrong type; the message names it.
        ValueError: An attribute has an invalid value; the message names it.
    """

    prompt: Sequence[int]
    max_tokens: int = 160
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    pooling: str | None = None
    priority: int = 0
    seed: int | None = None
    stop_tokens: Sequence[int] | int = ()
    stop_strings: Sequence[str] = ()
    ends_at: Callable[[int], bool] | None = dataclasses.field(default=None, compare=False)
    grammar: Grammar | None = dataclasses.field(default=None, compare=False)
    replay: Sequence[int] = ()
    cache_salt: str = ""
    id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _copied("prompt", self.prompt))
        object.__setattr__(self, "replay", tuple(_copied("replay", self.replay)))
        stops: Any = self.stop_tokens
        stops = (stops,) if _is_integer(stops) else stops
        for name, value, kind in (
            ("stop_tokens", stops, "integers"),
            ("stop_strings", self.stop_strings, "strings"),
        ):
            if isinstance(value, str | bytes) or not isinstance(value, Sequence | frozenset | set):
                raise TypeError(f"{name} must be a sequence of {kind}, got {value!r}")
        for place, token in enumerate(stops):
            _check_token(f"stop_tokens[{place}]", token)
        object.__setattr__(self, "stop_tokens", tuple(map(operator.index, stops)))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise TypeError(f"stop_strings must be strings, got {text!r}")
            if not text:
                raise ValueError(
                    "stop_strings contains an empty string, which would match any text"
                )
        optional = ("seed", "logprobs", "prompt_logprobs", "id")
        for name in ("max_tokens", "top_k", "priority", *optional):
            value = getattr(self, name)
            if value is not None or name not in optional:
                _check_integer(name, value)
                object.__setattr__(self, name, operator.index(value))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {value!r}")
            try:
                float(value)
            except OverflowError:
                raise ValueError(
                    f"{name} must be finite; got a number too large for a float"
                ) from None
        calls = (getattr(self.grammar, name, None) for name in ("mask", "accept"))
        if self.grammar is not None and not all(map(callable, calls)):
            raise TypeError(
                "grammar must have the methods mask and accept of "
                f"jaxattn.engine.requests.request.Grammar; got {self.grammar!r}"
            )
        if self.ends_at is not None and not callable(self.ends_at):
            raise TypeError(f"ends_at must be callable, got {self.ends_at!r}")
        if not isinstance(self.cache_salt, str):
            raise TypeError(f"cache_salt must be a string, got {self.cache_salt!r}")
        if not len(self.prompt):
            raise ValueError("prompt is empty; it needs at least one token")
        if self.max_tokens < 0:
            raise ValueError(
                "max_tokens must be at least 1, or 0 to process only the prompt; got "
                f"{self.max_tokens}"
            )
        if len(self.replay) > self.max_tokens:
            raise ValueError(
                f"replay has {len(self.replay)} tokens, more than max_tokens={self.max_tokens}"
            )
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {self.pooling!r}")
        if self.pooling is not None and self.max_tokens:
            raise ValueError(f"pooling needs max_tokens=0; got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more; got {self.temperature}")
        if self.processed_logprobs and not self.temperature:
            raise ValueError(
                "processed_logprobs needs a temperature above 0; at 0 one token has probability 1"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1; got {self.min_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be from 0 to 2**31 - 1; got {self.top_k}")
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise ValueError(
                f"repetition_penalty must be from {1 / MOST_PENALTY:g} to {MOST_PENALTY:g}; got "
                f"{self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_PENALTY:
                raise ValueError(
                    f"{name} must be from -{MOST_PENALTY:g} to {MOST_PENALTY:g}; got "
                    f"{getattr(self, name)}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST_LOGPROBS:
                raise ValueError(f"{name} must be from 0 to {MOST_LOGPROBS}; got {value}")
        if not -(2**31) <= self.priority < 2**31:
            raise ValueError(f"priority must be an int32; got {self.priority}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1; got {self.seed}")
        if self.id is not None and not 0 <= self.id < 2**31:
            raise ValueError(f"id must be from 0 to 2**31 - 1; got {self.id}")

    @property
    def processed(self) -> bool:
        """Whether to return log-probabilities of a distribution other than the model's own. Where
        both are equal, those of the model are returned, so that exact mode has the same bits."""
        filters = self.top_k or self.min_p or self.top_p < 1 or self.grammar is not None
        changes = self.temperature != 1 or filters or self.biases or self.penalized
        return bool(self.processed_logprobs and changes)

    @property
    def stops(self) -> tuple[int, ...]:
        """The stop tokens, as a tuple."""
        stops: Any = self.stop_tokens
        return stops

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit biases, as pairs of a token and a number."""
        biases: Any = self.logit_bias
        return biases

    @property
    def watched(self) -> bool:
        """Whether the host must look at each token, or return more than the token itself."""
        looks = self.ends_at, self.grammar, self.logprobs
        return bool(self.stop_strings) or any(each is not None for each in looks)

    @property
    def may_stop(self) -> bool:
        """Whether the request may end before it has generated `max_tokens`."""
        ends = self.ends_at is not None or self.grammar is not None
        return self.max_tokens > 0 and (ends or bool(self.stop_tokens or self.stop_strings))

    @property
    def reads_all(self) -> bool:
        """Whether the engine must read each prompt token to compute what the request asked for."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def penalized(self) -> bool:
        """Whether penalties make the logits depend on earlier tokens."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def drawn_from(self) -> int:
        """The seed for sampling: `seed`, or one derived from `id`."""
        if self.seed is not None:
            return int(self.seed)
        return (int(self.id or 0) * 0x9E3779B1) % 2**32


def _copied(name: str, prompt: Any) -> Sequence[int]:
    """Returns the tokens as bytes or a tuple, which nobody can change while they are served."""
    if isinstance(prompt, bytes):
        return prompt
    if isinstance(prompt, str):
        raise TypeError(
            f"{name} must be token ids, got a str; for a byte-level model give {name}.encode()"
        )
    if hasattr(prompt, "dtype"):
        if prompt.dtype.kind not in "iu" or prompt.ndim != 1:
            raise TypeError(f"{name} must be integers [T], got {prompt.dtype} {prompt.shape}")
        return tuple(prompt.tolist())
    if not isinstance(prompt, Sequence | bytearray):
        raise TypeError(f"{name} must be a sequence of token ids, got {prompt!r}")
    tokens = tuple(prompt)
    if set(map(type, tokens)) <= {int}:  # checking each token takes a millisecond per thousand
        return tokens
    for place, token in enumerate(tokens):
        _check_integer(f"{name}[{place}]", token)
    return tuple(map(operator.index, tokens))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Returns pairs of a token and the bias of its logit, sorted by token."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"logit_bias must map tokens to numbers, got {value!r}")
    biases: dict[int, float] = {}
    for pair in pairs:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"logit_bias must map tokens to numbers, got {value!r}")
        token, bias = pair
        _check_token("logit_bias: a token", token)
        if not isinstance(bias, numbers.Real):
            raise TypeError(f"logit_bias[{token}] must be a number, got {bias!r}")
        if not -100 <= float(bias) <= 100:
            raise ValueError(f"logit_bias[{token}] must be from -100 to 100; got {bias}")
        biases[operator.index(token)] = float(bias)
    if len(biases) > MOST_BIASES:
        raise ValueError(f"logit_bias has {len(biases)} tokens; at most {MOST_BIASES} are allowed")
    return tuple(sorted(biases.items()))


def _check_token(name: str, token: Any) -> None:
    """Checks a token id: a negative one would count from the end of the vocabulary."""
    _check_integer(name, token)
    if not 0 <= token < 2**31:
        raise ValueError(f"{name} must be from 0 to 2**31 - 1; got {token}")


def _is_integer(value: Any) -> bool:
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            operator.index(value)
            return True
    return False


def _check_integer(name: str, value: Any) -> None:
    if not _is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
