"""Pools of cache pages and state slots: the host's record of which are in use.

The device holds the memory (`kv_cache[:, page]`, `ssm_state[:, slot]`); the pools hold only the
numbers. A freed page or slot is reused without clearing it, because a row reads only tokens that it
wrote, and a row's first chunk starts from zero states.
"""

import collections
from collections.abc import Callable, Iterable, Sequence


class PoolError(ValueError):
    """A page or slot was freed that is not in use, so two rows would have shared it."""


class _FreeListPool:
    """A pool of `size` numbers that gives out the last freed one first."""

    def __init__(self, size: int, item_name: str):
        if size < 1:
            raise ValueError(f"a pool needs at least one {item_name}; got {size}")
        self.size = size
        self._item_name = item_name
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

    def _release_pages(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        if len(set(numbers)) < len(numbers) or not self._in_use.issuperset(numbers):
            raise PoolError(
                f"cannot free {self._item_name}s {numbers}: each must be in use and listed once; "
                f"those in use are {sorted(self._in_use)}"
            )
        self._in_use.difference_update(numbers)
        self._released(numbers)

    def _released(self, numbers: list[int]) -> None:
        self._free.extend(reversed(numbers))


class PagePool(_FreeListPool):
    """Pages of `page_size` tokens; a page holds these tokens for every layer.

    Several rows may share a page that they only read. A page in the prefix cache is idle while no
    row uses it: it counts as available, and the cache evicts it when a row needs a page.

    Attributes:
        evict: A function that makes the cache free an entry's idle pages. It returns False if
            there are none.
    """

    def __init__(self, num_pages: int, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1; got {page_size}")
        super().__init__(num_pages, "page")
        self.page_size = page_size
        self.evict: Callable[[], bool] = lambda: False
        self._extra_users: collections.Counter[int] = collections.Counter()  # users after the first
        self._cached_pages: set[int] = set()
        self._idle: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages for `tokens` tokens of one row."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> list[int] | None:
        """Returns pages for `tokens` tokens of one row, in order, or None if there are too few."""
        count = self.pages_for(tokens)
        if count > self.available:
            return None
        while count > len(self._free) and self.evict():
            pass
        return self._take(count)

    def share(self, pages: Iterable[int]) -> None:
        """Adds one more row as a user of cached pages."""
        for page in pages:
            if page in self._idle:
                self._idle.remove(page)
                self._in_use.add(page)
            else:
                self._extra_users[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Takes a row's pages back. Pages that other rows share stay in use.

        Raises:
            PoolError: A page is not in use. The pool then frees none of them.
        """
        pages = list(pages)
        shared = {page for page in pages if self._extra_users[page] > 0}
        self._release_pages(page for page in pages if page not in shared)
        self._extra_users.subtract(shared)

    def keep(self, pages: Iterable[int]) -> None:
        """Marks pages of a row as cached, so that they become idle when no row uses them."""
        self._cached_pages.update(pages)

    def idle(self, pages: Iterable[int]) -> bool:
        """Whether no row uses any of these pages."""
        return self._idle.issuperset(pages)

    def drop(self, pages: Iterable[int]) -> None:
        """Removes idle pages from the cache and frees them."""
        pages = list(pages)
        self._cached_pages.difference_update(pages)
        self._idle.difference_update(pages)
        self._free.extend(reversed(pages))

    def _released(self, numbers: list[int]) -> None:
        kept = [page for page in numbers if page in self._cached_pages]
        self._idle.update(kept)
        super()._released([page for page in numbers if page not in self._cached_pages])


class SlotPool(_FreeListPool):
    """State slots, one per row, for its convolution and recurrent states in every layer."""

    def __init__(self, num_slots: int):
        super().__init__(num_slots, "slot")

    def allocate(self) -> int | None:
        """Returns a slot, or None if all are in use."""
        taken = self._take(1)
        return taken[0] if taken else None

    def free(self, slot: int) -> None:
        """Takes a row's slot back.

        Raises:
            PoolError: The slot is not in use.
        """
        self._release_pages([slot])


class PoolView:
    """A read-only view of the pools of several data groups; each row uses one of them."""

    def __init__(self, pools: Sequence[PagePool] | Sequence[SlotPool]):
        self._pools = pools

    @property
    def size(self) -> int:
        """The sum of the pools' sizes."""
        return sum(pool.size for pool in self._pools)

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self._pools)

    @property
    def available(self) -> int:
        return sum(pool.available for pool in self._pools)
