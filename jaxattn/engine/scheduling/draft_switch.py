"""The switch of a draft head: a bucket of rows drafts if that gives more tokens per second.

    drafts      seconds of a step with drafts, divided by the tokens that it gives per row
    no drafts   seconds of a step without drafts, which gives one token per row

A bucket tries both ways and keeps the faster one. It tries the slower one again later, because rows
get longer and texts change: after `FIRST` steps, and after twice as many each time that nothing
changes. So a head that never helps costs `TRIAL` slower steps out of up to `LAST`.

The host measures the times between the ends of steps. The switch compares medians, which a single
interruption of the host does not change.
"""

import dataclasses
import statistics
from collections import deque
from typing import Self

TRIAL = 8  # steps
FIRST, LAST = 256, 8192  # steps until the next trial of the slower way, at first and at most
WINDOW = 4 * TRIAL  # the newest steps, which count
MARGIN = 1.01  # the factor by which the other way must be faster to replace the current one


@dataclasses.dataclass
class StepTimes:
    """The newest steps of one way, with drafts or without.

    Attributes:
        seconds: The time of each step.
        tokens: The number of tokens per row that each step gave.
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
        """Seconds per token of a row."""
        return statistics.median(self.seconds) / statistics.fmean(self.tokens)


class BucketSwitch:
    """The switch of one bucket of rows.

    Attributes:
        drafting: Whether drafting is the faster way; True until both ways were tried.
    """

    def __init__(self) -> None:
        self.drafting = True
        self._times = {way: StepTimes.empty() for way in (True, False)}
        self._trials_left = {True: TRIAL, False: TRIAL}  # trial steps of each way that are left
        self._trial_interval, self._steps_until_trial = FIRST, FIRST

    def choose(self) -> bool:
        """Whether the next step uses drafts."""
        trial = next((way for way in (True, False) if self._trials_left[way]), None)
        if trial is not None:
            self._trials_left[trial] -= 1
            return trial
        self._steps_until_trial -= 1
        if self._steps_until_trial <= 0:
            self._try_again()
        return self.drafting

    def observe(self, drafts: bool, seconds: float, tokens: float) -> bool:
        """Records the time of a step and its tokens per row. Returns whether the bucket drafts
        from now on."""
        times = self._times[drafts]
        times.seconds.append(seconds)
        times.tokens.append(tokens)
        own, other = self._times[self.drafting], self._times[not self.drafting]
        if own.known and other.known and other.of_token * MARGIN < own.of_token:
            self.drafting = not self.drafting
            self._trial_interval = self._steps_until_trial = FIRST
        return self.drafting

    def _try_again(self) -> None:
        """Starts a new trial of the slower way, and drops its old measurements."""
        self._trials_left[not self.drafting] = TRIAL
        self._times[not self.drafting] = StepTimes.empty()
        self._trial_interval = self._steps_until_trial = min(2 * self._trial_interval, LAST)


class DraftSwitch:
    """The switches of all buckets.

    Attributes:
        buckets: The switch of each bucket that has had a step.
    """

    def __init__(self) -> None:
        self.buckets: dict[int, BucketSwitch] = {}

    def choose(self, bucket: int) -> bool:
        """Whether the next step of this bucket of rows uses drafts."""
        return self.buckets.setdefault(bucket, BucketSwitch()).choose()

    def observe(self, bucket: int, drafts: bool, seconds: float, tokens: float) -> bool:
        """See `BucketSwitch.observe`."""
        return self.buckets[bucket].observe(drafts, seconds, tokens)
