"""Steps in flight: the host's record of each, and the processing of its results."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxattn.engine.execution.output_processor import OutputProcessor
from jaxattn.engine.execution.prompt_scores import PromptScores
from jaxattn.engine.requests.request import Request
from jaxattn.engine.requests.stats import GenerationStats
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.scheduling.draft_switch import DraftSwitch
from jaxattn.engine.scheduling.request_state import RunningRequest
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.steps.step_interface import sampled_rows
from jaxattn.engine.steps.token_selection import FinishCode


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeBatchPlan:
    """The rows that decode, computed once for all rounds in which they stay the same.

    Attributes:
        lines: The row index of each line of a step; -1 is padding.
        row_indices: The indices of the rows.
        num_new_tokens: int32 [B], the maximum number of tokens that a step gives each row. The
            scheduler counts with it until the step is read.
        max_steps: The maximum number of steps per call.
        drafts: Whether these steps may use drafts.
        rows: The rows by their line; None is padding.
        requests: The requests of the rows.
        token_lists: The generated tokens of each row.
        active_lines: The lines that are not padding.
        plain: Whether the host only passes the tokens on.
        changes: The scheduler's `changes` when this plan was made.
    """

    lines: np.ndarray
    row_indices: np.ndarray
    num_new_tokens: np.ndarray
    max_steps: int
    drafts: bool
    rows: list[RunningRequest | None]
    requests: list[Request]
    token_lists: list[list[int]]
    level: SamplingMode
    active_lines: np.ndarray
    grammars: bool
    plain: bool
    changes: int


@dataclasses.dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step in flight, whose results the host has not read.

    Attributes:
        outputs: The result of `advance`, or logits that no row samples.
        rows: The rows that decode, by their line; None is padding.
        running: The plan of these rows; None if no row decodes.
        steps: The number of decode steps.
        finishing_rows: The rows that get their first token, by their line.
        prompt_tokens: The number of prompt tokens that the step reads.
        scores: The prompt tokens that the step scores or pools.
    """

    outputs: jax.Array
    rows: Sequence[RunningRequest | None]
    running: DecodeBatchPlan | None = None
    steps: int = 1
    finishing_rows: Sequence[RunningRequest | None] = ()
    prompt_tokens: int = 0
    scores: PromptScores | None = None


class StepOutputReader:
    """Waits for steps in the order in which they were sent, and passes their tokens on.

    Args:
        endings: The processor that receives tokens and ends rows.
        switch: The switch of the model's draft head, which measures how long steps take.

    Attributes:
        step_seconds: The time of the last decode step for which the host waited.
    """

    def __init__(self, scheduler: Scheduler, endings: OutputProcessor, switch: DraftSwitch):
        self.scheduler, self.endings, self.switch = scheduler, endings, switch
        self._read_at = time.perf_counter()
        self.step_seconds = 0.0

    @property
    def stats(self) -> GenerationStats:
        return self.endings.stats

    def begin(self) -> None:
        """Starts the time of the next step now, because nothing is in flight."""
        self._read_at = time.perf_counter()

    def read(self, flight: InFlightStep) -> None:
        """Waits for a step and processes its results. Steps end in the order in which they were
        sent, so the step's own time is the time since the one before it ended.
        """
        has_rows = any(row is not None for row in (*flight.rows, *flight.finishing_rows))
        before = time.perf_counter()
        if has_rows:
            outputs = np.asarray(flight.outputs)
        else:
            flight.outputs.block_until_ready()
        now = time.perf_counter()
        self.stats.waited_seconds += now - before
        elapsed, self._read_at = now - self._read_at, now
        running = flight.running
        if flight.prompt_tokens:
            decoded = 0 if running is None else len(running.row_indices)
            of_prompts = flight.prompt_tokens / (flight.prompt_tokens + decoded)
            self.stats.prefill_seconds += elapsed * of_prompts
            if flight.scores is not None:
                self.endings.process_prompt_logprobs(flight.scores.read())
                self.endings.process_pooled_sums(flight.scores.sums())
            if has_rows:
                self.endings.take(flight.finishing_rows, outputs)
                self.stats.decoded_tokens += self.endings.take(flight.rows, outputs)
            return
        assert running is not None
        if now - before > elapsed / 2:  # otherwise the host has taken the time, or the step waited
            self.step_seconds = elapsed / flight.steps
        if running.drafts and self.scheduler.limits.uses_draft_head and has_rows:
            self._observe(running, outputs, elapsed)
        self.stats.decoded_tokens += self._process_decode(flight, running, outputs)

    def _observe(self, running: DecodeBatchPlan, outputs: np.ndarray, seconds: float) -> None:
        """Reports a step's time to the switch. The step used drafts if rows have several tokens."""
        counts = outputs[..., 1] != FinishCode.IDLE
        rows = np.count_nonzero(counts[:, 0] if counts.ndim == 2 else counts)
        if rows:
            bucket = sampled_rows(self.scheduler.limits, len(running.lines))
            tokens = np.count_nonzero(counts) / rows
            drafting = self.switch.observe(bucket, outputs.ndim == 3, seconds, tokens)
            self.stats.drafting[bucket] = drafting

    def _process_decode(
        self, flight: InFlightStep, running: DecodeBatchPlan, outputs: np.ndarray
    ) -> int:
        """Processes a call of decode steps. Returns the number of tokens."""
        if flight.steps == 1:
            if outputs.ndim == 3:
                return self._process_drafts(running, outputs)
            outputs = outputs[None]
        if running.plain and running.changes == self.scheduler.changes:
            own = (
                outputs
                if len(running.active_lines) == outputs.shape[1]
                else outputs[:, running.active_lines]
            )
            if not np.count_nonzero(own[:, :, 1]):
                return self.endings.process_tokens(
                    running.requests, running.token_lists, own[:, :, 0]
                )
        return sum(self.endings.take(running.rows, step) for step in outputs)

    def _process_drafts(self, running: DecodeBatchPlan, outputs: np.ndarray) -> int:
        """Processes a step with drafts, int32 [b, S, 2] from `verify`. Returns its token count."""
        tokens = outputs.shape[1]
        counts = np.count_nonzero(outputs[:, :, 1] != FinishCode.IDLE, axis=1)
        for row, count in zip(running.rows, counts.tolist(), strict=False):
            if row is not None and not row.ended:
                self.scheduler.rollback_drafts(row, tokens - count)
        self.stats.drafted_tokens += (tokens - 1) * int(np.count_nonzero(counts))
        first, *others = [self.endings.take(running.rows, outputs[:, at]) for at in range(tokens)]
        self.stats.guessed_tokens += sum(others)
        return first + sum(others)
