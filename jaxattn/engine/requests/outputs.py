"""Outputs of an engine: token events, finish reasons and completions."""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxattn.engine.requests.request import Request


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
    """What became of a request.

    Attributes:
        tokens: what was generated, without the stop token.
        logprobs: of each of the tokens, if the request asked for them.
        detail: of the finish reason, see `FinishReason`; None if there is nothing to add.
        seconds_to_first_token: since the request was added; None if there was none.
        seconds: until it was done.
        cached_tokens: of the prompt, that were not read again.
        seconds_queued: until the request had a row; None if it never had one.
        prompt_logprobs: of each token of the prompt, if the request asked for them. Nothing stands
            before the first one: its are None. A row that ended before has those it came to.
        embedding: of the prompt, float32 [hidden], if the request asked for it.
        weights_version: of the weights that gave its last token; see `Engine.update`.
        older_tokens: how many of its tokens, the first ones, earlier weights gave.
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
    prompt_logprobs: "tuple[Logprobs | None, ...]" = ()
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
    logprobs: tuple[Logprobs | None, ...]
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
