"""Admission control: requests are counted before a body is read or a prompt is tokenized.

A request that would only wait too long is refused at once, with the time after which to try again.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from jaxattn.server.http.errors import ApiError, bad

MOST_RETRY_SECONDS = 60
MEMORY = 0.9  # of the older answers in the mean time of an answer


@dataclasses.dataclass(eq=False)
class AdmissionToken:
    """One request's place.

    Attributes:
        choices: that it asks for.
        tokens: of its prompts, until the first token of the answer.
    """

    admission: "AdmissionControl"
    choices: int = 1
    tokens: int = 0

    def grow(self, choices: int, tokens: int) -> None:
        """Says what is asked for, when it is known.

        Raises:
            ApiError: 429, there is no room for so much now; 400, there never is.
        """
        if choices > self.admission.most:
            raise bad(
                "n",
                f"the request asks for {choices:,} continuations, and at most "
                f"{self.admission.most:,} can run and wait; ask for fewer",
            )
        self.admission.check(choices - self.choices, tokens)
        self.choices, self.tokens = choices, tokens

    def begun(self) -> None:
        """The first token has come: the prompts wait no more."""
        self.tokens = 0


class AdmissionControl:
    """Counts what is open.

    Args:
        rows: of the engine's batch.
        most_waiting: choices beside those that have rows.
        most_tokens: of prompts that wait; None sets no limit.

    Attributes:
        most: choices that may be open.
    """

    def __init__(self, rows: int, most_waiting: int, most_tokens: int | None):
        self.most, self._rows, self._most_tokens = rows + most_waiting, rows, most_tokens
        self._tickets: set[AdmissionToken] = set()
        self._mean_seconds = 1.0

    def set_rows(self, rows: int) -> None:
        """Says the rows of the engine's batch, once the engine has chosen them."""
        self.most += rows - self._rows
        self._rows = rows

    @property
    def open(self) -> int:
        """Requests that are being served or wait."""
        return len(self._tickets)

    @property
    def choices(self) -> int:
        return sum(ticket.choices for ticket in self._tickets)

    @property
    def waiting_tokens(self) -> int:
        return sum(ticket.tokens for ticket in self._tickets)

    @contextlib.contextmanager
    def enter(self) -> Iterator[AdmissionToken]:
        """A place for one request, until it is answered.

        Raises:
            ApiError: 429, there is none.
        """
        self.check(1, 0)
        ticket = AdmissionToken(self)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)

    def check(self, choices: int, tokens: int) -> None:
        """Raises ApiError 429 if there is no room for so many more."""
        if self.choices + choices > self.most:
            raise self._full(
                f"the queue is full: {self.choices:,} of {self.most:,} continuations are running "
                "or waiting"
            )
        if self._most_tokens is not None and self.waiting_tokens + tokens > self._most_tokens:
            raise self._full(
                f"{self.waiting_tokens:,} prompt tokens wait, and with {tokens:,} more they pass "
                f"the limit of {self._most_tokens:,}"
            )

    def answered(self, seconds: float) -> None:
        """Takes the time of an answer into the mean, from which waiting clients are told theirs."""
        self._mean_seconds = MEMORY * self._mean_seconds + (1 - MEMORY) * seconds

    @property
    def retry_seconds(self) -> int:
        """About when a row is free for one more."""
        rounds = self.choices / self._rows
        return max(1, min(MOST_RETRY_SECONDS, math.ceil(rounds * self._mean_seconds)))

    def _full(self, message: str) -> ApiError:
        again = self.retry_seconds
        return ApiError(
            429,
            f"{message}; try again in {again} s",
            code="queue_full",
            headers={"Retry-After": str(again)},
        )
