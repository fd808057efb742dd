"""Pools of cache pages and state slots: the host's record of their owners.

The device holds the pools themselves (`kv_cache[:, page]`, `ssm_state[:, slot]`); here are only the
numbers. A freed page or slot is given out again as it is: a row reads no token that it did not
write, and a row's first chunk starts from zero states, so nothing has to be cleared.
"""

import collections
from collections.abc import Callable, Iterable, Sequence


class PoolError(ValueError):
    """A page or slot was freed that is not in use: two rows would have come to share it."""


class _FreeListPool:
    """The free ones of `size` numbers, last freed first."""

    def __init__(self, size: int, what: str):
        if size < 1:
            raise ValueError(f"a pool needs at least one {what}; got {size}")
        self.size = size
        self._what = what
        self._free = list(range(size))[::-1]
        self._in_use: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return len(self._in_use)

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._in_use.update(taken)
        return taken

    def _give_back(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        if len(set(numbers)) < len(numbers) or not self._in_use.issuperset(numbers):
            raise PoolError(
                f"cannot free {self._what}s {numbers}: each must be in use and named once; in use "
                f"are {sorted(self._in_use)}"
            )
        self._in_use.difference_update(numbers)
        self._released(numbers)

    def _released(self, numbers: list[int]) -> None:
        self._free.extend(reversed(numbers))


class PagePool(_FreeListPool):
    """Pages of `page_size` tokens; a page holds those tokens of every layer.

    Several rows may share a page that they only read. A page that a cache keeps is idle when no
    row has it: it is available, and its cache lets go of it when it is wanted.

    Attributes:
        evict: makes a cache let go of idle pages; whether it did.
    """

    def __init__(self, num_pages: int, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1; got {page_size}")
        super().__init__(num_pages, "page")
        self.page_size = page_size
        self.evict: Callable[[], bool] = lambda: False
        self._more: collections.Counter[int] = collections.Counter()  # rows beside the first
        self._kept: set[int] = set()
        self._idle: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` tokens of one row fill."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> list[int] | None:
        """Pages for `tokens` tokens of one row, in order; None (and none taken) if too few."""
        count = self.pages_for(tokens)
        if count > self.available:
            return None
        while count > len(self._free) and self.evict():
            pass
        return self._take(count)

    def share(self, pages: Iterable[int]) -> None:
        """Gives pages that a cache keeps to one more row."""
        for page in pages:
            if page in self._idle:
                self._idle.remove(page)
                self._in_use.add(page)
            else:
                self._more[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Takes a row's pages back; those that others have stay theirs.

        Raises:
            PoolError: one of them is not in use; nothing is freed then.
        """
        pages = list(pages)
        shared = {page for page in pages if self._more[page] > 0}
        self._give_back(page for page in pages if page not in shared)
        self._more.subtract(shared)

    def keep(self, pages: Iterable[int]) -> None:
        """A cache keeps these pages of a row: they are idle when nobody has them."""
        self._kept.update(pages)

    def idle(self, pages: Iterable[int]) -> bool:
        """Whether no row has any of these."""
        return self._idle.issuperset(pages)

    def drop(self, pages: Iterable[int]) -> None:
        """The cache keeps these idle pages no longer."""
        pages = list(pages)
        self._kept.difference_update(pages)
        self._idle.difference_update(pages)
        self._free.extend(reversed(pages))

    def _released(self, numbers: list[int]) -> None:
        kept = [page for page in numbers if page in self._kept]
        self._idle.update(kept)
        super()._released([page for page in numbers if page not in self._kept])


class SlotPool(_FreeListPool):
    """State slots: a row has one, for its convolution and recurrent states in every layer."""

    def __init__(self, num_slots: int):
        super().__init__(num_slots, "slot")

    def allocate(self) -> int | None:
        """A slot, or None if all are in use."""
        taken = self._take(1)
        return taken[0] if taken else None

    def free(self, slot: int) -> None:
        """Takes a row's slot back.

        Raises:
            PoolError: it is not in use.
        """
        self._give_back([slot])


class PoolView:
    """The pools of several groups, to look at: a row has pages of one of them."""

    def __init__(self, pools: Sequence[PagePool] | Sequence[SlotPool]):
        self._pools = pools

    @property
    def size(self) -> int:
        """Of all of them."""
        return sum(pool.size for pool in self._pools)

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self._pools)

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self._pools)
