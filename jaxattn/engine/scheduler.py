"""Which request runs in which row, with which pages and slot: all of it on the host.

Pages are allocated when a request is admitted, for its prompt and all the tokens it may generate. A
row that stops early has held pages that it did not need; in return an admitted row can always
finish, so nothing that was generated is ever lost, thrown away or computed again. A request that
the pool cannot hold now waits, and those behind it wait with it (first come, first served: a long
one does not starve). One that it can never hold is refused.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxattn.core.formats import PAGE_SIZE
from jaxattn.engine.pool import PagePool, SlotPool
from jaxattn.engine.request import Request
from jaxattn.memory.limits import Limits


@dataclasses.dataclass(eq=False)
class Row:
    """A request that has been given row `index` of the batch.

    Attributes:
        cached: how many of its tokens are in the cache and in the states.
        tokens: what was generated; the last one is not cached yet.
    """

    request: Request
    index: int
    slot: int
    pages: list[int]
    max_tokens: int
    cached: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def stop_tokens(self) -> Sequence[int]:
        stops: Any = self.request.stop_tokens
        return stops

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.request.prompt)


class Scheduler:
    """The waiting queue, the rows and the two pools.

    Attributes:
        rows: index -> row, in the order in which they were admitted.
        block_tables: int32 [B, M]; entries past a row's pages are leftovers, which no op reads.
    """

    def __init__(self, limits: Limits, vocab_size: int):
        self.limits, self.vocab_size = limits, vocab_size
        self.waiting: deque[Request] = deque()
        self.rows: dict[int, Row] = {}
        self.pages = PagePool(limits.pages, PAGE_SIZE)
        self.slots = SlotPool(limits.batch)
        self.block_tables = np.zeros((limits.batch, limits.table_width), np.int32)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def refusal(self, request: Request) -> str | None:
        """Why the request can never be served, or None."""
        prompt, longest = len(request.prompt), self.limits.max_model_len
        if prompt >= longest:
            return (
                f"the prompt has {prompt:,} tokens, which leaves none of the model length "
                f"{longest:,} to generate"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= self.vocab_size:
            return f"the prompt has a token outside of 0 to {self.vocab_size - 1:,}"
        new = self._max_tokens(request)
        needed = self.pages.pages_for(self._cached_tokens(request))
        if needed > self.pages.size:
            return (
                f"{prompt:,} prompt tokens and {new:,} to generate need {needed:,} pages of "
                f"{PAGE_SIZE} tokens, and the pool has {self.pages.size:,}"
            )
        return None

    def submit(self, request: Request) -> None:
        """Queues a request; it must not be one to refuse."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Moves waiting requests into free rows, as long as the first of them finds its pages."""
        while self.waiting and len(self.rows) < self.limits.batch:
            request = self.waiting[0]
            pages = self.pages.allocate(self._cached_tokens(request))
            if pages is None:
                return
            slot = self.slots.allocate()
            assert slot is not None, "there are as many slots as rows"
            index = min(set(range(self.limits.batch)) - self.rows.keys())
            self.waiting.popleft()
            self.rows[index] = Row(request, index, slot, pages, self._max_tokens(request))
            self.block_tables[index, : len(pages)] = pages

    def withdraw(self, id: int) -> Request | None:
        """Takes a waiting request out of the queue, by its id."""
        found = next((request for request in self.waiting if request.id == id), None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def next_prefill(self) -> Row | None:
        """The row whose next prompt chunk is due: the first admitted of those that are reading."""
        return next((row for row in self.rows.values() if row.prefilling), None)

    def next_decode(self) -> list[Row]:
        """The rows to decode now: all that have read their prompts, unless most are still reading.

        So a long prompt does not stop the others (its chunks alternate with decode steps), and an
        empty batch fills up before it decodes.
        """
        decoding = [row for row in self.rows.values() if not row.prefilling]
        return decoding if 2 * len(decoding) >= len(self.rows) else []

    def release(self, row: Row) -> None:
        """Frees the row, its pages and its slot for the next request."""
        del self.rows[row.index]
        self.pages.free(row.pages)
        self.slots.free(row.slot)

    def drop_rows(self) -> list[Row]:
        """Takes out all that runs. The pools are made anew: an interrupt may have come while a row
        was given its pages, or gave them back.
        """
        dropped = list(self.rows.values())
        self.rows.clear()
        self.pages = PagePool(self.limits.pages, PAGE_SIZE)
        self.slots = SlotPool(self.limits.batch)
        return dropped

    def clear(self) -> None:
        """Drops all that waits and runs."""
        self.waiting.clear()
        self.drop_rows()

    def _max_tokens(self, request: Request) -> int:
        return min(request.max_tokens, self.limits.max_model_len - len(request.prompt))

    def _cached_tokens(self, request: Request) -> int:
        """The most that the row will cache: the last token that it generates is never read."""
        return len(request.prompt) + self._max_tokens(request) - 1
