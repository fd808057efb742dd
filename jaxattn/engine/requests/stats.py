"""Statistics of a run: counts and times."""

import dataclasses
from typing import Self


@dataclasses.dataclass
class GenerationStats:
    """The statistics of one `generate`. Prefill gives the first token of a request, so it does not
    count as a decoded one.

    Attributes:
        prompt_tokens: The prompt tokens that prefill has read. Tokens that it reads again after a
            preemption count again.
        decoded_tokens: The tokens from decode steps and mixed steps, without replayed ones.
        prefill_seconds: The time of prefill steps, each from the end of the step before it. A
            mixed step counts only with the share of its prompt tokens.
        prefill_steps, decode_steps: The numbers of steps; a mixed step counts as both.
        waited_seconds: The time that the host waited for steps; the rest is its own work.
        queued_seconds: The time that finished requests waited for a row, summed over requests.
        cached_tokens: The prompt tokens of finished requests that the prefix cache supplied.
        drafted_tokens: The number of draft tokens, accepted or not.
        guessed_tokens: The decoded tokens that were accepted drafts (verification.py).
        drafting: Whether the draft head is in use, for each bucket of rows in which it was tried.
        preemptions: How often a row lost its pages to an older one and was computed again.
        replayed_tokens: The tokens that preempted rows decoded again, in exact mode. Without exact
            mode, rows read them as part of the prompt.
        seconds: The time of `generate`, without the engine's start.
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
        """Returns the sums of both; for `drafting`, the entries of `more` take precedence."""
        sums = {}
        for field in dataclasses.fields(self):
            one, other = getattr(self, field.name), getattr(more, field.name)
            sums[field.name] = one | other if isinstance(one, dict) else one + other
        return dataclasses.replace(self, **sums)

    @property
    def decoded_tokens_per_second(self) -> float:
        """The rate over all the time except prefill: steps, scheduler and callbacks."""
        rest = self.seconds - self.prefill_seconds
        return self.decoded_tokens / rest if rest > 0 else 0.0


@dataclasses.dataclass
class RequestTimes:
    """The times at which a request was added and at which its first token came."""

    arrival_time: float
    first_token_time: float | None = None

    def first(self, now: float) -> None:
        if self.first_token_time is None:
            self.first_token_time = now

    def read(self, now: float) -> tuple[float | None, float]:
        """Returns (seconds to the first token, seconds), both since the request was added."""
        first = None if self.first_token_time is None else self.first_token_time - self.arrival_time
        return first, now - self.arrival_time
