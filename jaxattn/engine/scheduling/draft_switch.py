"""The switch of a draft head: a bucket of rows drafts where that gives more tokens a second.

    drafts      seconds of a step with drafts, over the tokens that it gives of a row
    no drafts   seconds of a step without, which gives one

A bucket tries both, and stays with the faster. The other is tried again after a while, since rows
get longer and texts change: after `FIRST` steps, and after twice as many each time that nothing
changes. So a head that never helps costs `TRIAL` slower steps out of up to `LAST`.

Times are those between the ends of steps, as the host sees them. A trial is judged by the median,
which an interruption of the host does not move.
"""

import dataclasses
import statistics
from collections import deque
from typing import Self

TRIAL = 8  # steps
FIRST, LAST = 256, 8192  # steps until the slower way is tried again
WINDOW = 4 * TRIAL  # steps that are remembered
MARGIN = 1.01  # by which the other way must be faster: what is not measured better is left


@dataclasses.dataclass
class StepTimes:
    """Of the newest steps of one way, with drafts or without.

    Attributes:
        seconds: of each step.
        tokens: that each gave of a row.
    """

    seconds: deque[float]
    tokens: deque[float]

    @classmethod
    def empty(cls) -> Self:
        return cls(deque(maxlen=WINDOW), deque(maxlen=WINDOW))

    @property
    def known(self) -> bool:
        return len(self.seconds) >= TRIAL

    @property
    def of_token(self) -> float:
        """Seconds of a token of a row."""
        return statistics.median(self.seconds) / statistics.fmean(self.tokens)


class BucketSwitch:
    """Of the steps of one bucket of rows.

    Attributes:
        drafting: the faster way; with drafts until both were tried.
    """

    def __init__(self) -> None:
        self.drafting = True
        self._times = {way: StepTimes.empty() for way in (True, False)}
        self._left = {True: TRIAL, False: TRIAL}  # steps of each way that are yet to be sent
        self._wait, self._until = FIRST, FIRST

    def choose(self) -> bool:
        """Whether the next step drafts."""
        trial = next((way for way in (True, False) if self._left[way]), None)
        if trial is not None:
            self._left[trial] -= 1
            return trial
        self._until -= 1
        if self._until <= 0:
            self._try_again()
        return self.drafting

    def observe(self, drafts: bool, seconds: float, tokens: float) -> bool:
        """Whether the bucket drafts from now on: a step took so long, and gave so many tokens of a
        row."""
        times = self._times[drafts]
        times.seconds.append(seconds)
        times.tokens.append(tokens)
        own, other = self._times[self.drafting], self._times[not self.drafting]
        if own.known and other.known and other.of_token * MARGIN < own.of_token:
            self.drafting = not self.drafting
            self._wait = self._until = FIRST
        return self.drafting

    def _try_again(self) -> None:
        """Tries the slower way from the next step on; what is known of it is old."""
        self._left[not self.drafting] = TRIAL
        self._times[not self.drafting] = StepTimes.empty()
        self._wait = self._until = min(2 * self._wait, LAST)


class DraftSwitch:
    """Of all buckets.

    Attributes:
        buckets: a switch of each bucket that had a step.
    """

    def __init__(self) -> None:
        self.buckets: dict[int, BucketSwitch] = {}

    def choose(self, bucket: int) -> bool:
        """Whether the next step of a bucket of so many rows drafts."""
        return self.buckets.setdefault(bucket, BucketSwitch()).choose()

    def observe(self, bucket: int, drafts: bool, seconds: float, tokens: float) -> bool:
        """See `BucketSwitch.observe`."""
        return self.buckets[bucket].observe(drafts, seconds, tokens)
