"""Outputs of an engine: token events, finish reasons and completions."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, overload

import numpy as np
from jaxtyping import Float, Int

from jaxattn.engine.requests.request import MOST_LOGPROBS, Request


class FinishReason(enum.StrEnum):
    """Why a row ended. `Completion.detail` says more.

    STOP: a stop token (the detail is the token), a stop string (the detail is the string), or a
        grammar whose text is complete (the detail is "grammar").
    LENGTH: `max_tokens`, or the engine's `max_model_len`; the detail names it.
    NOT_FINITE: the logits held NaN or infinity, as with a damaged checkpoint.
    ABORTED: `Engine.abort`.
    INTERRUPTED: Ctrl-C.
    FAILED: an error ended the step that the row was in; the detail is its message.
    REFUSED: the request can never be served; the detail says why.
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
        tokens: the generated tokens, without the stop token.
        logprobs: an entry for each token, if the request asked for log-probabilities.
        detail: details of the finish reason, see `FinishReason`; None if there are none.
        seconds_to_first_token: time from `add` to the first token; None if there was no token.
        seconds: time from `add` until the request finished.
        cached_tokens: tokens of the prompt that came from the prefix cache.
        seconds_queued: time until the request got a row; None if it never got one.
        prompt_logprobs: an entry for each token of the prompt, if the request asked for them. The
            first entry is None, because no token is before it. If a row ended early, the entries
            cover the tokens that were read.
        embedding: float32 [hidden], the embedding of the prompt, if the request asked for it.
        weights_version: the version of the weights that gave the last token; see `Engine.update`.
        older_tokens: the number of first tokens that earlier weights gave.
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
    """How likely a token was, in natural logarithms.

    Attributes:
        token: of the token itself.
        top: the most likely tokens and theirs, the likeliest first; as many as were asked for.
        rank: of the token among all, 1 is the likeliest; of prompts' tokens alone.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None

    @classmethod
    def of(cls, found: Int[np.ndarray, "1+2*20"], count: int, rank: int | None = None) -> Self:
        """What a row of `sampling.logprobs` tells of `count` alternatives, on the host."""
        own, values = found[0].view("float32"), found[1 + MOST_LOGPROBS :].view("float32")
        top = zip(found[1 : 1 + count].tolist(), values[:count].tolist(), strict=True)
        return cls(float(own), tuple((token, value) for token, value in top if token >= 0), rank)


class PromptLogprobs(Sequence[Logprobs | None]):
    """Log-probabilities of a text's tokens: a sequence that creates a `Logprobs` only when a token
    is read. The first token has None, because no token precedes it.

    Args:
        lines: of the other tokens, as a score step tells them: (the rank of the token among all,
            then the bits of its log-probability, then those of alternatives).
        count: alternatives of each.
    """

    __slots__ = ("_count", "_lines")
    NO_LINES = np.zeros((0, 2 + 2 * MOST_LOGPROBS), np.int32)

    def __init__(self, lines: Int[np.ndarray, "n m"], count: int):
        self._lines, self._count = lines if count else lines[:, :2], count

    @classmethod
    def none(cls, count: int) -> Self:
        """Of a text of one token."""
        return cls(cls.NO_LINES, count)

    def behind(self, lines: Int[np.ndarray, "n m"]) -> Self:
        """With further tokens behind these."""
        own = lines if self._count else lines[:, :2]
        return type(self)(np.concatenate([self._lines, own]), self._count)

    @property
    def tokens(self) -> Float[np.ndarray, "T"]:
        """Of the tokens themselves, float32; NaN of the first."""
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
    """The log-probabilities of texts as a float32 array with one row per text.

    Entries after the end of a text, and entries without a log-probability, are NaN.

        scored = logprob_array(engine.score(texts, starts=starts), tokens.shape[1])

    Args:
        rows: for each text, the sequence from `Engine.score`. For a `Completion`, the sequence is
            `(*completion.prompt_logprobs, *completion.logprobs)`, or None for each prompt token.

    Raises:
        ValueError: a text is longer than `length`.
    """
    texts = list(rows)
    found = np.full((len(texts), length), np.nan, np.float32)
    for place, (line, text) in enumerate(zip(found, texts, strict=True)):
        if len(text) > length:
            raise ValueError(
                f"logprob_array: text {place} has {len(text)} tokens, and length is {length}"
            )
        if isinstance(text, PromptLogprobs):
            line[: len(text)] = text.tokens
        else:
            line[: len(text)] = [np.nan if each is None else each.token for each in text]
    return found


class TokenEvent(NamedTuple):
    """A row's next token; stop tokens are not announced.

    A tuple, since it is made in a third of a dataclass's time, 256 times per round.

    Attributes:
        logprobs: if the request asked for them.
        weights_version: of the weights that gave it; see `Engine.update`.
    """

    request: Request
    token: int
    logprobs: Logprobs | None = None
    weights_version: int = 0


class PromptEvent(NamedTuple):
    """The log-probabilities of a request's prompt, before its first token.

    Attributes:
        logprobs: see `Completion.prompt_logprobs`.
        weights_version: of the weights that gave them; see `Engine.update`.
    """

    request: Request
    logprobs: Sequence[Logprobs | None]
    weights_version: int = 0


@dataclasses.dataclass(frozen=True)
class FinishEvent:
    """A request is done or refused."""

    completion: Completion


type Event = TokenEvent | PromptEvent | FinishEvent


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`; `completions` has all that was generated, in request order."""

    def __init__(self, completions: list[Completion]):
        super().__init__("interrupted")
        self.completions = completions
