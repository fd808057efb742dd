"""Outputs of an engine: token events, finish reasons and completions."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, overload

import numpy as np
from jaxtyping import Float, Int

from jaxattn.engine.requests.request import MOST_LOGPROBS, Request


class FinishReason(enum.StrEnum):
    """The reason why a request ended. `Completion.detail` gives more detail.

    STOP: A stop token (the detail is the token), a stop string (the detail is the string), a
        grammar whose text is complete ("grammar"), or `Request.ends_at` ("ends_at").
    LENGTH: `max_tokens`, or the engine's `max_model_len`; the detail names the limit.
    NOT_FINITE: The logits held NaN or infinity, as with a damaged checkpoint.
    ABORTED: A call of `Engine.abort`.
    INTERRUPTED: Ctrl-C.
    FAILED: An error in the step that computed the row; the detail is its message.
    REFUSED: The engine can never serve the request; the detail gives the reason.
    """

    STOP = "stop"
    LENGTH = "length"
    NOT_FINITE = "not finite"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result of a request.

    Attributes:
        tokens: The generated token ids, without the stop token.
        logprobs: The log-probabilities of `tokens`, if the request asked for them.
        detail: The detail of the finish reason, see `FinishReason`; None if there is none.
        seconds_to_first_token: The time from `add` to the first token; None without a token.
        seconds: The time from `add` to the end of the request.
        cached_tokens: The number of prompt tokens that the prefix cache supplied.
        seconds_queued: The time from `add` until the request got a row; None if it never did.
        prompt_logprobs: The log-probabilities of the prompt's tokens, if the request asked for
            them. The first is None, because no token precedes it. A request that ended early has
            only those that the engine had computed.
        embedding: The embedding of the prompt, float32 [hidden], if the request asked for it.
        weights_version: The version of the weights that gave the last token; see `Engine.update`.
        older_tokens: The number of leading tokens that earlier weights generated.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    detail: str | int | None = None
    seconds_to_first_token: float | None = None
    seconds: float = 0.0
    logprobs: tuple["Logprobs", ...] = ()
    cached_tokens: int = 0
    seconds_queued: float | None = None
    prompt_logprobs: "Sequence[Logprobs | None]" = ()
    embedding: Float[np.ndarray, "hidden"] | None = dataclasses.field(default=None, compare=False)
    weights_version: int = 0
    older_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probability of a token, as a natural logarithm.

    Attributes:
        token: The log-probability of the token itself.
        top: The most likely tokens with their log-probabilities, the likeliest first; as many as
            the request asked for.
        rank: The rank of the token in the vocabulary, 1 for the likeliest; None for a generated
            token.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None

    @classmethod
    def of(cls, found: Int[np.ndarray, "1+2*20"], count: int, rank: int | None = None) -> Self:
        """Decodes a line of `sampling.logprobs`, with `count` alternatives, on the host."""
        own, values = found[0].view("float32"), found[1 + MOST_LOGPROBS :].view("float32")
        top = zip(found[1 : 1 + count].tolist(), values[:count].tolist(), strict=True)
        return cls(float(own), tuple((token, value) for token, value in top if token >= 0), rank)


class PromptLogprobs(Sequence[Logprobs | None]):
    """Log-probabilities of a text's tokens: a sequence that creates a `Logprobs` only when a token
    is read. The first token has None, because no token precedes it.

    Args:
        lines: The lines that a score step returns for the other tokens: the token's rank, the bits
            of its log-probability, then the alternatives and the bits of theirs.
        count: The number of alternatives of each token.
    """

    __slots__ = ("_count", "_lines")
    NO_LINES = np.zeros((0, 2 + 2 * MOST_LOGPROBS), np.int32)

    def __init__(self, lines: Int[np.ndarray, "n m"], count: int):
        self._lines, self._count = lines if count else lines[:, :2], count

    @classmethod
    def none(cls, count: int) -> Self:
        """Returns the log-probabilities of a text of one token."""
        return cls(cls.NO_LINES, count)

    def behind(self, lines: Int[np.ndarray, "n m"]) -> Self:
        """Returns a sequence with further tokens after these."""
        own = lines if self._count else lines[:, :2]
        return type(self)(np.concatenate([self._lines, own]), self._count)

    @property
    def tokens(self) -> Float[np.ndarray, "T"]:
        """The log-probabilities of the tokens themselves, float32; NaN for the first."""
        bits = np.ascontiguousarray(self._lines[:, 1])
        return np.concatenate([np.full(1, np.nan, np.float32), bits.view(np.float32)])

    def __len__(self) -> int:
        return 1 + len(self._lines)

    @overload
    def __getitem__(self, place: int) -> Logprobs | None: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Logprobs | None, ...]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        number = range(len(self))[place]
        if not number:
            return None
        line = self._lines[number - 1]
        if self._count:
            return Logprobs.of(line[1:], self._count, int(line[0]))
        return Logprobs(float(line[1].view("float32")), (), int(line[0]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self)})"


def logprob_array(
    rows: Iterable[Sequence[Logprobs | None]], length: int
) -> Float[np.ndarray, "rows length"]:
    """Returns log-probabilities as a padded float32 array, as a trainer needs them.

    Each text has a row, with NaN after its end and for tokens without a log-probability.

        scored = logprob_array(engine.score(texts, starts=starts), tokens.shape[1])

    Args:
        rows: The results of `Engine.score`. For a `Completion`, use
            `(*completion.prompt_logprobs, *completion.logprobs)`, or None for each prompt token.

    Raises:
        ValueError: A text is longer than `length`.
    """
    texts = list(rows)
    padded = np.full((len(texts), length), np.nan, np.float32)
    for place, (line, text) in enumerate(zip(padded, texts, strict=True)):
        if len(text) > length:
            raise ValueError(
                f"logprob_array: text {place} has {len(text)} tokens, more than {length=}"
            )
        if isinstance(text, PromptLogprobs):
            line[: len(text)] = text.tokens
        else:
            line[: len(text)] = [np.nan if each is None else each.token for each in text]
    return padded


class TokenEvent(NamedTuple):
    """The next token of a row. The engine sends no event for a stop token.

    It is a tuple because a round creates up to 2,048, and a dataclass takes three times as long.

    Attributes:
        logprobs: The token's log-probabilities, if the request asked for them.
        weights_version: The version of the weights that gave the token; see `Engine.update`.
    """

    request: Request
    token: int
    logprobs: Logprobs | None = None
    weights_version: int = 0


class PromptEvent(NamedTuple):
    """The log-probabilities of a request's prompt, which precede its first token.

    Attributes:
        logprobs: See `Completion.prompt_logprobs`.
        weights_version: The version of the weights that gave them; see `Engine.update`.
    """

    request: Request
    logprobs: Sequence[Logprobs | None]
    weights_version: int = 0


@dataclasses.dataclass(frozen=True)
class FinishEvent:
    """The end of a request that is done or refused."""

    completion: Completion


type Event = TokenEvent | PromptEvent | FinishEvent


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; `completions` holds the results so far, in request order."""

    def __init__(self, completions: list[Completion]):
        super().__init__("interrupted")
        self.completions = completions
