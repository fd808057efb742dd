"""Admission control, which counts requests before the server reads a body or tokenizes a prompt.

If the queue is full, the server refuses a request at once, and tells the client when to retry.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from jaxattn.server.http.errors import ApiError, bad

MOST_RETRY_SECONDS = 60
MEMORY = 0.9  # weight of the previous mean in the moving average of the time of an answer


@dataclasses.dataclass(eq=False)
class AdmissionToken:
    """The place of one admitted request.

    Attributes:
        choices: The number of choices that the request asks for.
        tokens: The number of its prompt tokens; 0 from the first token of the answer on.
    """

    admission: "AdmissionControl"
    choices: int = 1
    tokens: int = 0

    def grow(self, choices: int, tokens: int) -> None:
        """Sets the request's choices and prompt tokens, which are known once its body is read.

        Raises:
            ApiError: 429 if they exceed the limits together with the other open requests, 400 if
                the choices exceed the limit by themselves.
        """
        if choices > self.admission.max_choices:
            raise bad(
                "n",
                f"the request needs {choices:,} completions, but at most "
                f"{self.admission.max_choices:,} can run and wait; ask for fewer",
            )
        self.admission.check(choices - self.choices, tokens)
        self.choices, self.tokens = choices, tokens

    def begun(self) -> None:
        """Stops counting the prompt tokens as waiting, as the first token has arrived."""
        self.tokens = 0


class AdmissionControl:
    """The counts and limits of the open requests.

    Args:
        rows: The number of rows of the engine's batch.
        max_waiting: The maximum number of choices without a row.
        max_waiting_tokens: The maximum number of prompt tokens that wait; None for no limit.

    Attributes:
        max_choices: The maximum number of open choices.
    """

    def __init__(self, rows: int, max_waiting: int, max_waiting_tokens: int | None):
        self.max_choices, self._rows = rows + max_waiting, rows
        self._max_waiting_tokens = max_waiting_tokens
        self._tickets: set[AdmissionToken] = set()
        self._mean_seconds = 1.0

    def set_rows(self, rows: int) -> None:
        """Sets the number of rows, once the engine has chosen it."""
        self.max_choices += rows - self._rows
        self._rows = rows

    @property
    def open(self) -> int:
        """The number of running and waiting requests."""
        return len(self._tickets)

    @property
    def choices(self) -> int:
        return sum(ticket.choices for ticket in self._tickets)

    @property
    def waiting_tokens(self) -> int:
        return sum(ticket.tokens for ticket in self._tickets)

    @contextlib.contextmanager
    def enter(self) -> Iterator[AdmissionToken]:
        """Counts one request for the duration of the `with` block.

        Raises:
            ApiError: 429 if the queue is full.
        """
        self.check(1, 0)
        ticket = AdmissionToken(self)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)

    def check(self, choices: int, tokens: int) -> None:
        """Raises ApiError 429 if so many more choices or prompt tokens would exceed a limit."""
        if self.choices + choices > self.max_choices:
            raise self._full(
                f"the queue is full: {self.choices:,} of {self.max_choices:,} completions are "
                "running or waiting"
            )
        if (
            self._max_waiting_tokens is not None
            and self.waiting_tokens + tokens > self._max_waiting_tokens
        ):
            raise self._full(
                f"{self.waiting_tokens:,} prompt tokens are waiting, and {tokens:,} more would "
                f"exceed the limit of {self._max_waiting_tokens:,}"
            )

    def answered(self, seconds: float) -> None:
        """Adds the time of an answer to the moving average from which `retry_seconds` follows."""
        self._mean_seconds = MEMORY * self._mean_seconds + (1 - MEMORY) * seconds

    @property
    def retry_seconds(self) -> int:
        """The estimated seconds until a row is free, from 1 to `MOST_RETRY_SECONDS`."""
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
