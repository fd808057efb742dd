"""The scheduler: it assigns rows, pages and state slots to requests, on the host alone.

Requests wait in the order of their priority, then of their arrival; one that finds no pages waits,
and those behind it wait with it, so that a long one does not starve. A request that the pool can
never hold is refused.

A row has pages for what it has read and is about to write, and gets more as it grows. A request
waits while the rows are expected to outgrow the pool with it (`admission`). Where the pool is empty
all the same, the youngest row gives its pages back and waits again, with the tokens that it has:
they are read as a prompt is when its turn comes, so nothing that was generated is lost. The oldest
row always goes on, so every request ends.

What a step needs to know of all rows at once (lengths, room, tokens left) is in NumPy arrays.
"""

import bisect
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxattn.engine.requests.request import Request
from jaxattn.engine.sampling.sampler import level_of
from jaxattn.engine.scheduling.admission import AnswerLengths, peak_growth
from jaxattn.engine.scheduling.batch_update import BatchUpdate, device_stops
from jaxattn.engine.scheduling.page_pool import PagePool, PoolView, SlotPool
from jaxattn.engine.scheduling.prefix_cache import (
    PendingInsert,
    PrefixCache,
    PrefixCacheStats,
    PrefixMatch,
)
from jaxattn.engine.scheduling.request_state import RunningRequest, WaitingRequest
from jaxattn.memory.engine_limits import Limits

# Rows that need a page within so many tokens get their pages together. So one call in 48 steps has
# a delta, however the rows are staggered.
AHEAD = 48


