"""One round after another: steps are sent before the ones before them are read.

    deltas    rows that came, pages that they need
    prefill   a chunk of a prompt, or of several; the first token of those that end with it
    decode    a token of each row that has read its prompt
    read      what the round before told, and first tokens of this one

So the device has its next steps while the host looks at tokens. What a row's tokens decide (stop
tokens, the limit) the device sees by itself; stop strings and aborts reach it one step late, and
what that step told of the row is dropped.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from jaxattn.engine.batches import Chunk, packed_chunks
from jaxattn.engine.endings import Endings
from jaxattn.engine.grammar import masks
from jaxattn.engine.row import Row
from jaxattn.engine.runner import Runner
from jaxattn.engine.sampling import Level
from jaxattn.engine.scheduler import Scheduler
from jaxattn.engine.stats import Stats
from jaxattn.engine.steps import EntryPoint, prompts_together, sampled_rows

# Rounds that are sent and not read when the next one is sent.
ROUNDS_AHEAD = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """What a step in flight will tell.

    Attributes:
        told: of `advance`, or logits that nobody samples.
        rows: those that it is about, by their line; None is padding.
        decodes: whether it is a decode step.
    """

    told: jax.Array
    rows: Sequence[Row | None]
    decodes: bool


class Loop:
    """Rounds over a scheduler's rows.

    Args:
        endings: takes tokens, and ends rows.
        runner: sends the steps.

    Attributes:
        stats: what it counts in.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, endings: Endings):
        self.scheduler, self.runner, self.endings = scheduler, runner, endings
        self._flights: deque[list[Flight]] = deque()
        self._round = 0
        self._running: tuple[np.ndarray, np.ndarray, list[Row | None], bool] | None = None
        self._read_at = time.perf_counter()

    @property
    def stats(self) -> Stats:
        return self.endings.stats

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)

    def round(self) -> None:
        """Sends the next steps, then reads those of the round before."""
        if not self._flights:
            self._read_at = time.perf_counter()
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
        while len(self._flights) > ROUNDS_AHEAD:
            self._read_round()
        self._read_first_tokens()
        if not self.scheduler.rows:
            self.drain()  # what is left tells of nobody

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
        buckets = prompts_together(limits)
        rows = self.scheduler.next_prompts(buckets[-1])
        self._round += 1
        if not rows:
            return
        waiting = [len(row.prompt) - int(self.scheduler.cached[row.index]) for row in rows]
        size = next((c for c in limits.chunks if c >= max(waiting)), limits.chunks[-1])
        places, together = self.scheduler.lines([row.index for row in rows], buckets)
        entry = EntryPoint("prefill", together, size)
        self._send_copies()  # states of prefixes, to the rows that begin with them
        done = np.full(sampled_rows(limits, together), -1, np.int32)
        read, sampled = together // limits.groups, len(done) // limits.groups
        chunks: list[Chunk | None] = [None] * together
        ended: list[Row | None] = [None] * len(done)
        for (group, line), row in zip(places, rows, strict=True):
            chunk = chunks[group * read + line] = self._next_chunk(row, size)
            row.read_last = self._round
            self.stats.prompt_tokens += len(chunk.tokens)
            if self.scheduler.read(row, len(chunk.tokens)):
                at = group * sampled + line
                done[at], ended[at] = row.index, row
        self._send_deltas()
        packed = packed_chunks(entry.rows, entry.tokens, limits.table_width, chunks)
        remember = any(chunk.place >= 0 for chunk in chunks if chunk)
        told = self.runner.prefill(entry, packed, remember=remember)
        self._send_copies()  # those behind what was read now, to their checkpoints
        if found := [row for row in ended if row is not None]:
            level = max(row.level for row in found)
            told = self.runner.first(told, done, level, self._masks(ended, len(done)))
        self.stats.prefill_steps += 1
        self._flights[-1].append(Flight(told, ended, decodes=False))

    def _next_chunk(self, row: Row, size: int) -> Chunk:
        cached = int(self.scheduler.cached[row.index])
        tokens = row.prompt[cached : cached + size]
        place = row.index if row.request.penalized else -1
        pages = self.scheduler.block_tables[row.index]
        return Chunk(tokens, cached + len(tokens), row.slot, place, pages)

    def _decode(self) -> None:
        places = self._grown()
        self._send_deltas()
        if not len(places):
            return
        if self._running is None or not np.array_equal(self._running[0], places):
            lines = self._lines(places)
            running = [self.scheduler.rows.get(index) for index in lines.tolist()]
            grammars = any(row is not None and row.request.grammar for row in running)
            self._running = places, lines, running, grammars
        _, lines, rows, grammars = self._running
        level = Level(int(self.scheduler.levels[places].max()))
        words = functools.partial(self._masks_after_all, rows) if grammars else None
        self.scheduler.sent(places)
        told = self.runner.decode(lines, level, words)
        self.stats.decode_steps += 1
        self._flights[-1].append(Flight(told, rows, decodes=True))

    def _masks_after_all(self, rows: Sequence[Row | None], lines: int) -> np.ndarray:
        """The masks of rows behind all tokens so far: what is in flight is read first."""
        self.drain()
        self._flights.append([])
        self._running = None  # a row may have ended
        return masks(rows, lines, self.scheduler.vocab_size)

    def _masks(self, rows: Sequence[Row | None], lines: int) -> np.ndarray | None:
        """The masks of rows that have no token in flight; None if none has a grammar."""
        if not any(row is not None and row.request.grammar for row in rows):
            return None
        return masks(rows, lines, self.scheduler.vocab_size)

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
                self._running = None
            places = self.scheduler.next_decode()
        return places

    def _send_deltas(self) -> None:
        if self.scheduler.deltas:
            self._running = None  # another row may have come to where one was
            for packed in self.scheduler.deltas.drain():
                self.runner.update(packed)

    def _send_copies(self) -> None:
        for source, target in self.scheduler.copies:
            self.runner.copy(source, target)
        self.scheduler.copies.clear()

    # --- reading

    def _read_round(self) -> None:
        for flight in self._flights.popleft():
            self._read(flight)

    def _read_first_tokens(self) -> None:
        """Reads the prefill step of this round if it gave first tokens: nobody waits for the decode
        step that was sent behind it, which keeps the device busy meanwhile.
        """
        if self._flights and self._flights[-1]:
            flight = self._flights[-1][0]
            if not flight.decodes and any(row is not None for row in flight.rows):
                del self._flights[-1][0]
                self._read(flight)

    def _read(self, flight: Flight) -> None:
        """Waits for a step. Steps end in the order in which they were sent, so the time since the
        one before it is its own.
        """
        before = time.perf_counter()
        flight.told.block_until_ready()
        now = time.perf_counter()
        self.stats.waited_seconds += now - before
        spent, self._read_at = now - self._read_at, now
        if not flight.decodes:
            self.stats.prefill_seconds += spent
        if any(row is not None for row in flight.rows):
            told = np.array(flight.told)  # a view would keep the array
            taken = self.endings.take(flight.rows, told)
            self.stats.decoded_tokens += taken if flight.decodes else 0
