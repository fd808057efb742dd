"""One round after another: steps are sent before the ones before them are read.

    deltas    rows that came, pages that they need
    prefill   a chunk of a prompt, or of several; the first token of those that end with it
    decode    a token of each row that has read its prompt; several where steps are short and
              nobody waits for fewer (`Limits.steps_per_round`)
    read      what the round before told, and first tokens of this one

So the device has its next steps while the host looks at tokens. What a row's tokens decide (stop
tokens, the limit) the device sees by itself. Stop strings reach it one step late, aborts up to two
rounds, and what those told of the row is dropped.
"""

import functools
from collections import deque
from collections.abc import Sequence

import numpy as np

from jaxattn.engine.execution.model_runner import ModelRunner
from jaxattn.engine.execution.output_processor import OutputProcessor
from jaxattn.engine.execution.output_reader import DecodeBatchPlan, InFlightStep, OutputReader
from jaxattn.engine.execution.prompt_scores import PromptScores
from jaxattn.engine.requests.stats import GenerationStats
from jaxattn.engine.sampling.grammar_bitmask import fill_bitmask
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.scheduling.prefill_shape import prefill_shape
from jaxattn.engine.scheduling.request_state import RunningRequest
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.steps.engine_step import sampled_rows
from jaxattn.engine.steps.model_steps import ModelStep, round_of
from jaxattn.engine.steps.prefill_batch import PromptChunk, packed_chunks
from jaxattn.engine.steps.step_catalog import prefill_row_counts

# Rounds that are sent and not read while the host waits for a token. With two the device has a
# whole step to run when a token arrives, so waking up costs it nothing. A row whose end only the
# host can see (a stop string) wastes a token for each, so beside such a row there is one. One of
# several steps is long enough alone.
ROUNDS_AHEAD = 2