class Scheduler:
    """The waiting queue, the rows and the two pools.

    Attributes:
        waiting: in the order in which they are served.
        rows: index -> row, in the order in which they were admitted.
        block_tables: int32 [B, M]; entries past a row's pages are leftovers, which no op reads.
        deltas: what the device has to be told before its next step.
        cached: int32 [B], tokens of each row that are in the caches once all steps sent have run.
        room: int32 [B], tokens that its pages hold.
        left: int32 [B], tokens that it may still generate beside those of steps sent.
        last: int32 [B], where the last token stands that it may generate.
        decoding: bool [B], rows that have read their prompts.
        levels: int32 [B], how each samples.
        most: int32 [B], tokens that it may generate in all.
        known: int32 [B], those of them that it replays, and so generates at least.
        shared: int32 [B], of its pages, those that it shares with others, or did when they came.
        open: bool [B], rows that may end before they have generated `most`.
        answers: lengths of answers that ended so.
        changes: how often a row came, read its last chunk, or left: the set of those that decode
            is another then.
        preemptions: rows that lost their pages so far.
        prefixes: the cache of prompts' beginnings; None without one.
        prefix_counts: what it found, since the scheduler was made.
        copies: slots whose states go to others before the next step: (from, to).
        recurrent: whether rows have states, so that a prefix wants its own.
    """

    def __init__(self, limits: Limits, vocab_size: int, *, recurrent: bool = False):
        self.limits, self.vocab_size, self.recurrent = limits, vocab_size, recurrent
        self.prefixes: PrefixCache | None = None
        self.copies: list[tuple[int, int]] = []
        self.prefix_counts = PrefixCacheStats()
        self.waiting: list[WaitingRequest] = []
        self.rows: dict[int, RunningRequest] = {}
        self.deltas = BatchUpdate(limits.batch)
        self.block_tables = np.zeros((limits.batch, limits.table_width), np.int32)
        arrays = np.zeros((8, limits.batch), np.int32)
        self.cached, self.room, self.left, self.last, self.levels = arrays[:5]
        self.most, self.known, self.shared = arrays[5:]
        self.decoding, self.open = np.zeros((2, limits.batch), bool)
        self.answers = AnswerLengths()
        self.changes = self.preemptions = 0
        self._orders = itertools.count()
        # When a request last had to wait: itself, its group, `changes`, and the group's free pages.
        self._refused: tuple[WaitingRequest, int, int, int] | None = None
        self._new_pools()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    @property
    def reads(self) -> bool:
        """Whether a row has a part of its prompt to read. Requests that wait have no row."""
        return bool(np.count_nonzero(self.decoding) < len(self.rows))

    @property
    def pages(self) -> PagePool | PoolView:
        return self._pages[0] if len(self._pages) == 1 else PoolView(self._pages)

    @property
    def slots(self) -> SlotPool | PoolView:
        return self._slots[0] if len(self._slots) == 1 else PoolView(self._slots)

    def group_of(self, index: Any) -> Any:
        """The data group of a row, or of rows, by their indices."""
        return index // self.limits.rows_per_group

    def refusal(self, request: Request) -> str | None:
        """Why the request can never be served, or None."""
        prompt, longest = len(request.prompt), self.limits.max_model_len
        if prompt >= longest + (not request.max_tokens):
            return (
                f"the prompt has {prompt:,} tokens, which leaves none of the model length "
                f"{longest:,} to generate; a larger max_model_len raises it"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= self.vocab_size:
            return f"the prompt has a token outside of 0 to {self.vocab_size - 1:,}"
        biases: Any = request.logit_bias  # pairs, in the order of tokens
        if biases and biases[-1][0] >= self.vocab_size:
            return f"logit_bias has a token outside of 0 to {self.vocab_size - 1:,}"
        if request.replay and not self.limits.reproducible:
            return (
                f"it replays {len(request.replay):,} tokens, which engines of "
                "Limits(reproducible=True) do; give them as part of the prompt, or make such an "
                "engine"
            )
        if request.replay and prompt + len(request.replay) > longest:
            return (
                f"{prompt:,} prompt tokens and {len(request.replay):,} to replay are more than the "
                f"model length {longest:,}; a larger max_model_len raises it"
            )
        if request.replay and not 0 <= min(request.replay) <= max(request.replay) < self.vocab_size:
            return f"its replay has a token outside of 0 to {self.vocab_size - 1:,}"
        needed, pool = self._most_pages(request), self._pages[0]  # all groups have as many
        if needed > pool.size:
            new = self._max_tokens(request)
            return (
                f"{prompt:,} prompt tokens and {new:,} to generate need {needed:,} pages of "
                f"{self.limits.page_tokens} tokens, and the pool has {pool.size:,}; a larger "
                "num_pages or utilization raises it"
            )
        return None

    # --- waiting requests

    def submit(self, request: Request) -> None:
        """Queues a request; it must not be one to refuse."""
        self._queue(WaitingRequest(request, next(self._orders)))

    def withdraw(self, id: int) -> WaitingRequest | None:
        """Takes a waiting request out of the queue, by its id."""
        found = next((queued for queued in self.waiting if queued.request.id == id), None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def admit(self) -> None:
        """Moves waiting requests into free rows, as long as the first of them finds its pages."""
        while self.waiting and len(self.rows) < self.limits.batch:
            group = self._roomiest()
            queued = self.waiting[0]
            now = queued, group, self.changes, self._pages[group].available
            if now == self._refused:
                return
            request = queued.request
            prompt = request.prompt
            if queued.tokens and not self.limits.reproducible:
                prompt = [*prompt, *queued.tokens]
            last = len(request.prompt) + self._max_tokens(request) - 1
            entering, hit = self._found(queued, prompt)
            self._pages[group].share(hit.pages)  # before others are asked for, which may evict
            rest = min(len(prompt) + 1, last) - len(hit.pages) * self.limits.page_tokens
            fits = self._fits(group, queued, len(prompt), len(hit.pages), rest)
            pages = self._pages[group].allocate(rest) if fits else None
            if pages is None:
                self._pages[group].free(hit.pages)
                self._refused = now
                return
            slot = self._slots[group].allocate()
            assert slot is not None, "there are as many slots as rows"
            del self.waiting[0]
            row = self._place(queued, prompt, [*hit.pages, *pages], slot, group)
            row.prefix = entering
            if self.prefixes is not None and entering is not None:
                self._goes_on(row, hit)

    # --- rows

    def next_prompts(self, most: int) -> list[RunningRequest]:
        """Up to `most` rows whose next prompt chunk is due, at most as many of each data group.

        Those that were read of longest ago come first, so that a long prompt takes turns with
        others; of equals, the first in the order in which they are served.
        """
        if not self.reads:
            return []
        reading = (row for row in self.rows.values() if not self.decoding[row.index])
        turn = lambda row: (row.read_last, row.request.priority, row.order)  # noqa: E731
        found, taken = [], [0] * self.limits.groups
        for row in sorted(reading, key=turn):
            group = int(self.group_of(row.index))
            taken[group] += 1
            if taken[group] <= most // self.limits.groups:
                found.append(row)
        return found

    def readable(self, row: RunningRequest) -> int:
        """Tokens that the next step may read of the row's prompt: to the end of a block where
        states are kept behind blocks."""
        cached = int(self.cached[row.index])
        most = min(len(row.prompt) - cached, self.limits.chunks[-1])
        if self.prefixes is not None and self.recurrent:
            most = min(most, self.prefixes.block - cached % self.prefixes.block)
        return most

    def read(self, row: RunningRequest, tokens: int) -> bool:
        """Counts tokens that are read of the row's prompt. Returns whether those are all.

        Then the row joins those on the device, and is sampled after this step.
        """
        before = int(self.cached[row.index])
        self.cached[row.index] = before + tokens
        if self.prefixes is not None and row.prefix is not None:
            block = self.prefixes.block
            for end in range(before // block * block + block, before + tokens + 1, block):
                state = self.prefixes.enter(row.prefix, end, row.pages)
                if state is not None:
                    self.copies.append((row.slot, state))
        if self.cached[row.index] < len(row.prompt):
            return False
        replayed = len(row.prompt) + len(row.replay)
        self.deltas.join(row.index, row.slot, len(row.prompt) - 1, row.last, row.request, replayed)
        self.decoding[row.index] = True
        self.left[row.index] -= 1
        self.changes += 1
        return True

    def next_decode(self) -> np.ndarray:
        """Indices of the rows to decode now: all that have read their prompts and do not end."""
        return np.flatnonzero(self.decoding & (self.left > 0))

    def lines(
        self, indices: Sequence[int], buckets: Sequence[int]
    ) -> tuple[list[tuple[int, int]], int]:
        """((group, line in it) of each row in a step, the smallest bucket that holds them).

        A step has as many lines of each data group, one group's after another's.
        """
        taken, places = [0] * self.limits.groups, []
        for index in indices:
            group = int(self.group_of(index))
            places.append((group, taken[group]))
            taken[group] += 1
        bucket = next(size for size in buckets if size // self.limits.groups >= max(taken))
        return places, bucket

    def grow(self, places: np.ndarray, steps: int = 1) -> bool:
        """Gives these rows the pages of their next tokens, of so many decode steps; False, and
        nothing, if there are too few.

        Rows that need a page soon get it too, as long as one page per row is left.
        """
        cached, step = self.cached[places], steps * self.limits.step_tokens
        # Until its tokens are read, a row counts as if all that it guesses were right.
        written = np.minimum(cached + step, self.last[places] + self.limits.speculate)
        lacks = written > self.room[places]
        short = places[lacks]
        if not len(short):
            return True
        for group, pool in enumerate(self._pages):
            if np.count_nonzero(self.group_of(short) == group) > pool.available:
                self._short = group
                return False
        soon = places[(cached + AHEAD > self.room[places]) & ~lacks]
        for indices, kept in ((short.tolist(), 0), (soon.tolist(), len(places))):
            for index in indices:
                row = self.rows[index]
                pool = self._pages[self.group_of(index)]
                wanted = self.room[index] < row.last + self.limits.speculate
                if wanted and pool.available > kept:
                    self._give(row, pool.allocate(1))
        return True

    def steady(self, places: np.ndarray) -> int:
        """How many steps these rows can go on for as they are, if none comes or leaves: until one
        has a page to get, or no token to generate. A row that is not among them, since steps in
        flight may give it its last tokens, can be in the next."""
        if np.count_nonzero(self.decoding) > len(places):
            return 1
        room = self.room[places] - self.cached[places]
        return int(min(room.min(), self.left[places].min())) // self.limits.step_tokens

    def sent(self, moved: np.ndarray) -> None:
        """Counts what a call decodes: int32 [B] tokens of each row."""
        self.cached += moved
        self.left -= moved

    def guessed_wrong(self, row: RunningRequest, tokens: int) -> None:
        """Of a decode step that was counted, so many tokens of the row were none."""
        self.cached[row.index] -= tokens
        self.left[row.index] += tokens

    def preempt(self) -> None:
        """The youngest row of the group that `grow` found short gives its pages back and waits,
        with the tokens that it has.

        No step may be in flight: its tokens would be lost.
        """
        own = (row for row in self.rows.values() if self.group_of(row.index) == self._short)
        row = max(own, key=lambda row: (row.request.priority, row.order))
        self._requeue(row)
        self.preemptions += 1

    def preempt_all(self) -> None:
        """All rows wait again, with the tokens that they have. The caches are about to go: nothing
        is kept of what prompts left in them. No step may be in flight.
        """
        for row in list(self.rows.values()):
            self._requeue(row)
        self.deltas.clear()
        self._new_pools()

    def hold_back(self) -> list[WaitingRequest]:
        """Takes out the requests that have not begun; `put_back` queues them again."""
        held = [queued for queued in self.waiting if queued.admitted is None]
        self.waiting = [queued for queued in self.waiting if queued.admitted is not None]
        return held

    def put_back(self, held: Sequence[WaitingRequest]) -> None:
        for queued in held:
            self._queue(queued)

    def _requeue(self, row: RunningRequest) -> None:
        """The row gives its pages back, and its request waits."""
        self.release(row)
        again = WaitingRequest(
            row.request,
            row.order,
            row.tokens,
            row.logprobs,
            admitted=row.admitted,
            prompt_logprobs=row.prompt_logprobs,
            older_tokens=row.older_tokens,
        )
        self._queue(again)

    def release(self, row: RunningRequest) -> None:
        """Frees the row, its pages and its slot for the next request.

        A step in flight may still write to them, but no step is sent with the row again, and the
        device runs steps in order: the next owner's come after it.
        """
        row.ended = True
        self.changes += 1
        self.decoding[row.index] = False
        del self.rows[row.index]
        group = self.group_of(row.index)
        self._due[group] -= self._most_pages(row.request)
        self._pages[group].free(row.pages)
        self._slots[group].free(row.slot)

    def drop_rows(self) -> list[RunningRequest]:
        """Takes out all that runs. The pools are made anew: an interrupt may have come while a row
        was given its pages, or gave them back.
        """
        dropped = list(self.rows.values())
        self.changes += 1
        for row in dropped:
            row.ended = True
        self.rows.clear()
        self.decoding[:] = False
        self.deltas.clear()
        self._new_pools()
        return dropped

    def clear(self) -> None:
        """Drops all that waits and runs. What is cached stays where all rows have ended."""
        self.waiting.clear()
        if self.rows or self.pages.in_use or self.slots.in_use:
            self.drop_rows()

    def _new_pools(self) -> None:
        """Pools of which everything is free, and nothing cached in them."""
        limits, groups = self.limits, range(self.limits.groups)
        self._pages = [PagePool(limits.pages, limits.page_tokens) for _ in groups]
        self._slots = [SlotPool(limits.rows_per_group) for _ in groups]
        self._due = [0] * len(groups)  # pages that the rows of each have at full length
        self._refused = None
        self._short = 0
        self.copies.clear()
        checkpoints = range(limits.batch, limits.batch + limits.checkpoints)
        if limits.prefix_cache and limits.groups == 1 and (checkpoints or not self.recurrent):
            # States are behind what a step reads; and where bits are to be the same, a prompt is
            # cut into the same pieces whether its beginning is cached or not.
            whole = self.recurrent or limits.reproducible
            least = limits.chunks[-1] if whole else limits.line_tokens
            block = math.lcm(least, limits.page_tokens)
            [pages] = self._pages
            self.prefixes = PrefixCache(
                pages, block, checkpoints, self.prefix_counts, recurrent=self.recurrent
            )

    def _found(
        self, queued: WaitingRequest, prompt: Sequence[int]
    ) -> tuple[PendingInsert | None, PrefixMatch]:
        """What a prompt may enter in the cache of prefixes, and what is there of it."""
        if self.prefixes is None:
            return None, PrefixMatch()
        if queued.keys is None:
            queued.keys = self.prefixes.keys(prompt, queued.request.cache_salt)
        # What is told of each token of a prompt comes with reading it.
        told = queued.request.reads_all and not queued.tokens
        hit = PrefixMatch() if told else self.prefixes.find(queued.keys)
        return PendingInsert(queued.keys, hit), hit

    def _goes_on(self, row: RunningRequest, hit: PrefixMatch) -> None:
        """A row begins behind what was found of its prompt."""
        assert self.prefixes is not None
        self.prefixes.used(hit, len(row.prompt))
        row.cached_tokens = len(hit.pages) * self.limits.page_tokens
        self.cached[row.index] = row.cached_tokens
        if hit.pages:  # which the rows that begin alike no longer have to themselves
            rows = list(self.rows)
            alike = self.block_tables[rows, : len(hit.pages)] == hit.pages
            alike = np.cumprod(alike, axis=1).sum(1)
            whole = self.room[rows] // self.limits.page_tokens
            self.shared[rows] = np.maximum(self.shared[rows], np.minimum(alike, whole))
        if hit.entries and (state := hit.entries[-1].slot) is not None and self.recurrent:
            self.copies.append((state, row.slot))

    def _fits(self, group: int, queued: WaitingRequest, prompt: int, hit: int, rest: int) -> bool:
        """Whether the group's rows are expected to end without outgrowing the pool beside one more,
        of whose `prompt` tokens `hit` pages are cached and `rest` tokens need pages."""
        pool, limits, request = self._pages[group], self.limits, queued.request
        if self._due[group] + self._most_pages(request) <= pool.size:
            return True
        rows = np.fromiter((row for row in self.rows if self.group_of(row) == group), np.int32)
        if not len(rows):  # whoever runs by itself fits: others are refused
            return True
        now = pool.pages_for(rest)
        read = prompt - len(request.prompt)  # of what it has generated; others are decoded again
        known = max(len(queued.tokens), len(request.replay))
        most = np.append(self.most[rows], self._max_tokens(request))
        generated = np.append(self.most[rows] - self.left[rows], read)
        said = np.maximum(generated, np.append(self.known[rows], known))
        left, open_ = most - said, np.append(self.open[rows], request.may_stop)
        pages = np.append(self.room[rows] // limits.page_tokens, hit + now)
        growth = peak_growth(
            np.append(self.last[rows] - self.left[rows] + 1, prompt) + limits.speculate,
            said - generated + np.where(open_, self.answers.expected(said, left), left),
            pages,
            pages - np.append(self.shared[rows], hit),
            limits.page_tokens,
        )
        return now + growth <= pool.available

    def _roomiest(self) -> int:
        """The data group with the most free pages of those with a free row."""
        free = [group for group, slots in enumerate(self._slots) if slots.available]
        return max(free, key=lambda group: self._pages[group].available)

    def _queue(self, queued: WaitingRequest) -> None:
        bisect.insort(self.waiting, queued, key=lambda each: each.turn)

    def _place(
        self, queued: WaitingRequest, prompt: Sequence[int], pages: list[int], slot: int, group: int
    ) -> RunningRequest:
        """A row of its own for a request, with no pages yet but those given."""
        request, silent, replay = queued.request, 0, queued.request.replay
        if self.limits.reproducible:
            silent = len(queued.tokens)
            replay = (*queued.tokens, *replay[silent:])
        late_stops = len(device_stops(request)) < len(request.stops)
        count = self.limits.rows_per_group
        index = next(i for i in range(group * count, (group + 1) * count) if i not in self.rows)
        row = self.rows[index] = RunningRequest(
            request,
            index,
            slot,
            [],
            self._max_tokens(request),
            queued.order,
            prompt,
            level_of(request),
            queued.tokens,
            queued.logprobs,
            plain=not (late_stops or request.watched or silent),
            late_stops=late_stops,
            admitted=time.perf_counter() if queued.admitted is None else queued.admitted,
            prompt_logprobs=queued.prompt_logprobs,
            older_tokens=queued.older_tokens,
            replay=replay,
            silent=silent,
        )
        self.cached[index] = self.room[index] = self.shared[index] = 0
        self.most[index], self.known[index] = row.max_tokens, len(replay)
        self.open[index] = request.may_stop
        self.left[index] = row.max_tokens + len(request.prompt) - len(prompt)
        self.last[index] = row.last
        self.levels[index] = row.level
        self._due[group] += self._most_pages(request)
        self._give(row, pages)
        return row

    def _give(self, row: RunningRequest, pages: list[int] | None) -> None:
        """More pages for a row, on the host and, with the next deltas, on the device."""
        assert pages is not None, "whoever calls this has looked"
        first = len(row.pages)
        row.pages += pages
        self.room[row.index] = len(row.pages) * self.limits.page_tokens
        self.block_tables[row.index, first : first + len(pages)] = pages
        self.deltas.pages(row.index, first, pages)

    def _most_pages(self, request: Request) -> int:
        """At full length. The last token is never read; a draft behind it may be."""
        tokens = len(request.prompt) + self._max_tokens(request) - 1
        return self._pages[0].pages_for(tokens + self.limits.speculate)

    def _max_tokens(self, request: Request) -> int:
        """At least one is sampled, which a request for none is not told of."""
        return max(min(request.max_tokens, self.limits.max_model_len - len(request.prompt)), 1)
