"""Admission: whether the pool will hold a request beside the rows that run, until they have ended.

A row is admitted with the pages of its prompt, and grows. Where rows outgrow the pool, one of them
gives its pages back, and its tokens are read again: work done twice. So a request waits while the
pages that the rows are expected to need, at the time of their largest sum, exceed the pool.

A request without a stop generates `max_tokens`. Any other is expected to generate as many tokens as
the last such requests did, of those that generated more than it has, or has to replay. The
expectation decides when a request starts and nothing else: a row that generates more gets its pages
as it grows.
"""

import collections

import numpy as np
from jaxtyping import Int

# Answers that the expectation is made of, and what stands for their length before the first ended.
REMEMBERED, FIRST = 256, 256


class AnswerLengths:
    """Lengths of the last answers that could have ended before their `max_tokens`."""

    def __init__(self) -> None:
        self._lengths: collections.deque[int] = collections.deque(maxlen=REMEMBERED)
        self._sorted = np.array([FIRST])

    def ended(self, tokens: int) -> None:
        """Counts an answer of so many tokens."""
        self._lengths.append(tokens)
        self._sorted = np.sort(self._lengths)

    def expected(
        self, generated: Int[np.ndarray, "B"], left: Int[np.ndarray, "B"]
    ) -> Int[np.ndarray, "B"]:
        """Tokens that answers are still expected to get, of which `left` may come: the mean of the
        longer answers, or as many as there are if none was longer."""
        sums = np.append(np.cumsum(self._sorted[::-1])[::-1], 0)
        first = np.searchsorted(self._sorted, generated, side="right")
        longer = len(self._sorted) - first
        mean = np.where(longer > 0, sums[first] // np.maximum(longer, 1), 2 * generated)
        return np.minimum(mean - generated, left)


def peak_growth(
    tokens: Int[np.ndarray, "B"],
    coming: Int[np.ndarray, "B"],
    pages: Int[np.ndarray, "B"],
    own: Int[np.ndarray, "B"],
    page_tokens: int,
) -> int:
    """The most pages that rows will need beyond those that they have, while they run and end.

    A row needs the most just before it ends, and the pages that it has to itself are free then. So
    the sum is largest at the end of some row, whose last token is never written.

    Args:
        tokens: of each row by now.
        coming: how many it is expected to get.
        pages: that it has.
        own: how many of them no other row shares.
        page_tokens: tokens of a page.
    """
    ends = np.unique(coming)[:, None]
    grown = -(-(tokens + np.minimum(ends, coming - 1)) // page_tokens) - pages
    needed = np.where(coming >= ends, np.maximum(grown, 0), -own)
    return int(needed.sum(1).max(initial=0))
