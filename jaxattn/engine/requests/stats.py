"""Statistics of a run: counts and times."""

import dataclasses
from typing import Self


@dataclasses.dataclass
class GenerationStats:
    """Of one `generate`. A request's first token comes from prefill: it is not a decoded one.

    Attributes:
        prompt_tokens: that prefill has read; those of a row that lost its pages count again.
        prefill_seconds: of prefill steps, each from the end of the step before it; of those in
            which rows decode too, the share of the prompts' tokens.
        prefill_steps, decode_steps: a step with both counts as both.
        waited_seconds: for which the host waited for what steps tell: the rest is its own work.
        queued_seconds: for which requests that are done waited for their rows, all together.
        cached_tokens: of the prompts of requests that are done, found in the cache of prefixes.
        drafted_tokens: that were drafted for rows, whether they turned out right or not.
        guessed_tokens: of those decoded, that came with others in one step (verification.py).
        drafting: of the buckets of rows that a model's draft head was tried in, whether it drafts.
        preemptions: how often a row lost its pages to an older one, and was computed again.
        replayed_tokens: that such rows decoded again, in exact mode; others read them as prompts.
    """

    prompt_tokens: int = 0
    decoded_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    guessed_tokens: int = 0
    drafted_tokens: int = 0
    drafting: dict[int, bool] = dataclasses.field(default_factory=dict)
    preemptions: int = 0
    replayed_tokens: int = 0
    prefill_seconds: float = 0.0
    waited_seconds: float = 0.0
    queued_seconds: float = 0.0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    def with_more(self, more: Self) -> Self:
        """The sums of both; a bucket drafts if it does in the later one."""
        sums = {}
        for field in dataclasses.fields(self):
            one, other = getattr(self, field.name), getattr(more, field.name)
            sums[field.name] = one | other if isinstance(one, dict) else one + other
        return dataclasses.replace(self, **sums)

    @property
    def decoded_tokens_per_second(self) -> float:
        """Over all the time that was not prefill: steps, scheduler and callbacks."""
        rest = self.seconds - self.prefill_seconds
        return self.decoded_tokens / rest if rest > 0 else 0.0


@dataclasses.dataclass
class RequestTimes:
    """When a request was added, and when its first token came."""

    added: float
    first_token: float | None = None

    def first(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now

    def read(self, now: float) -> tuple[float | None, float]:
        """(seconds to the first token, seconds) since it was added."""
        first = None if self.first_token is None else self.first_token - self.added
        return first, now - self.added
