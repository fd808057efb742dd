"""A request on the host: while it waits, and while it runs in a row of the batch."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxattn.engine.requests.outputs import Logprobs, PromptLogprobs
from jaxattn.engine.requests.request import Request
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.scheduling.prefix_cache import PendingInsert


@dataclasses.dataclass(eq=False)
class WaitingRequest:
    """A request that waits, with the tokens that it has generated if it ran before.

    Attributes:
        keys: The keys of its prompt's blocks, once they were looked up.
        admission_time: When it first got a row, by `time.perf_counter`; None if it never did.
        prompt_logprobs: See `RunningRequest`.
        older_tokens: The number of tokens that earlier weights generated.
    """

    request: Request
    order: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    keys: list[bytes] | None = None
    admission_time: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: None = None  # a preempted row pools its prompt again
    older_tokens: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        return self.request.priority, self.order

    def continue_with_new_weights(self) -> None:
        """Continues with new weights: keeps the tokens, and restarts unfinished scores."""
        self.older_tokens = len(self.tokens)
        if self.prompt_logprobs and len(self.prompt_logprobs) < len(self.request.prompt):
            self.prompt_logprobs = None


@dataclasses.dataclass(eq=False)
class RunningRequest:
    """A request that has row `index` of the batch.

    Attributes:
        prompt: The tokens to read before sampling: the request's prompt and, after a preemption,
            the generated tokens, unless the row replays them.
        tokens: The generated tokens that the host has received.
        replay: The tokens after the prompt that the row does not sample: those generated before a
            preemption, and those of `Request.replay`.
        num_silent: The number of replayed tokens to come that the host has already received.
        ended: Whether the request has left its row, so that results in flight are not its own.
        last_read_round: The number of the round that last read from its prompt.
        plain: Whether the host only passes its tokens on.
        late_stops: Whether the host must check for its stop tokens.
        admission_time: When the request first got a row, by `time.perf_counter`.
        cached_tokens: The number of prompt tokens that the prefix cache supplied.
        prefix: The blocks of its prompt for the prefix cache; None without a prefix cache.
        prompt_logprobs: The log-probabilities of the prompt that the host has received; None if the
            request did not ask for them.
        scored: The number of prompt tokens with log-probabilities, including those in flight.
        pooled: The sum of the prompt's hidden states that the host has received.
        older_tokens: The number of tokens that earlier weights generated.
    """

    request: Request
    index: int
    slot: int
    pages: list[int]
    max_tokens: int
    order: int
    prompt: Sequence[int]
    level: SamplingMode
    tokens: list[int]
    logprobs: list[Logprobs]
    plain: bool
    late_stops: bool
    admission_time: float
    replay: Sequence[int] = ()
    num_silent: int = 0
    ended: bool = False
    last_read_round: int = -1
    cached_tokens: int = 0
    prefix: PendingInsert | None = None
    prompt_logprobs: PromptLogprobs | None = None
    scored: int = 0
    pooled: Float[np.ndarray, "hidden"] | float = 0.0
    older_tokens: int = 0

    def __post_init__(self) -> None:
        if self.request.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = PromptLogprobs.none(self.request.prompt_logprobs)
        self.scored = len(self.prompt_logprobs or ())

    def next_scored(self, cached: int, tokens: int) -> range:
        """Returns the positions of the tokens to score with the next chunk of the prompt, which
        has `tokens` tokens after `cached` cached ones."""
        if self.request.prompt_logprobs is None:
            return range(0)
        end = min(cached + tokens + 1, len(self.request.prompt))
        found = range(self.scored, max(self.scored, end))
        self.scored = found.stop
        return found

    def next_pooled(self, cached: int, end: int) -> range:
        """Returns the positions of the tokens to pool with the prompt's chunk `cached:end`."""
        match self.request.pooling:
            case "mean":
                return range(cached, end)
            case "last":
                return range(max(cached, len(self.prompt) - 1), end)
        return range(0)

    @property
    def embedding(self) -> Float[np.ndarray, "hidden"] | None:
        """The requested embedding of the prompt, float32; None if there is none."""
        if isinstance(self.pooled, float):
            return None
        tokens = len(self.prompt) if self.request.pooling == "mean" else 1
        return (self.pooled / tokens).astype(np.float32)

    @property
    def last(self) -> int:
        """The position of the last token that the row may generate."""
        return len(self.request.prompt) + self.max_tokens - 1
