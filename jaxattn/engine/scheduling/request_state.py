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
    """A request that waits, and what it has generated if it ran before.

    Attributes:
        keys: of the blocks of its prompt, once they were looked for.
        admitted: when it first had a row, of `time.perf_counter`; None if it never had one.
        prompt_logprobs: as in `RunningRequest`.
        older_tokens: how many of the tokens earlier weights gave.
    """

    request: Request
    order: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    keys: list[bytes] | None = None
    admitted: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: None = None  # a row that loses its pages pools its prompt again
    older_tokens: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        return self.request.priority, self.order

    def outlives_weights(self) -> None:
        """Goes on with other weights: its tokens stay, and its prompt is read and told again."""
        self.older_tokens = len(self.tokens)
        if self.prompt_logprobs and len(self.prompt_logprobs) < len(self.request.prompt):
            self.prompt_logprobs = None


@dataclasses.dataclass(eq=False)
class RunningRequest:
    """A request that has been given row `index` of the batch.

    Attributes:
        prompt: what it reads before it generates: the request's prompt, and what it had generated
            when it lost its pages, unless it replays that.
        tokens: what was generated and has come back from the device.
        replay: tokens behind its prompt that it does not sample: those that it had generated when
            it lost its pages, and those that the request gives.
        silent: how many tokens it decodes again that have come back from the device before.
        ended: it has left its row; what steps in flight say of it is not its own.
        read_last: the number of the round that last read of its prompt.
        plain: whether the host has nothing to do with its tokens but to hand them on.
        late_stops: whether the host has to look for its stop tokens.
        admitted: when the request first had a row, of `time.perf_counter`.
        cached_tokens: of its prompt, that it found in the cache of prefixes.
        prefix: what it enters there; None if it does not.
        prompt_logprobs: of its prompt's first tokens, that have come back from the device; None if
            the request did not ask for them.
        scored: how many of them are there, or under way.
        pooled: the sum of the hidden states of its prompt that have come back from the device.
        older_tokens: how many of its tokens earlier weights gave.
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
    admitted: float
    replay: Sequence[int] = ()
    silent: int = 0
    ended: bool = False
    read_last: int = -1
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
        """Where the tokens stand that are scored with a chunk of its prompt, which begins behind so
        many that are cached."""
        if self.request.prompt_logprobs is None:
            return range(0)
        end = min(cached + tokens + 1, len(self.request.prompt))
        found = range(self.scored, max(self.scored, end))
        self.scored = found.stop
        return found

    def next_pooled(self, cached: int, end: int) -> range:
        """Where the tokens stand that are pooled with the chunk of its prompt from `cached` to
        `end`."""
        match self.request.pooling:
            case "mean":
                return range(cached, end)
            case "last":
                return range(max(cached, len(self.prompt) - 1), end)
        return range(0)

    @property
    def embedding(self) -> Float[np.ndarray, "hidden"] | None:
        """What was asked for of its prompt's hidden states, float32; None where nothing was."""
        if isinstance(self.pooled, float):
            return None
        tokens = len(self.prompt) if self.request.pooling == "mean" else 1
        return (self.pooled / tokens).astype(np.float32)

    @property
    def last(self) -> int:
        """Where the last token stands that it may generate."""
        return len(self.request.prompt) + self.max_tokens - 1
