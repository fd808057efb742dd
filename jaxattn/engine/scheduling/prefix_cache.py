"""Prefixes of prompts that were read before: their pages, and states at their ends.

A prefix is a chain of blocks, of whole pages each. Where rows have states, or bits are to be the
same, a block is as many tokens as prefill reads of a prompt at a time: a prompt is then cut into
the same chunks whether its beginning is cached or not. Elsewhere it is a line of a step
(`Limits.line_tokens`). Its key is a hash of all tokens up to its end, and of the salt.

    entry      the pages of one block; and the states behind it, in a checkpoint slot, where kept
    hit        the longest chain of entries; with recurrent states, up to one that has its states

Pages of entries are shared and only read: a row that goes on behind a prefix writes to pages of its
own. A state is copied out of a live slot and into another one, and never read in its checkpoint.
At least one token of a prompt is always read, since its logits are wanted.

States are large, so few are kept: behind the last whole block of a prompt, behind every block in
STATES_EVERY tokens, and where a prompt leaves what an earlier one had in common with it, which is
found when pages are there and states are not.

What was used longest ago goes first: a state where a slot is wanted, an entry that nobody uses and
that no other entry continues where pages are.
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
    """One block that is cached.

    Attributes:
        before: the entry of the block before it.
        slot: of its states; None where they are not kept.
        continued: how many entries begin where it ends.
    """

    key: bytes
    before: "CachedBlock | None"
    pages: list[int]
    slot: int | None = None
    continued: int = 0


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """What is cached of a prompt.

    Attributes:
        entries: whose pages it shares.
        pages_alone: blocks behind these whose pages are there, and whose states are not.
    """

    entries: Sequence[CachedBlock] = ()
    pages_alone: int = 0

    @property
    def pages(self) -> list[int]:
        return [page for entry in self.entries for page in entry.pages]


class PendingInsert:
    """What a row enters of its prompt, block by block.

    Attributes:
        keys: of the blocks of its prompt.
        last: the entry that its next one continues.
        branch: the block behind which states were missed.
        own: whether all before is cached in the row's own pages, or in those that it shares.
    """

    def __init__(self, keys: Sequence[bytes], hit: PrefixMatch):
        self.keys = keys
        self.last = hit.entries[-1] if hit.entries else None
        self.branch = len(hit.entries) + hit.pages_alone if hit.pages_alone else 0
        self.own = True


@dataclasses.dataclass
class PrefixCacheStats:
    """In tokens.

    Attributes:
        asked: of prompts that were looked up.
        hits: that were not read again.
        states_missed: whose pages were there without their states, so that they were read again.
    """

    asked: int = 0
    hits: int = 0
    states_missed: int = 0


class PrefixCache:
    """Entries by their keys.

    Args:
        pages: the pool that they are in.
        block: tokens of a block, whole pages of them.
        slots: the numbers of the checkpoint slots.
        counts: goes on counting.
        recurrent: a hit wants states.
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
            raise ValueError(f"a block must be whole pages of {pages.page_size}; got {block}")
        self.pages, self.block, self.recurrent = pages, block, recurrent
        self.counts = counts
        self._entries: OrderedDict[bytes, CachedBlock] = OrderedDict()  # used longest ago first
        self._states: OrderedDict[bytes, CachedBlock] = OrderedDict()  # those of them with states
        self._first, self._slots = slots.start, SlotPool(len(slots)) if len(slots) else None
        pages.evict = self._evict

    @property
    def states(self) -> int:
        """Checkpoint slots in use."""
        return self._slots.in_use if self._slots else 0

    def keys(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """Of each whole block that a hit may have: the last token of a prompt is never in one."""
        hashed = hashlib.blake2b(f"{len(salt)}:{salt}".encode(), digest_size=16)
        keys = []
        for end in range(self.block, len(prompt), self.block):
            tokens = np.array(list(prompt[end - self.block : end]), np.int32)
            hashed.update(tokens.tobytes())
            keys.append(hashed.digest())
        return keys

    def find(self, keys: Sequence[bytes]) -> PrefixMatch:
        """The longest hit."""
        there = itertools.takewhile(self._entries.__contains__, keys)
        entries = [self._entries[key] for key in there]
        whole = len(entries)
        while self.recurrent and entries and entries[-1].slot is None:
            entries.pop()
        return PrefixMatch(entries, whole - len(entries))

    def used(self, hit: PrefixMatch, asked: int) -> None:
        """Counts a hit of a prompt of `asked` tokens. The row that has it shares its pages."""
        for entry in reversed(hit.entries):  # what others continue was used last
            self._entries.move_to_end(entry.key)
        if hit.entries and hit.entries[-1].slot is not None:
            self._states.move_to_end(hit.entries[-1].key)
        self.counts.asked += asked
        self.counts.hits += len(hit.entries) * self.block
        self.counts.states_missed += hit.pages_alone * self.block

    def enter(self, row: PendingInsert, length: int, pages: Sequence[int]) -> int | None:
        """Enters the block that a row has read, if it ends at this length.

        Args:
            pages: of the row.

        Returns:
            The checkpoint slot that takes the row's states now, if one does.
        """
        number = length // self.block
        if length % self.block or not 0 < number <= len(row.keys):
            return None
        key, width = row.keys[number - 1], self.block // self.pages.page_size
        if row.own:
            row.last = self.add(key, row.last, pages[(number - 1) * width : number * width])
            row.own = row.last is not None
        wanted = number in (len(row.keys), row.branch) or length % STATES_EVERY == 0
        return self.keep_states(key) if wanted else None

    def add(
        self, key: bytes, before: CachedBlock | None, pages: Sequence[int]
    ) -> CachedBlock | None:
        """Enters a block that a row has read, with the row's pages.

        Returns:
            Its entry; None if another row's pages are there: then nothing behind them can be
            entered either, since an entry in use must have all before it in use.
        """
        if key in self._entries:
            return None
        entry = self._entries[key] = CachedBlock(key, before, list(pages))
        if before is not None:
            before.continued += 1
            self._entries.move_to_end(before.key)
        self.pages.keep(entry.pages)
        return entry

    def keep_states(self, key: bytes) -> int | None:
        """A checkpoint slot for the states behind a block; None if they are kept, or cannot be."""
        entry = self._entries.get(key)
        if entry is None or entry.slot is not None or self._slots is None or not self.recurrent:
            return None
        slot = self._slots.allocate()
        if slot is None:
            _, oldest = self._states.popitem(last=False)
            assert oldest.slot is not None
            slot, oldest.slot = oldest.slot - self._first, None
        entry.slot = self._first + slot
        self._states[key] = entry
        return entry.slot

    def _evict(self) -> bool:
        """Gives back the pages of the entry that was used longest ago, of those nobody wants."""
        for entry in self._entries.values():
            if not entry.continued and self.pages.idle(entry.pages):
                break
        else:
            return False
        del self._entries[entry.key]
        if entry.before is not None:
            entry.before.continued -= 1
        if entry.slot is not None:
            assert self._slots is not None
            self._slots.free(entry.slot - self._first)
            del self._states[entry.key]
        self.pages.drop(entry.pages)
        return True