class OverlapLoop:
    """Rounds over a scheduler's rows.

    Args:
        endings: takes tokens, and ends rows.
        runner: sends the steps.

    Attributes:
        stats: what it counts in.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, endings: OutputProcessor):
        self.scheduler, self.runner, self.endings = scheduler, runner, endings
        self._flights: deque[list[InFlightStep]] = deque()
        self._round = 0
        self._running: DecodeBatchPlan | None = None
        self._steady = 0  # steps that the rows which decode can still go on for as they are
        self._together = prefill_row_counts(scheduler.limits)
        self._reader = OutputReader(scheduler, endings)

    @property
    def stats(self) -> GenerationStats:
        return self.endings.stats

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)

    def round(self) -> None:
        """Sends the next steps, then reads those of the round before."""
        if not self._flights:
            self._reader.begin()
        seal = self.runner.seal
        counts = seal.counts_next
        if counts:
            self._settle()
        with seal.watch():
            self._flights.append([])
            self.scheduler.admit()
            self._read_prompts()
            self._decode()
            if counts or seal.strict:
                self.runner.check()
            if counts:
                self._settle()
                self._flights.append([])
        if not self._flights[-1]:
            self._flights.pop()
            self.drain()
        while len(self._flights) > self._ahead:
            self._read_round()
        self._read_first_tokens()
        if not self.scheduler.rows:
            self.drain()  # what is left tells of nobody

    @property
    def _ahead(self) -> int:
        """How many rounds may stay unread."""
        running = self._running
        return ROUNDS_AHEAD if running is None or (running.plain and running.most == 1) else 1

    def drain(self) -> None:
        """Reads all that is in flight."""
        while self._flights:
            self._read_round()

    def drop(self) -> None:
        """Forgets what is in flight."""
        self._flights.clear()
        self._running = None
        self.runner.forget()

    def _settle(self) -> None:
        """Leaves no array on the device beside state and rows, so that they can be counted."""
        self.drain()
        self.runner.forget()

    # --- sending

    def _read_prompts(self) -> None:
        limits = self.scheduler.limits
        rows = self.scheduler.next_prompts(self._together[-1])
        self._round += 1
        if not rows:
            return
        together, size = self._prefill_shape(rows)
        if together < self._together[-1]:
            rows = self.scheduler.next_prompts(together)
        places, _ = self.scheduler.lines([row.index for row in rows], (together,))
        entry = ModelStep("prefill", together, size)
        self._send_copies()  # states of prefixes, to the rows that begin with them
        done = np.full(sampled_rows(limits, together), -1, np.int32)
        read, sampled = together // limits.groups, len(done) // limits.groups
        chunks: list[PromptChunk | None] = [None] * together
        ended: list[RunningRequest | None] = [None] * len(done)
        scores = PromptScores(entry)
        for (group, line), row in zip(places, rows, strict=True):
            if row.read_last < 0 and self._has_history(row):
                self._remember_cached(row)
            chunk = chunks[group * read + line] = self._next_chunk(row, size)
            scores.add(row, group * read + line, chunk)
            row.read_last = self._round
            self.stats.prompt_tokens += len(chunk.tokens)
            if self.scheduler.read(row, len(chunk.tokens)):
                at = group * sampled + line
                done[at], ended[at] = row.index, row
        self._send_deltas()
        packed = packed_chunks(entry.rows, entry.tokens, limits.table_width, chunks)
        remember = any(chunk.place >= 0 for chunk in chunks if chunk)
        told, scores.told = self.runner.prefill(
            entry, packed, remember=remember, wanted=scores.wanted, pooled=scores.ranges
        )
        self._send_copies()  # those behind what was read now, to their checkpoints
        if found := [row for row in ended if row is not None]:
            level = max(row.level for row in found)
            told = self.runner.first(told, done, level, self._masks(ended, len(done)))
        self.stats.prefill_steps += 1
        self._flights[-1].append(InFlightStep(told, ended, scores=scores))

    def _prefill_shape(self, rows: Sequence[RunningRequest]) -> tuple[int, int]:
        """(lines, tokens of each) of the step that reads of these rows next."""
        limits, cached = self.scheduler.limits, self.scheduler.cached
        waiting: list[list[int]] = [[] for _ in range(limits.groups)]
        for row in rows:
            left = len(row.prompt) - int(cached[row.index])
            waiting[int(self.scheduler.group_of(row.index))].append(left)
        return prefill_shape(limits.prefill_shapes, waiting)

    def _has_history(self, row: RunningRequest) -> bool:
        """Whether penalties count the row's tokens, or drafts are looked up among them."""
        return bool(row.request.penalized or self.scheduler.limits.speculate)

    def _remember_cached(self, row: RunningRequest) -> None:
        """Writes what a row does not read of its prompt into its history."""
        limits = self.scheduler.limits
        entry = ModelStep("prefill", self._together[0], limits.chunks[-1])
        pages = self.scheduler.block_tables[row.index]
        for first in range(0, row.cached_tokens, entry.tokens):
            end = min(first + entry.tokens, row.cached_tokens)
            chunk = PromptChunk(row.prompt[first:end], end, row.slot, row.index, pages)
            packed = packed_chunks(entry.rows, entry.tokens, limits.table_width, [chunk])
            self.runner.remember(entry, packed)

    def _next_chunk(self, row: RunningRequest, size: int) -> PromptChunk:
        cached = int(self.scheduler.cached[row.index])
        tokens = row.prompt[cached : cached + size]
        place = row.index if self._has_history(row) else -1
        pages = self.scheduler.block_tables[row.index]
        return PromptChunk(tokens, cached + len(tokens), row.slot, place, pages)

    def _decode(self) -> None:
        running, steps = self._next_running()
        self._send_deltas()
        if running is None:
            return
        words = None
        if running.grammars:
            words = functools.partial(self._masks_after_all, running.rows)
        moved = running.moved
        if steps > 1:  # a row gets no more than it may generate
            moved = np.minimum(moved * steps, self.scheduler.left)
        self.scheduler.sent(moved)
        told = self.runner.decode(running.lines, running.level, words, steps)
        self.stats.decode_steps += steps
        self._flights[-1].append(InFlightStep(told, running.rows, running, steps))

    def _next_running(self) -> tuple[DecodeBatchPlan | None, int]:
        """(the rows to decode, how many steps), with the pages of their next tokens; None if there
        are no rows."""
        scheduler, known = self.scheduler, self._running
        if known and known.changes == scheduler.changes:
            steps = self._steps(known)
            if self._steady >= steps:
                self._steady -= steps
                return known, steps
        places = self._grown()
        if not len(places):
            self._running = None
            return None, 1
        if (
            known is None
            or known.changes != scheduler.changes
            or not np.array_equal(known.places, places)
        ):
            known = self._running = self._found(places)
        steps = self._steps(known)
        # A call of several steps takes as long as a few of one: for the last tokens it is too much.
        if steps > 1 and (
            4 * scheduler.left[places].max() <= steps or not scheduler.grow(places, steps)
        ):
            steps = 1
        self._steady = scheduler.steady(places) - steps
        return known, steps

    def _steps(self, running: DecodeBatchPlan) -> int:
        """The steps of the next call. A row that ends within it leaves its place empty until it is
        over: where requests wait for places, such a call has one step."""
        scheduler = self.scheduler
        if scheduler.reads:
            return 1
        if scheduler.waiting and scheduler.left[running.places].min() < running.most:
            return 1
        return running.most

    def _found(self, places: np.ndarray) -> DecodeBatchPlan:
        scheduler, lines = self.scheduler, self._lines(places)
        rows = [scheduler.rows.get(index) for index in lines.tolist()]
        there = [row for row in rows if row is not None]
        level = SamplingMode(int(scheduler.levels[places].max()))
        grammars = any(row.request.grammar for row in there)
        limits, plain = scheduler.limits, len(there) == len(places) and all(r.plain for r in there)
        alone = not grammars and round_of(limits, limits.batch, level) is not None
        moved = np.zeros_like(scheduler.cached)
        moved[places] = limits.step_tokens if alone else 1
        return DecodeBatchPlan(
            lines=lines,
            places=places,
            moved=moved,
            most=limits.round_steps if alone and plain else 1,
            rows=rows,
            requests=[row.request for row in there],
            texts=[row.tokens for row in there],
            level=level,
            grammars=grammars,
            kept=np.flatnonzero(lines >= 0),
            plain=plain,
            changes=scheduler.changes,
        )

    def _masks_after_all(self, rows: Sequence[RunningRequest | None], lines: int) -> np.ndarray:
        """The masks of rows behind all tokens so far: what is in flight is read first."""
        self.drain()
        self._flights.append([])
        return fill_bitmask(rows, lines, self.scheduler.vocab_size)

    def _masks(self, rows: Sequence[RunningRequest | None], lines: int) -> np.ndarray | None:
        """The masks of rows that have no token in flight; None if none has a grammar."""
        if not any(row is not None and row.request.grammar for row in rows):
            return None
        return fill_bitmask(rows, lines, self.scheduler.vocab_size)

    def _lines(self, places: np.ndarray) -> np.ndarray:
        """The rows as the lines of a step, those of each data group together; -1 is padding."""
        limits = self.scheduler.limits
        if limits.groups == 1:
            return places
        found, bucket = self.scheduler.lines(places.tolist(), limits.batches)
        lines = np.full(bucket, -1, np.int32)
        for (group, line), index in zip(found, places.tolist(), strict=True):
            lines[group * (bucket // limits.groups) + line] = index
        return lines

    def _grown(self) -> np.ndarray:
        """The rows to decode, with the pages of their next token. Where the pool is empty, what
        is in flight is read first: rows may have ended, and the one that goes loses no token.
        """
        places = self.scheduler.next_decode()
        while not self.scheduler.grow(places):
            if any(self._flights):
                self.drain()
                self._flights.append([])
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
        for flight in self._flights.popleft():
            self._reader.read(flight)

    def _read_first_tokens(self) -> None:
        """Reads the prefill step of this round if it gave first tokens: nobody waits for the decode
        step that was sent behind it, which keeps the device busy meanwhile.
        """
        if self._flights and self._flights[-1]:
            flight = self._flights[-1][0]
            if flight.running is None and any(row is not None for row in flight.rows):
                while len(self._flights) > 1:
                    self._read_round()
                del self._flights[-1][0]
                self._reader.read(flight)
