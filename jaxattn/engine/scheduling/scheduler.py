"""The scheduler, which assigns rows, pages and state slots to requests, only on the host.

Requests wait in the order of their priority, then of their arrival. If the first one finds no
pages, those after it wait too, so that a long request does not starve. The scheduler refuses a
request that the pool can never hold.

A row has pages for what it has read and is about to write, and gets more as it grows. A request
waits if the rows together with it are expected to outgrow the pool (`admission`). If the pool still
runs empty, the scheduler preempts the youngest row, which returns to the queue with its tokens.
Prefill reads them as a prompt when its turn comes, so no generated token is lost. The oldest row
always continues, so every request ends.

NumPy arrays hold the numbers that a step needs for all rows at once (lengths, room, tokens left).
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
from jaxattn.limits import Limits

# Rows that need a page within this many tokens get it together with rows that need one now. So only
# one call in 48 steps sends an update, however the rows are staggered.
AHEAD = 48


class Scheduler:
    """The waiting queue, the rows and the two pools.

    Attributes:
        waiting: The waiting requests, in the order in which they are served.
        rows: The rows by index, in the order of their admission.
        block_tables: int32 [B, M]. No op reads the entries after a row's last page.
        deltas: The updates that the device needs before its next step.
        cached: int32 [B], the tokens of each row in the caches once all steps in flight have run.
        page_capacity: int32 [B], the tokens that each row's pages hold.
        num_remaining: int32 [B], the tokens that each row may generate after the steps in flight.
        last: int32 [B], the position of the last token that each row may generate.
        decoding: bool [B], whether each row has read its prompt.
        levels: int32 [B], the sampling mode of each row.
        max_tokens: int32 [B], the maximum number of tokens that each row generates.
        num_known: int32 [B], the number of these that the row replays, and so surely generates.
        num_shared_pages: int32 [B], the number of each row's pages that other rows share or once
            shared.
        may_stop: bool [B], whether each row may end before it has generated `max_tokens` tokens.
        answers: The lengths of answers that could end before their `max_tokens` tokens.
        changes: How often a row finished its prompt or left. While the count is the same, so is the
            set of rows that have read their prompts.
        preemptions: The number of preemptions so far.
        prefixes: The prefix cache; None if the engine has none.
        prefix_counts: The counts of the prefix cache since the scheduler was created.
        copies: The states to copy before the next step, as slots (from, to).
        recurrent: Whether rows have recurrent states, so that a prefix hit needs them.
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
        self.cached, self.page_capacity, self.num_remaining, self.last, self.levels = arrays[:5]
        self.max_tokens, self.num_known, self.num_shared_pages = arrays[5:]
        self.decoding, self.may_stop = np.zeros((2, limits.batch), bool)
        self.answers = AnswerLengths()
        self.changes = self.preemptions = 0
        self._orders = itertools.count()
        # The last request that had to wait, its group, `changes`, and the group's free pages.
        self._refused: tuple[WaitingRequest, int, int, int] | None = None
        self._new_pools()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    @property
    def reads(self) -> bool:
        """Whether a row has a part of its prompt to read. Waiting requests have no row."""
        return bool(np.count_nonzero(self.decoding) < len(self.rows))

    @property
    def pages(self) -> PagePool | PoolView:
        return self._pages[0] if len(self._pages) == 1 else PoolView(self._pages)

    @property
    def slots(self) -> SlotPool | PoolView:
        return self._slots[0] if len(self._slots) == 1 else PoolView(self._slots)

    def group_of(self, index: Any) -> Any:
        """Returns the data group of a row index, or of an array of them."""
        return index // self.limits.rows_per_group

    def refusal(self, request: Request) -> str | None:
        """Returns why the engine can never serve the request, or None if it can."""
        prompt, longest = len(request.prompt), self.limits.max_model_len
        if prompt >= longest + (not request.max_tokens):
            return (
                f"the prompt has {prompt:,} tokens, which leaves none of the model length "
                f"{longest:,} to generate; increase max_model_len"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= self.vocab_size:
            return f"the prompt has a token outside of 0 to {self.vocab_size - 1:,}"
        biases: Any = request.logit_bias  # pairs, in the order of tokens
        if biases and biases[-1][0] >= self.vocab_size:
            return f"logit_bias has a token outside of 0 to {self.vocab_size - 1:,}"
        if request.replay and not self.limits.reproducible:
            return (
                f"the request replays {len(request.replay):,} tokens, which needs an engine with "
                "Limits(reproducible=True); create such an engine, or give the tokens as part of "
                "the prompt"
            )
        if request.replay and prompt + len(request.replay) > longest:
            return (
                f"{prompt:,} prompt tokens and {len(request.replay):,} to replay exceed the model "
                f"length {longest:,}; increase max_model_len"
            )
        if request.replay and not 0 <= min(request.replay) <= max(request.replay) < self.vocab_size:
            return f"replay has a token outside of 0 to {self.vocab_size - 1:,}"
        needed, pool = self._most_pages(request), self._pages[0]  # all groups have as many
        if needed > pool.size:
            new = self._max_tokens(request)
            return (
                f"{prompt:,} prompt tokens and {new:,} to generate need {needed:,} pages of "
                f"{self.limits.page_tokens} tokens, but the pool has {pool.size:,}; increase "
                "num_pages or utilization"
            )
        return None

    # --- waiting requests

    def submit(self, request: Request) -> None:
        """Queues a request, for which `refusal` must be None."""
        self._queue(WaitingRequest(request, next(self._orders)))

    def remove_waiting(self, id: int) -> WaitingRequest | None:
        """Removes a waiting request from the queue by its id, and returns it; None if not found."""
        found = next((queued for queued in self.waiting if queued.request.id == id), None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def admit(self) -> None:
        """Moves waiting requests into free rows until the first one in the queue finds no pages."""
        while self.waiting and len(self.rows) < self.limits.batch:
            group = self._find_emptiest_group()
            queued = self.waiting[0]
            attempt = queued, group, self.changes, self._pages[group].available
            if attempt == self._refused:
                return
            request = queued.request
            prompt = request.prompt
            if queued.tokens and not self.limits.reproducible:
                prompt = [*prompt, *queued.tokens]
            last = len(request.prompt) + self._max_tokens(request) - 1
            pending_insert, hit = self._match_prefix(queued, prompt)
            self._pages[group].share(hit.pages)  # before `allocate`, which may evict them
            rest = min(len(prompt) + 1, last) - len(hit.pages) * self.limits.page_tokens
            fits = self._fits(group, queued, len(prompt), len(hit.pages), rest)
            pages = self._pages[group].allocate(rest) if fits else None
            if pages is None:
                self._pages[group].free(hit.pages)
                self._refused = attempt
                return
            slot = self._slots[group].allocate()
            assert slot is not None, "there are as many slots as rows"
            del self.waiting[0]
            row = self._place(queued, prompt, [*hit.pages, *pages], slot, group)
            row.prefix = pending_insert
            if self.prefixes is not None and pending_insert is not None:
                self._resume_after_prefix(row, hit)

    # --- rows

    def next_prompts(self, max_prompts: int) -> list[RunningRequest]:
        """Returns up to `max_prompts` rows that read their prompts, equally many of each data
        group.

        The row that was read longest ago comes first, so that long prompts take turns with others.
        Ties go to the row that is served first.
        """
        if not self.reads:
            return []
        reading = (row for row in self.rows.values() if not self.decoding[row.index])
        turn = lambda row: (row.last_read_round, row.request.priority, row.order)  # noqa: E731
        found, taken = [], [0] * self.limits.groups
        for row in sorted(reading, key=turn):
            group = int(self.group_of(row.index))
            taken[group] += 1
            if taken[group] <= max_prompts // self.limits.groups:
                found.append(row)
        return found

    def readable(self, row: RunningRequest) -> int:
        """Returns how many prompt tokens the next step may read of the row. With recurrent states
        and a prefix cache, a step reads at most to the end of a block, where states are kept."""
        cached = int(self.cached[row.index])
        most = min(len(row.prompt) - cached, self.limits.chunks[-1])
        if self.prefixes is not None and self.recurrent:
            most = min(most, self.prefixes.block - cached % self.prefixes.block)
        return most

    def read(self, row: RunningRequest, tokens: int) -> bool:
        """Records that a step reads prompt tokens of the row. Returns whether these are the last.

        If they are, the row joins the rows on the device, which sample it after this step.
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
        self.num_remaining[row.index] -= 1
        self.changes += 1
        return True

    def next_decode(self) -> np.ndarray:
        """Returns the indices of the rows to decode: those with a read prompt and tokens left."""
        return np.flatnonzero(self.decoding & (self.num_remaining > 0))

    def lines(
        self, indices: Sequence[int], buckets: Sequence[int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Returns ((group, line in the group) of each row, the smallest bucket that holds them).

        A step has equally many lines for each data group, one group after another.
        """
        taken, places = [0] * self.limits.groups, []
        for index in indices:
            group = int(self.group_of(index))
            places.append((group, taken[group]))
            taken[group] += 1
        bucket = next(size for size in buckets if size // self.limits.groups >= max(taken))
        return places, bucket

    def grow(self, row_indices: np.ndarray, steps: int = 1) -> bool:
        """Gives these rows the pages for their next tokens, for `steps` decode steps. Returns False
        and allocates nothing if there are too few pages.

        Rows that need a page soon also get one, while one page per row is left.
        """
        cached, step = self.cached[row_indices], steps * self.limits.step_tokens
        # Until the host has read its tokens, a row counts as if all of its drafts were accepted.
        written = np.minimum(cached + step, self.last[row_indices] + self.limits.speculate)
        lacks = written > self.page_capacity[row_indices]
        short = row_indices[lacks]
        if not len(short):
            return True
        for group, pool in enumerate(self._pages):
            if np.count_nonzero(self.group_of(short) == group) > pool.available:
                self._short = group
                return False
        soon = row_indices[(cached + AHEAD > self.page_capacity[row_indices]) & ~lacks]
        for indices, kept in ((short.tolist(), 0), (soon.tolist(), len(row_indices))):
            for index in indices:
                row = self.rows[index]
                pool = self._pages[self.group_of(index)]
                wanted = self.page_capacity[index] < row.last + self.limits.speculate
                if wanted and pool.available > kept:
                    self._add_pages(row, pool.allocate(1))
        return True

    def steady(self, row_indices: np.ndarray) -> int:
        """Returns how many steps these rows can run unchanged if none joins or leaves: until one
        needs a page or has no token left. The result is 1 while another row decodes too: its last
        tokens may be in flight, and it may be in the next step."""
        if np.count_nonzero(self.decoding) > len(row_indices):
            return 1
        room = self.page_capacity[row_indices] - self.cached[row_indices]
        return (
            int(min(room.min(), self.num_remaining[row_indices].min())) // self.limits.step_tokens
        )

    def sent(self, num_new_tokens: np.ndarray) -> None:
        """Records the tokens of a call that was sent: int32 [B], per row."""
        self.cached += num_new_tokens
        self.num_remaining -= num_new_tokens

    def rollback_drafts(self, row: RunningRequest, tokens: int) -> None:
        """Takes back the tokens of a step that turned out to be rejected drafts."""
        self.cached[row.index] -= tokens
        self.num_remaining[row.index] += tokens

    def preempt(self) -> None:
        """Preempts the youngest row of the group that `grow` found short, which keeps its tokens.

        No step may be in flight, because its tokens would be lost.
        """
        own = (row for row in self.rows.values() if self.group_of(row.index) == self._short)
        row = max(own, key=lambda row: (row.request.priority, row.order))
        self._requeue(row)
        self.preemptions += 1

    def preempt_all(self) -> None:
        """Preempts all rows, which keep their tokens, and drops the prefix cache, because its
        contents are about to become invalid. No step may be in flight.
        """
        for row in list(self.rows.values()):
            self._requeue(row)
        self.deltas.clear()
        self._new_pools()

    def remove_unstarted(self) -> list[WaitingRequest]:
        """Removes the requests that have not begun; `requeue_unstarted` queues them again."""
        held = [queued for queued in self.waiting if queued.admission_time is None]
        self.waiting = [queued for queued in self.waiting if queued.admission_time is not None]
        return held

    def requeue_unstarted(self, unstarted: Sequence[WaitingRequest]) -> None:
        for queued in unstarted:
            self._queue(queued)

    def _requeue(self, row: RunningRequest) -> None:
        """Frees the row and returns its request to the queue."""
        self.release(row)
        again = WaitingRequest(
            row.request,
            row.order,
            row.tokens,
            row.logprobs,
            admission_time=row.admission_time,
            prompt_logprobs=row.prompt_logprobs,
            older_tokens=row.older_tokens,
        )
        self._queue(again)

    def release(self, row: RunningRequest) -> None:
        """Frees the row, its pages and its slot for the next request.

        A step in flight may still write to them, but the engine sends no later step with the row.
        The device runs steps in order, so the next owner writes after it.
        """
        row.ended = True
        self.changes += 1
        self.decoding[row.index] = False
        del self.rows[row.index]
        group = self.group_of(row.index)
        self._reserved[group] -= self._most_pages(row.request)
        self._pages[group].free(row.pages)
        self._slots[group].free(row.slot)

    def drop_rows(self) -> list[RunningRequest]:
        """Removes all rows and returns them. It creates new pools, because an interrupt may have
        come while a row received or returned pages.
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
        """Drops all requests. The prefix cache stays if all rows have ended."""
        self.waiting.clear()
        if self.rows or self.pages.in_use or self.slots.in_use:
            self.drop_rows()

    def _new_pools(self) -> None:
        """Creates pools in which everything is free, and an empty prefix cache."""
        limits, groups = self.limits, range(self.limits.groups)
        self._pages = [PagePool(limits.pages, limits.page_tokens) for _ in groups]
        self._slots = [SlotPool(limits.rows_per_group) for _ in groups]
        self._reserved = [0] * len(groups)  # pages that the rows of each group have at full length
        self._refused = None
        self._short = 0
        self.copies.clear()
        checkpoints = range(limits.batch, limits.batch + limits.checkpoints)
        if limits.prefix_cache and limits.groups == 1 and (checkpoints or not self.recurrent):
            # States exist only after the tokens that a step reads. In exact mode a prompt must be
            # cut into the same pieces whether its beginning is cached or not.
            whole = self.recurrent or limits.reproducible
            least = limits.chunks[-1] if whole else limits.line_tokens
            block = math.lcm(least, limits.page_tokens)
            [pages] = self._pages
            self.prefixes = PrefixCache(
                pages, block, checkpoints, self.prefix_counts, recurrent=self.recurrent
            )

    def _match_prefix(
        self, queued: WaitingRequest, prompt: Sequence[int]
    ) -> tuple[PendingInsert | None, PrefixMatch]:
        """Returns (the blocks that the prompt may store in the prefix cache, its hit)."""
        if self.prefixes is None:
            return None, PrefixMatch()
        if queued.keys is None:
            queued.keys = self.prefixes.keys(prompt, queued.request.cache_salt)
        # Log-probabilities and pooling need the engine to read every token of the prompt.
        told = queued.request.reads_all and not queued.tokens
        hit = PrefixMatch() if told else self.prefixes.find(queued.keys)
        return PendingInsert(queued.keys, hit), hit

    def _resume_after_prefix(self, row: RunningRequest, hit: PrefixMatch) -> None:
        """Starts a row after the cached part of its prompt."""
        assert self.prefixes is not None
        self.prefixes.used(hit, len(row.prompt))
        row.cached_tokens = len(hit.pages) * self.limits.page_tokens
        self.cached[row.index] = row.cached_tokens
        if hit.pages:  # rows with the same beginning now share these pages
            rows = list(self.rows)
            alike = self.block_tables[rows, : len(hit.pages)] == hit.pages
            alike = np.cumprod(alike, axis=1).sum(1)
            whole = self.page_capacity[rows] // self.limits.page_tokens
            self.num_shared_pages[rows] = np.maximum(
                self.num_shared_pages[rows], np.minimum(alike, whole)
            )
        if hit.entries and (state := hit.entries[-1].slot) is not None and self.recurrent:
            self.copies.append((state, row.slot))

    def _fits(
        self, group: int, queued: WaitingRequest, prompt: int, hit: int, num_uncached: int
    ) -> bool:
        """Whether the group's rows and one more are expected to end without outgrowing the pool. Of
        its `prompt` tokens, `hit` pages are cached and `num_uncached` tokens need pages."""
        pool, limits, request = self._pages[group], self.limits, queued.request
        if self._reserved[group] + self._most_pages(request) <= pool.size:
            return True
        rows = np.fromiter((row for row in self.rows if self.group_of(row) == group), np.int32)
        if not len(rows):  # a request always fits by itself, or it was refused
            return True
        num_new_pages = pool.pages_for(num_uncached)
        read = prompt - len(request.prompt)  # generated tokens that prefill reads; others replay
        known = max(len(queued.tokens), len(request.replay))
        most = np.append(self.max_tokens[rows], self._max_tokens(request))
        generated = np.append(self.max_tokens[rows] - self.num_remaining[rows], read)
        said = np.maximum(generated, np.append(self.num_known[rows], known))
        left, open_ = most - said, np.append(self.may_stop[rows], request.may_stop)
        pages = np.append(self.page_capacity[rows] // limits.page_tokens, hit + num_new_pages)
        growth = peak_growth(
            np.append(self.last[rows] - self.num_remaining[rows] + 1, prompt) + limits.speculate,
            said - generated + np.where(open_, self.answers.expected(said, left), left),
            pages,
            pages - np.append(self.num_shared_pages[rows], hit),
            limits.page_tokens,
        )
        return num_new_pages + growth <= pool.available

    def _find_emptiest_group(self) -> int:
        """The data group with the most free pages, among those with a free row."""
        free = [group for group, slots in enumerate(self._slots) if slots.available]
        return max(free, key=lambda group: self._pages[group].available)

    def _queue(self, queued: WaitingRequest) -> None:
        bisect.insort(self.waiting, queued, key=lambda each: each.turn)

    def _place(
        self, queued: WaitingRequest, prompt: Sequence[int], pages: list[int], slot: int, group: int
    ) -> RunningRequest:
        """Creates the row of a request in a free place of the group, with the given pages."""
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
            admission_time=time.perf_counter()
            if queued.admission_time is None
            else queued.admission_time,
            prompt_logprobs=queued.prompt_logprobs,
            older_tokens=queued.older_tokens,
            replay=replay,
            num_silent=silent,
        )
        self.cached[index] = self.page_capacity[index] = self.num_shared_pages[index] = 0
        self.max_tokens[index], self.num_known[index] = row.max_tokens, len(replay)
        self.may_stop[index] = request.may_stop
        self.num_remaining[index] = row.max_tokens + len(request.prompt) - len(prompt)
        self.last[index] = row.last
        self.levels[index] = row.level
        self._reserved[group] += self._most_pages(request)
        self._add_pages(row, pages)
        return row

    def _add_pages(self, row: RunningRequest, pages: list[int] | None) -> None:
        """Gives a row more pages, on the host and, with the next update, on the device."""
        assert pages is not None, "the caller has checked that pages are free"
        first = len(row.pages)
        row.pages += pages
        self.page_capacity[row.index] = len(row.pages) * self.limits.page_tokens
        self.block_tables[row.index, first : first + len(pages)] = pages
        self.deltas.pages(row.index, first, pages)

    def _most_pages(self, request: Request) -> int:
        """Pages at full length. The cache never holds the last token, but may hold a draft."""
        tokens = len(request.prompt) + self._max_tokens(request) - 1
        return self._pages[0].pages_for(tokens + self.limits.speculate)

    def _max_tokens(self, request: Request) -> int:
        """The tokens to sample, at least one; with `max_tokens` 0 it is not returned."""
        return max(min(request.max_tokens, self.limits.max_model_len - len(request.prompt)), 1)
