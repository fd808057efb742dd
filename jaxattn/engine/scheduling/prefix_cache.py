"""The prefix cache: pages of prompts that were read before, and recurrent states at their ends.

A prefix is a chain of blocks of whole pages. Usually a block is a line of a step
(`Limits.line_tokens`). With recurrent states or in exact mode, a block is as long as the largest
piece of a prompt in a step, so that prompts are cut into the same pieces with and without a hit.
The key of a block is a hash of the salt and of all tokens up to the end of the block.

    entry      the pages of one block, and optionally the states after it, in a checkpoint slot
    hit        the longest chain of entries; with recurrent states, up to one that has its states

Rows only read the pages of entries: a row that continues after a prefix writes to pages of its own.
States are copied between a row's slot and a checkpoint slot, and no step runs on a checkpoint slot.
Prefill always reads at least one token of a prompt, because the row needs its logits.

States are large, so the cache keeps few: after the last whole block of a prompt, every STATES_EVERY
tokens, and where a prompt diverges from an earlier one. A lookup that finds pages without states
marks such a point.

Eviction is by least recent use. If no checkpoint slot is free, the oldest state goes. If no page is
free, the oldest entry goes that no row uses and no other entry continues.
"""

import dataclasses
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxattn.engine.scheduling.page_pool import PagePool, SlotPool

STATES_EVERY = 4096


@dataclasses.dataclass(eq=False)
class CachedBlock:
    """A cached block.

    Attributes:
        parent: The entry of the preceding block.
        slot: The checkpoint slot of the states after the block; None if they are not kept.
        num_children: The number of entries that continue this one.
    """

    key: bytes
    parent: "CachedBlock | None"
    pages: list[int]
    slot: int | None = None
    num_children: int = 0


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """The cached part of a prompt.

    Attributes:
        entries: The entries whose pages the prompt shares.
        pages_alone: The number of further blocks with cached pages but without states.
    """

    entries: Sequence[CachedBlock] = ()
    pages_alone: int = 0

    @property
    def pages(self) -> list[int]:
        return [page for entry in self.entries for page in entry.pages]


class PendingInsert:
    """The blocks of a row's prompt that the cache is to store as the row reads them.

    Attributes:
        keys: The keys of the prompt's blocks.
        parent: The entry that the row's next entry continues.
        branch: The number of the block after which the lookup missed states.
        shares_pages: Whether the row uses the cached pages of all blocks so far.
    """

    def __init__(self, keys: Sequence[bytes], hit: PrefixMatch):
        self.keys = keys
        self.parent = hit.entries[-1] if hit.entries else None
        self.branch = len(hit.entries) + hit.pages_alone if hit.pages_alone else 0
        self.shares_pages = True


@dataclasses.dataclass
class PrefixCacheStats:
    """Counts of the prefix cache, in tokens.

    Attributes:
        asked: The tokens of prompts that were looked up.
        hits: The tokens that prefill did not read again.
        states_missed: The tokens that prefill read again because pages were cached without states.
    """

    asked: int = 0
    hits: int = 0
    states_missed: int = 0


