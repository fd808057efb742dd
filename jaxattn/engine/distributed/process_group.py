"""The processes of one engine on several hosts, which start together and end together.

    crew = ProcessGroup.leading("0.0.0.0:1235", processes=2)
    crew = ProcessGroup.following("host-0:1235", rank=1)        in the others
    crew.agree({"jaxattn": "0.9", "checkpoint": "5f3c..."})     before anything is loaded
    with crew.together():
        ...                        an error in here ends all processes with its message

The processes depend on each other: no process can finish a step that another one does not run. So
each process has a thread that reports to the others every second. The thread ends its process

- as soon as another is gone or has failed, with the other's message;
- if another has sent nothing for `SILENT` seconds, because it is stopped or its host is gone;
- in the leader, if a step has not ended for `step_timeout` seconds, because JAX would wait forever.

Because this is a thread, a process also ends while it waits in a library.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxattn.engine.distributed.transport import (
    AGREED,
    ALIVE,
    END,
    FACTS,
    FAILED,
    HostError,
    TransportLink,
    connect_to_driver,
    listen_for_workers,
)

SILENT = 20.0  # seconds
STUCK = 20.0  # seconds
SAYS = 1.0  # seconds to wait for sending the last message to another process
PRINTS = 5.0  # seconds for printing the reason; on a busy machine its thread waits its turn
CODE = 70  # EX_SOFTWARE


def end_process(message: str) -> NoReturn:
    """Prints one line and ends this process, whatever its other threads wait for.

    A thread prints the line, because the reader of the stream may be gone or no longer read.
    """

    def say() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no stream
            print(f"error: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()

    try:
        speaks = threading.Thread(target=say, daemon=True)
        speaks.start()
        speaks.join(PRINTS)
    finally:
        os._exit(CODE)


class ProcessGroup:
    """One process's links to the others.

    Args:
        rank: The rank of this process; 0 leads.
        links: The leader's links to all others, or a follower's link to the leader.
        link_timeout, step_timeout: Timeouts in seconds, see the module docstring.
        end: A function that ends the process with a message.
    """

    def __init__(
        self,
        rank: int,
        links: Sequence[TransportLink],
        *,
        link_timeout: float = SILENT,
        step_timeout: float = STUCK,
        end: Callable[[str], None] = end_process,
    ):
        self.rank, self.links = rank, list(links)
        self._link_timeout, self._step_timeout, self._end = link_timeout, step_timeout, end
        self._closed, self._ending = threading.Event(), threading.RLock()
        # The time when the last step began, and its result; None before it is sent.
        self._last_step: tuple[float, Any] | None = None
        self._steps_begun, self._steps_sent = 0, 0  # steps
        for link in self.links:
            link.listen(self._on_connection_end)
        self._thread = threading.Thread(target=self._watch, name="crew", daemon=True)
        self._thread.start()

    @classmethod
    def leading(
        cls, address: str, processes: int, *, timeout: float = 300.0, **options: Any
    ) -> "ProcessGroup":
        """Returns process 0's group once all others have connected; see `listen_for_workers`.

        Raises:
            HostError: Some processes have not connected.
        """
        return cls(0, listen_for_workers(address, processes, timeout=timeout), **options)

    @classmethod
    def following(
        cls, address: str, rank: int, *, timeout: float = 300.0, **options: Any
    ) -> "ProcessGroup":
        """Returns the group of a process other than 0.

        Raises:
            HostError: There is no leader at the address.
        """
        return cls(rank, [connect_to_driver(address, timeout=timeout)], **options)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, values: Mapping[str, str]) -> None:
        """Checks values that must be the same in all processes.

        Raises:
            HostError: A process has another value. The message, which ends all processes, names
                both values.
        """
        if not self.leads:
            [link] = self.links
            link.send_text(FACTS, json.dumps({"process": str(self.rank), **values}))
            if link.receive().kind != AGREED:
                raise HostError(f"{link.name} is not a process of this engine")
            return
        for link in self.links:
            found = json.loads(link.receive().text)
            link.name = f"process {found.pop('process', '?')} at {link.name.rpartition(' ')[2]}"
            for name in dict.fromkeys([*values, *found]):
                if found.get(name) != values.get(name):
                    message = (
                        f"the processes differ in {name}: {link.name} has {found.get(name)}, but "
                        f"process 0 has {values.get(name)}; start all of them with the same value"
                    )
                    self.end_all(message)
                    raise HostError(message)
        for link in self.links:
            link.send(AGREED)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ends all processes with an error that is raised inside.

        It also ends this process, because JAX's runtime would wait minutes for the others.
        """
        try:
            yield
        except BaseException as error:
            what = " ".join(str(error).split()) or type(error).__name__
            self.end_all(what if isinstance(error, HostError) else f"process {self.rank}: {what}")
            raise

    def fail(self, message: str) -> None:
        """Tells all others that the group ends."""
        self._closed.set()
        for link in self.links:
            with contextlib.suppress(HostError):  # that process is already gone
                link.offer(FAILED, message, timeout=SAYS)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def begin(self) -> None:
        """Records that a step begins. Sending it may take until the step before it has ended."""
        self._steps_begun += 1
        self._last_step = (time.monotonic(), None)

    def sent(self, result: jax.Array | None = None) -> None:
        """Records that the step was sent to the devices, with its result if the host reads that."""
        self._steps_sent += 1
        self._last_step = None if result is None else (time.monotonic(), result)

    def close(self) -> None:
        """Ends the watch and the links; the leader also tells the others that they are done."""
        self._closed.set()
        for link in self.links:
            if self.leads:
                with contextlib.suppress(HostError):  # that process is already gone
                    link.send(END)
            link.close()

    def _watch(self) -> None:
        period = min(1.0, self._link_timeout / 4, self._step_timeout / 4)
        while not self._closed.wait(period):
            for link in self.links:
                quiet = time.monotonic() - link.last_received
                if quiet > self._link_timeout:
                    self.end_all(
                        f"{link.name} has sent nothing for {quiet:.0f} s: it has stopped, or its "
                        "host is unreachable"
                    )
                    return
                try:
                    link.offer(ALIVE, None, self._steps_sent)
                except HostError as error:
                    if not self._closed.is_set():
                        self.end_all(str(error))
                    return
            # Only the leader judges, because it knows how far each of the others is.
            if self.leads and (message := self._describe_stuck_step()):
                self.end_all(message)
                return

    def _describe_stuck_step(self) -> str | None:
        """Returns a message about a step that does not end, or None if there is none."""
        if self._last_step is None:
            return None
        when, result = self._last_step
        done: Any = result  # jax's type stubs lack `is_ready`
        elapsed = time.monotonic() - when
        if elapsed < self._step_timeout:
            return None
        if done is not None and (done.is_deleted() or done.is_ready()):
            return None
        behind = [
            f"{link.name} is {self._steps_begun - link.steps_begun} step(s) behind"
            for link in self.links
            if link.steps_begun < self._steps_begun
        ]
        reason = ", ".join(behind) or "the devices do not finish the step"
        return f"a step of process {self.rank} has been running for {elapsed:.0f} s: {reason}"

    def _on_connection_end(self, error: HostError | None) -> None:
        if error is None:  # the leader is done
            self._closed.set()
        else:
            self.end_all(str(error))

    def end_all(self, message: str) -> None:
        """Ends all processes, including this one, with a message. Later calls have no effect.

        A call in another thread waits for the first one, so that its own error is not printed too.
        """
        with self._ending:
            if not self._closed.is_set():
                self.fail(message)
                self._end(f"the process group ends: {message}")
