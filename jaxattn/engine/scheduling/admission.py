"""Admission: predicts whether the page pool can hold one more request next to the running rows.

The scheduler admits a row with the pages of its prompt, and the row grows. If the rows outgrow the
pool, one of them is preempted and its tokens are read again, which wastes work. So a request waits
while the expected peak of the rows' pages exceeds the pool.

A request that cannot stop early generates `max_tokens`. For any other, the expected length is the
mean of recent answers that could stop early and got longer than this one is, or will be after its
replay. The expectation only decides when a request starts: a row that generates more still gets
its pages as it grows.
"""

import collections

import numpy as np
from jaxtyping import Int

# The number of recent answers in the estimate, and the assumed length before the first one ends.
REMEMBERED, FIRST = 256, 256


class AnswerLengths:
    """The lengths of recent answers that could have stopped before their `max_tokens`."""

    def __init__(self) -> None:
        self._lengths: collections.deque[int] = collections.deque(maxlen=REMEMBERED)
        self._sorted = np.array([FIRST])

    def ended(self, tokens: int) -> None:
        """Records the length of an answer."""
        self._lengths.append(tokens)
        self._sorted = np.sort(self._lengths)

    def expected(
        self, generated: Int[np.ndarray, "B"], max_remaining: Int[np.ndarray, "B"]
    ) -> Int[np.ndarray, "B"]:
        """Returns how many more tokens the answers are expected to get, at most `max_remaining`.

        An answer grows to the mean of longer recent answers, or doubles if none was longer.
        """
        sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
        first = np.searchsorted(self._sorted, generated, side="right")
        longer = len(self._sorted) - first
        mean = np.where(longer > 0, sums[first] // np.maximum(longer, 1), 2 * generated)
        return np.minimum(mean - generated, max_remaining)


def peak_growth(
    tokens: Int[np.ndarray, "B"],
    remaining: Int[np.ndarray, "B"],
    pages: Int[np.ndarray, "B"],
    exclusive_pages: Int[np.ndarray, "B"],
    page_tokens: int,
) -> int:
    """Returns the peak number of additional pages that the rows need until they have all ended.

    A row needs the most pages just before it ends, and then frees those that it does not share. So
    the sum is largest at the end of some row. A row's last token is never written to the cache.

    Args:
        tokens: The current number of tokens of each row.
        remaining: The expected number of further tokens of each row.
        pages: The number of pages of each row.
        exclusive_pages: The number of these that the row shares with no other.
        page_tokens: The number of tokens per page.
    """
    ends = np.unique(remaining)[:, None]
    grown = -(-(tokens + np.minimum(ends, remaining - 1)) // page_tokens) - pages
    needed = np.where(remaining >= ends, np.maximum(grown, 0), -exclusive_pages)
    return int(needed.sum(1).max(initial=0))
