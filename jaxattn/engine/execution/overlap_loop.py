"""The overlapped loop of rounds: it sends steps before it reads the results of earlier ones.

    deltas    sends new rows, and the pages that rows need
    prefill   reads pieces of prompts, and gives a token to each row that has read its prompt: the
              first one if the prompt ends in this step, else the next one
    decode    if no prompt is left to read, gives a token to each row; several if steps are short
              and no request needs the host after each (`Limits.steps_per_round`)
    read      processes the results of one earlier round, or the first tokens of this one; if more
              are due, the next calls read them before anything is sent

If rows must not depend on each other (`Limits.mixes` is False), prompts and rows use separate steps
of the same round.

So the device has its next steps while the host processes tokens. The device itself ends rows at
stop tokens and at their length limit. A stop string reaches the device one step late, and an abort
up to two rounds late; the host drops the row's tokens of these steps.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxattn.engine.execution.model_runner import ModelRunner
from jaxattn.engine.execution.output_processor import OutputProcessor
from jaxattn.engine.execution.prompt_scores import PromptScores
from jaxattn.engine.execution.step_output_reader import (
    DecodeBatchPlan,
    InFlightStep,
    StepOutputReader,
)
from jaxattn.engine.requests.stats import GenerationStats
from jaxattn.engine.sampling.grammar_bitmask import fill_bitmask
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.scheduling.chunked_prefill import prompt_pieces
from jaxattn.engine.scheduling.draft_switch import DraftSwitch
from jaxattn.engine.scheduling.request_state import RunningRequest
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.steps.model_steps import round_of
from jaxattn.engine.steps.prefill_batch import PromptChunk, PromptLayout
from jaxattn.engine.steps.score_step import ScoreStep
from jaxattn.engine.steps.step_catalog import prefill_step
from jaxattn.engine.steps.step_interface import sampled_rows

# Rounds that are sent but not read while the host waits for a token. With two, the device has a
# whole step to run when a token arrives, so the host's wake-up costs no device time. A row whose
# end only the host can see (a stop string) wastes one token per round in flight, so with such a row
# the loop keeps one. A round of several steps is long enough by itself, and so is a step of
# LONG_STEP seconds: a new prompt waits for all steps in flight.
ROUNDS_AHEAD = 2
LONG_STEP = 4e-3


class OverlapLoop:
    """Runs rounds over the rows of a scheduler.

    Args:
        endings: The processor that receives tokens and ends rows.
        runner: The runner that sends the steps.

    Attributes:
        stats: The statistics to which the loop adds.
        switch: The switch that turns the model's draft head on and off.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, endings: OutputProcessor):
        self.scheduler, self.runner, self.endings = scheduler, runner, endings
        self._rounds_in_flight: deque[list[InFlightStep]] = deque()
        self._round = 0
        self._running: DecodeBatchPlan | None = None
        self._steady = 0  # steps that the decoding rows can run before anything changes
        self.switch = DraftSwitch()
        self._reader = StepOutputReader(scheduler, endings, self.switch)

    @property
    def stats(self) -> GenerationStats:
        return self.endings.stats

    @property
    def in_flight(self) -> bool:
        return bool(self._rounds_in_flight)

    def round(self) -> None:
        """Sends the next steps, then reads the oldest results that are due.

        If an earlier call has left results that are due, this call only reads the next of them. So
        the tokens of a step are passed on before the host waits for a later step.
        """
        if self._read_due():
            return
        if not self._rounds_in_flight:
            self._reader.begin()
        seal = self.runner.seal
        counts = seal.counts_next
        if counts:
            self._settle()
        with seal.watch():
            self._rounds_in_flight.append([])
            self.scheduler.admit()
            self._send_steps()
            if counts or seal.strict:
                self.runner.check()
            if counts:
                self._settle()
                self._rounds_in_flight.append([])
        if self._rounds_in_flight[-1]:
            self._read_due()
        else:
            self._rounds_in_flight.pop()
            if self._rounds_in_flight:
                self._read_round()
        if not self.scheduler.rows:
            self.drain()  # the results that are left belong to no row

    @property
    def _max_unread_rounds(self) -> int:
        """How many rounds may stay unread. It is one while the engine reads prompts, because these
        steps are long, and a new request waits for all that are in flight."""
        running = self._running
        if self._rounds_in_flight and any(
            step.prompt_tokens for step in self._rounds_in_flight[-1]
        ):
            return 1
        short = running is None or (running.plain and running.max_steps == 1)
        return ROUNDS_AHEAD if short and self._reader.step_seconds < LONG_STEP else 1

    def drain(self) -> None:
        """Reads all steps in flight."""
        while self._rounds_in_flight:
            self._read_round()

    def finish(self) -> None:
        """Reads all steps in flight; an error of the device marks the runner's state as lost."""
        try:
            self.drain()
        except jax.errors.JaxRuntimeError:
            self.runner.failed = True
            raise

    def drop(self) -> None:
        """Drops all steps in flight."""
        self._rounds_in_flight.clear()
        self._running = None
        self.runner.forget()

    def _settle(self) -> None:
        """Leaves only the state and the rows on the device, so that arrays can be counted."""
        self.drain()
        self.runner.forget()

    # --- sending

    def _send_steps(self) -> None:
        """Sends the steps of a round."""
        if not self.scheduler.reads:
            self._decode(*self._next_running())
        elif not self.scheduler.limits.mixes:
            self._read_prompts(None)
            self._decode(*self._next_running())
        else:
            running, _ = self._next_running()
            if not self._read_prompts(running):  # the rows that read were preempted
                self._decode(running, 1)
            elif not self.scheduler.reads:
                # The device runs this step while the host processes first tokens.
                self._decode(*self._next_running())

    def _read_prompts(self, running: DecodeBatchPlan | None) -> bool:
        """Sends a step that reads pieces of prompts and decodes the running rows. Returns False if
        there are no prompts to read."""
        scheduler, limits = self.scheduler, self.scheduler.limits
        rows = scheduler.next_prompts(limits.prompt_rows * limits.groups)
        self._round += 1
        if not rows:
            return False
        size, pieces = self._pieces(rows, running)
        layout, entry = PromptLayout.of(limits, size), prefill_step(limits, size)
        row_indices = np.full(limits.batch, -1, np.int32)
        decoding: list[RunningRequest | None] = [None] * limits.batch
        num_lines = self._place_running(running, row_indices, decoding)
        self._send_copies()  # cached prefix states, to the rows that begin with them
        sources = np.full(limits.batch, -1, np.int32)
        finishing_rows: list[RunningRequest | None] = [None] * limits.batch
        chunks: list[list[PromptChunk]] = [[] for _ in pieces]
        scores = PromptScores(layout, ScoreStep.of(limits), scheduler.vocab_size)
        for row, tokens in self._assign_tokens(rows, pieces):
            group = int(scheduler.group_of(row.index))
            if row.last_read_round < 0 and self._has_history(row):  # its cached tokens
                self._write_history(row, row.prompt[: row.cached_tokens], 0)
            chunk = self._next_chunk(row, tokens)
            scores.add(row, group, chunks[group], chunk)
            chunks[group].append(chunk)
            row.last_read_round = self._round
            if scheduler.read(row, tokens):
                if row.replay:
                    self._write_history(row, row.replay, len(row.prompt))
                at = group * limits.rows_per_group + num_lines[group]
                num_lines[group] += 1
                row_indices[at], finishing_rows[at], sources[at] = (
                    row.index,
                    row,
                    len(chunks[group]) - 1,
                )
        self._send_deltas()
        packed = layout.pack(chunks, row_indices, sources)
        outputs, scores.results = self.runner.prefill(
            entry, packed, score_targets=scores.wanted, pooled=scores.ranges
        )
        if any(chunk.history_row >= 0 for group in chunks for chunk in group):
            self.runner.remember(entry.tokens, packed)
        self._send_copies()  # states after the tokens read now, to their checkpoint slots
        if (row_indices >= 0).any():
            outputs = self._first_tokens(outputs, row_indices, decoding, finishing_rows)
        read = sum(map(sum, pieces))
        self.stats.prompt_tokens += read
        self.stats.prefill_steps += 1
        if running is not None:
            self.stats.decode_steps += 1
            moved = np.zeros_like(scheduler.cached)
            moved[running.row_indices] = 1
            scheduler.sent(moved)
        flight = InFlightStep(
            outputs,
            decoding,
            running,
            finishing_rows=finishing_rows,
            prompt_tokens=read,
            scores=scores,
        )
        self._rounds_in_flight[-1].append(flight)
        return True

    def _first_tokens(
        self,
        logits: jax.Array,
        row_indices: np.ndarray,
        decoding: Sequence[RunningRequest | None],
        finishing_rows: Sequence[RunningRequest | None],
    ) -> jax.Array:
        """Samples the decoding rows of a step with prompts, and those that finish their prompt."""
        rows = [one or other for one, other in zip(decoding, finishing_rows, strict=True)]
        level = max(row.level for row in rows if row is not None)
        words = None
        if any(row is not None and row.request.grammar for row in rows):
            if any(row is not None and row.request.grammar for row in decoding):
                self.drain()  # a grammar needs the row's tokens in flight
                self._rounds_in_flight.append([])
            words = fill_bitmask(rows, len(rows), self.scheduler.vocab_size)
        return self.runner.first(logits, row_indices, level, words)

    def _pieces(
        self, rows: Sequence[RunningRequest], running: DecodeBatchPlan | None
    ) -> tuple[int, list[list[int]]]:
        """Returns (the next prefill step's size, the tokens of each row by data group)."""
        scheduler, limits = self.scheduler, self.scheduler.limits
        waiting: list[list[int]] = [[] for _ in range(limits.groups)]
        for row in rows:
            waiting[int(scheduler.group_of(row.index))].append(scheduler.readable(row))
        sizes = limits.prefill_sizes if running is None else limits.mixed_sizes
        bounds: Any = dict(line=limits.line_tokens, rows=limits.prompt_rows)
        return prompt_pieces(sizes, waiting, **bounds, whole_prompts=limits.reproducible)

    def _assign_tokens(
        self, rows: Sequence[RunningRequest], pieces: Sequence[Sequence[int]]
    ) -> list[tuple[RunningRequest, int]]:
        """Returns the rows from which the step reads, with the number of tokens of each."""
        left = [iter(group) for group in pieces]
        found = ((row, next(left[int(self.scheduler.group_of(row.index))], 0)) for row in rows)
        return [(row, tokens) for row, tokens in found if tokens]

    def _place_running(
        self,
        running: DecodeBatchPlan | None,
        row_indices: np.ndarray,
        decoding: list[RunningRequest | None],
    ) -> list[int]:
        """Gives the decoding rows the first lines of logits of their data group. Returns the
        number of these lines per group."""
        scheduler, limits = self.scheduler, self.scheduler.limits
        taken = [0] * limits.groups
        if running is not None:
            for index in running.row_indices.tolist():
                group = int(scheduler.group_of(index))
                at = group * limits.rows_per_group + taken[group]
                taken[group] += 1
                row_indices[at], decoding[at] = index, scheduler.rows.get(index)
        return taken

    def _has_history(self, row: RunningRequest) -> bool:
        """Whether penalties count the row's tokens, or prompt lookup searches them."""
        limits = self.scheduler.limits
        looked_up = limits.speculate and not limits.uses_draft_head
        return bool(row.request.penalized or looked_up)

    def _write_history(self, row: RunningRequest, tokens: Sequence[int], begin: int) -> None:
        """Writes tokens that no prefill step reads into a row's history, from position `begin`."""
        limits = self.scheduler.limits
        size = limits.prefill_sizes[-1]
        layout, pages = PromptLayout.of(limits, size), self.scheduler.block_tables[row.index]
        most = limits.chunks[-1]
        for first in range(0, len(tokens), most):
            own = tokens[first : first + most]
            chunk = PromptChunk(own, begin + first + len(own), row.slot, row.index, pages)
            chunks: list[list[PromptChunk]] = [[] for _ in range(limits.groups)]
            chunks[int(self.scheduler.group_of(row.index))].append(chunk)
            self.runner.remember(size, layout.pack(chunks))

    def _next_chunk(self, row: RunningRequest, count: int) -> PromptChunk:
        cached = int(self.scheduler.cached[row.index])
        tokens = row.prompt[cached : cached + count]
        place = row.index if self._has_history(row) else -1
        pages = self.scheduler.block_tables[row.index]
        length = cached + len(tokens)
        following = row.prompt[length] if length < len(row.prompt) else -1
        return PromptChunk(tokens, length, row.slot, place, pages, following)

    def _decode(self, running: DecodeBatchPlan | None, steps: int) -> None:
        self._send_deltas()
        if running is None:
            return
        limits, make_bitmask = self.scheduler.limits, None
        if running.grammars:
            make_bitmask = functools.partial(self._masks_after_all, running.rows)
        moved, drafts = running.num_new_tokens, running.drafts
        if drafts and limits.uses_draft_head:
            drafts = self.switch.choose(sampled_rows(limits, len(running.lines)))
            moved = moved if drafts else np.minimum(moved, 1)
        if steps > 1:  # a row gets no more tokens than it may generate
            moved = np.minimum(moved * steps, self.scheduler.num_remaining)
        self.scheduler.sent(moved)
        told = self.runner.decode(running.lines, running.level, make_bitmask, steps, drafts)
        self.stats.decode_steps += steps
        self._rounds_in_flight[-1].append(InFlightStep(told, running.rows, running, steps))

    def _next_running(self) -> tuple[DecodeBatchPlan | None, int]:
        """Returns (the rows to decode, the number of steps), with pages for their next tokens.
        The rows are None if none decodes."""
        scheduler, plan = self.scheduler, self._running
        if plan and plan.changes == scheduler.changes:
            steps = self._steps(plan)
            if self._steady >= steps:
                self._steady -= steps
                return plan, steps
        row_indices = self._grow_rows()
        if not len(row_indices):
            self._running = None
            return None, 1
        if (
            plan is None
            or plan.changes != scheduler.changes
            or not np.array_equal(plan.row_indices, row_indices)
        ):
            plan = self._running = self._found(row_indices)
        steps = self._steps(plan)
        # A call of several steps always runs them all, which is too long for the last few tokens.
        if steps > 1 and (
            4 * scheduler.num_remaining[row_indices].max() <= steps
            or not scheduler.grow(row_indices, steps)
        ):
            steps = 1
        self._steady = scheduler.steady(row_indices) - steps
        return plan, steps

    def _steps(self, running: DecodeBatchPlan) -> int:
        """The number of steps of the next call. A row that ends within a call leaves its place
        empty until the call is over, so if requests wait for places, such a call has one step."""
        scheduler = self.scheduler
        if scheduler.reads:
            return 1
        if (
            scheduler.waiting
            and scheduler.num_remaining[running.row_indices].min() < running.max_steps
        ):
            return 1
        return running.max_steps

    def _found(self, row_indices: np.ndarray) -> DecodeBatchPlan:
        scheduler, lines = self.scheduler, self._lines(row_indices)
        rows = [scheduler.rows.get(index) for index in lines.tolist()]
        active_rows = [row for row in rows if row is not None]
        level = SamplingMode(int(scheduler.levels[row_indices].max()))
        grammars = any(row.request.grammar for row in active_rows)
        limits, plain = (
            scheduler.limits,
            len(active_rows) == len(row_indices) and all(r.plain for r in active_rows),
        )
        alone = not grammars and round_of(limits, limits.batch, level) is not None
        moved = np.zeros_like(scheduler.cached)
        moved[row_indices] = limits.step_tokens if alone else 1
        drafts = bool(alone and limits.speculate)
        return DecodeBatchPlan(
            lines=lines,
            row_indices=row_indices,
            num_new_tokens=moved,
            max_steps=limits.round_steps if alone and plain else 1,
            drafts=drafts,
            rows=rows,
            requests=[row.request for row in active_rows],
            token_lists=[row.tokens for row in active_rows],
            level=level,
            grammars=grammars,
            active_lines=np.flatnonzero(lines >= 0),
            plain=plain,
            changes=scheduler.changes,
        )

    def _masks_after_all(self, rows: Sequence[RunningRequest | None], lines: int) -> np.ndarray:
        """Returns the masks after all tokens so far, for which it reads the steps in flight."""
        self.drain()
        self._rounds_in_flight.append([])
        return fill_bitmask(rows, lines, self.scheduler.vocab_size)

    def _lines(self, places: np.ndarray) -> np.ndarray:
        """Returns the rows as the lines of a step, grouped by data group; -1 is padding."""
        limits = self.scheduler.limits
        if limits.groups == 1:
            return places
        found, bucket = self.scheduler.lines(places.tolist(), limits.batches)
        lines = np.full(bucket, -1, np.int32)
        for (group, line), index in zip(found, places.tolist(), strict=True):
            lines[group * (bucket // limits.groups) + line] = index
        return lines

    def _grow_rows(self) -> np.ndarray:
        """Returns the rows to decode, with pages for their next token. If the pool is empty, it
        first reads the steps in flight, since rows may have ended; so preemption loses no token.
        """
        places = self.scheduler.next_decode()
        while not self.scheduler.grow(places):
            if any(self._rounds_in_flight):
                self.drain()
                self._rounds_in_flight.append([])
            else:
                self.scheduler.preempt()
                self.stats.preemptions += 1
            places = self.scheduler.next_decode()
        return places

    def _send_deltas(self) -> None:
        if self.scheduler.deltas:
            for packed in self.scheduler.deltas.drain():
                self.runner.update(packed)

    def _send_copies(self) -> None:
        for source, target in self.scheduler.copies:
            self.runner.copy(source, target)
        self.scheduler.copies.clear()

    # --- reading

    def _read_round(self) -> None:
        for flight in self._rounds_in_flight.popleft():
            self._reader.read(flight)

    def _read_due(self) -> bool:
        """Reads the oldest results that are due, and returns whether there are any.

        They are due if too many rounds are unread, and if a step that gave first tokens is followed
        by another one, which keeps the device busy.
        """
        rounds = self._rounds_in_flight
        if len(rounds) > self._max_unread_rounds:
            self._read_round()
            return True
        gave = [number for number, sent in enumerate(rounds) if any(map(_gives_first, sent))]
        if not gave or (gave[-1] == len(rounds) - 1 and len(rounds[-1]) == 1):
            return False
        if len(rounds) > 1:
            self._read_round()
        else:
            self._reader.read(rounds[0].pop(0))
        return True


def _gives_first(step: InFlightStep) -> bool:
    """Whether rows get their first tokens from this step."""
    return any(row is not None for row in step.finishing_rows)
