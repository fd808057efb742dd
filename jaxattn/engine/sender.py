"""A thread that sends steps to the device, so that the thread of the engine need not.

To send a small model's step takes about as long as the device takes to run it, and most of the
time Python's lock is free. So the engine's thread goes on with its rows meanwhile. Calls are made
in the order in which they were given. Behind one that fails none is made, until `forgive`.
"""

import queue
import threading
import weakref
from collections.abc import Callable

import jax

from jaxattn.engine.process import PROCESS
from jaxattn.engine.seal import Seal

Call = Callable[[], jax.Array]


class Sent:
    """A call that another thread makes."""

    __slots__ = ("_error", "_result", "_runs")

    def __init__(self) -> None:
        self._runs = threading.Lock()
        self._runs.acquire()
        self._result: jax.Array | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Until the call has returned, or will not be made."""
        with self._runs:
            pass

    def result(self) -> jax.Array:
        """What the call gave. Raises what it, or a call before it, raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def settle(self, result: jax.Array | None, error: BaseException | None) -> None:
        """Of the thread that makes the call."""
        self._result, self._error = result, error
        self._runs.release()


def array_of(told: jax.Array | Sent) -> jax.Array:
    """What a step tells, once it is sent."""
    return told.result() if isinstance(told, Sent) else told


class _Calls:
    """What the thread and its owner share. It has no owner in it: an engine that nobody holds any
    more can go, and its thread ends.

    Attributes:
        waiting: calls to make; without a call, `Sent` is a mark; None ends the thread.
        error: what the first call raised that failed.
        made: how many calls have come to an end.
    """

    def __init__(self, seal: Seal) -> None:
        self.seal = seal
        self.waiting: queue.SimpleQueue[tuple[Call | None, Sent] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.made = 0

    def run(self) -> None:
        PROCESS.seal = self.seal  # what a step compiles or traces here counts as the engine's
        while (given := self.waiting.get()) is not None:
            call, sent = given
            result = None
            if call is not None and self.error is None:
                try:
                    result = call()
                except BaseException as error:  # the owner raises it
                    self.error = error
            sent.settle(result, self.error)
            self.made += call is not None
            del given, call, sent, result  # arrays


class Sender:
    """Makes calls in a thread of its own, which starts with the first of them.

    Args:
        seal: what counts the thread's traces and compilations.
    """

    def __init__(self, seal: Seal) -> None:
        self._calls = _Calls(seal)
        self._given = 0
        self._thread: threading.Thread | None = None

    @property
    def unsettled(self) -> bool:
        """Whether calls are under way, or one has failed."""
        return self._given != self._calls.made or self._calls.error is not None

    def send(self, call: Call) -> Sent:
        """Has a call made, after those that were given before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._calls.run, name="jaxattn", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.waiting.put, None)
        sent = Sent()
        self._given += 1
        self._calls.waiting.put((call, sent))
        return sent

    def wait(self) -> None:
        """Until no call is under way."""
        if self._given == self._calls.made:
            return
        # An interrupt may have come between the count and the call, so a mark tells.
        mark = Sent()
        self._calls.waiting.put((None, mark))
        mark.wait()
        self._given = self._calls.made

    def check(self) -> None:
        """Waits, and raises what a call has raised."""
        self.wait()
        if self._calls.error is not None:
            raise self._calls.error

    def forgive(self) -> None:
        """Waits, and makes calls again though one has failed."""
        self.wait()
        self._calls.error = None