class PrefixCache:
    """A cache of entries by their keys.

    Args:
        pages: The pool of the pages.
        block: The number of tokens per block, a multiple of the page size.
        slots: The numbers of the checkpoint slots.
        counts: The counts to which the cache adds.
        recurrent: Whether a hit needs states.
    """

    def __init__(
        self,
        pages: PagePool,
        block: int,
        slots: range,
        counts: PrefixCacheStats,
        *,
        recurrent: bool,
    ):
        if block % pages.page_size:
            raise ValueError(
                f"block must be a multiple of the page size {pages.page_size}; got {block}"
            )
        self.pages, self.block, self.recurrent = pages, block, recurrent
        self.counts = counts
        self._entries: OrderedDict[bytes, CachedBlock] = OrderedDict()  # least recently used first
        self._states: OrderedDict[bytes, CachedBlock] = OrderedDict()  # entries with states
        self._first_slot, self._slots = slots.start, SlotPool(len(slots)) if len(slots) else None
        pages.evict = self._evict

    @property
    def states(self) -> int:
        """The number of checkpoint slots in use."""
        return self._slots.in_use if self._slots else 0

    def keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """Returns the key of each whole block that a hit may include, never with the last token."""
        hashed = hashlib.blake2b(f"{len(salt)}:{salt}".encode(), digest_size=16)
        keys = []
        for end in range(self.block, len(prompt), self.block):
            tokens = np.array(list(prompt[end - self.block : end]), np.int32)
            hashed.update(tokens.tobytes())
            keys.append(hashed.digest())
        return keys

    def find(self, keys: Sequence[bytes]) -> PrefixMatch:
        """Returns the longest hit."""
        there = itertools.takewhile(self._entries.__contains__, keys)
        entries = [self._entries[key] for key in there]
        whole = len(entries)
        while self.recurrent and entries and entries[-1].slot is None:
            entries.pop()
        return PrefixMatch(entries, whole - len(entries))

    def used(self, hit: PrefixMatch, num_tokens: int) -> None:
        """Records a hit of a prompt of `num_tokens` tokens as a use of its entries."""
        for entry in reversed(hit.entries):  # so that an entry outlives those that continue it
            self._entries.move_to_end(entry.key)
        if hit.entries and hit.entries[-1].slot is not None:
            self._states.move_to_end(hit.entries[-1].key)
        self.counts.asked += num_tokens
        self.counts.hits += len(hit.entries) * self.block
        self.counts.states_missed += hit.pages_alone * self.block

    def enter(self, row: PendingInsert, length: int, pages: Sequence[int]) -> int | None:
        """Stores the block that a row has read, if a block ends at this length.

        Args:
            pages: The pages of the row.

        Returns:
            The checkpoint slot into which to copy the row's states now, or None.
        """
        number = length // self.block
        if length % self.block or not 0 < number <= len(row.keys):
            return None
        key, width = row.keys[number - 1], self.block // self.pages.page_size
        if row.shares_pages:
            row.parent = self.add(key, row.parent, pages[(number - 1) * width : number * width])
            row.shares_pages = row.parent is not None
        wanted = number in (len(row.keys), row.branch) or length % STATES_EVERY == 0
        return self.keep_states(key) if wanted else None

    def add(
        self, key: bytes, parent: CachedBlock | None, pages: Sequence[int]
    ) -> CachedBlock | None:
        """Stores a block that a row has read, with the row's pages.

        Returns:
            The entry. None if another row has already stored the block. Then the row can store no
            later block either, because an entry in use needs all entries before it in use.
        """
        if key in self._entries:
            return None
        entry = self._entries[key] = CachedBlock(key, parent, list(pages))
        if parent is not None:
            parent.num_children += 1
            self._entries.move_to_end(parent.key)
        self.pages.keep(entry.pages)
        return entry

    def keep_states(self, key: bytes) -> int | None:
        """Returns a checkpoint slot for the states after a block, or None to keep none."""
        entry = self._entries.get(key)
        if entry is None or entry.slot is not None or self._slots is None or not self.recurrent:
            return None
        slot = self._slots.allocate()
        if slot is None:
            _, oldest = self._states.popitem(last=False)
            assert oldest.slot is not None
            slot, oldest.slot = oldest.slot - self._first_slot, None
        entry.slot = self._first_slot + slot
        self._states[key] = entry
        return entry.slot

    def _evict(self) -> bool:
        """Evicts the least recently used entry that no row uses. Returns False if there is none."""
        for entry in self._entries.values():
            if not entry.num_children and self.pages.idle(entry.pages):
                break
        else:
            return False
        del self._entries[entry.key]
        if entry.parent is not None:
            entry.parent.num_children -= 1
        if entry.slot is not None:
            assert self._slots is not None
            self._slots.free(entry.slot - self._first_slot)
            del self._states[entry.key]
        self.pages.drop(entry.pages)
        return True
