"""Several processes that run one engine: one leads, the others send the steps that it sends.

Every process makes the same engine over the devices of all of them, after
`jax.distributed.initialize`, and warms it up. Then the leader takes requests, and sends what each
step is given to the others before it sends the step itself. A process that follows has no
scheduler: it runs the leader's steps in the leader's order, and reads no token.

    leader                                  others
    links = lead("0.0.0.0:9876", 2)         link = follow("host-0:9876")
    engine.lead(links)                      engine.follow(link)        until the leader closes

A message is 8 int32 numbers and the arrays, all int32. It is read as numbers and nothing else.
"""

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxattn.engine.model_steps import EntryPoint
from jaxattn.engine.runner import Runner
from jaxattn.engine.sampling import Level

UPDATE, COPY, PREFILL, FIRST, DECODE, MASKS, FORGET, END = range(8)
HEAD = 8
MAGIC = 0x6A786174


class HostError(RuntimeError):
    """Another process of the engine is gone, or is not of this engine."""


class Link:
    """A connection between the leader and another process."""

    def __init__(self, connection: socket.socket, name: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self.name = connection, name

    def send(self, kind: int, array: np.ndarray | None = None, *numbers: int) -> None:
        """Sends a message.

        Raises:
            HostError: the other process is gone.
        """
        shape = () if array is None else array.shape
        head = np.zeros(HEAD, np.int32)
        head[: 3 + len(shape)] = MAGIC, kind, len(shape), *shape
        head[HEAD - len(numbers) : HEAD] = numbers
        body = b"" if array is None else np.ascontiguousarray(array, np.int32).tobytes()
        try:
            self._connection.sendall(head.tobytes() + body)
        except OSError as error:
            raise HostError(f"{self.name} is gone: {error.strerror or error}") from error

    def receive(self) -> tuple[int, np.ndarray | None, list[int]]:
        """(kind, the array, the numbers at the end of the head) of the next message.

        Raises:
            HostError: the other process is gone, or sends something else.
        """
        head = np.frombuffer(self._read(4 * HEAD), np.int32)
        if head[0] != MAGIC or not 0 <= head[2] <= 2:
            raise HostError(f"{self.name} is no process of this engine")
        shape = tuple(int(side) for side in head[3 : 3 + head[2]])
        array = None
        if shape:
            data = self._read(4 * int(np.prod(shape)))
            array = np.frombuffer(data, np.int32).reshape(shape)
        return int(head[1]), array, head[5:].tolist()

    def close(self) -> None:
        self._connection.close()

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self._connection.recv(size - len(found))
            except OSError as error:
                raise HostError(f"{self.name} is gone: {error.strerror or error}") from error
            if not part:
                raise HostError(f"{self.name} is gone: it closed its connection")
            found += part
        return bytes(found)


def lead(address: str, processes: int, *, timeout: float = 300.0) -> list[Link]:
    """The leader's links to the others, as soon as all are there.

    Args:
        address: "HOST:PORT" to listen at.
        processes: of the engine, this one included.

    Raises:
        HostError: some have not come in `timeout` seconds; how many is said.
    """
    host, port = _host_and_port(address)
    links: list[Link] = []
    with socket.create_server((host, port)) as server:
        server.settimeout(timeout)
        while len(links) < processes - 1:
            try:
                connection, (name, *_) = server.accept()
            except TimeoutError as error:
                raise HostError(
                    f"{len(links)} of {processes - 1} other processes came to {address} in "
                    f"{timeout:.0f} s; start the others, or give another number of processes"
                ) from error
            connection.settimeout(None)
            links.append(Link(connection, name))
    return links


def follow(address: str, *, timeout: float = 300.0) -> Link:
    """The link to the leader at "HOST:PORT", which may still be starting.

    Raises:
        HostError: there is none in `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(_host_and_port(address), timeout=5)
            connection.settimeout(None)
            return Link(connection, f"the leader at {address}")
        except OSError as error:
            if time.monotonic() > end:
                raise HostError(
                    f"no leader at {address} in {timeout:.0f} s: {error.strerror or error}"
                ) from error
            time.sleep(0.2)


class Leader(Runner):
    """A runner that sends what its steps are given to the other processes first."""

    links: Sequence[Link] = ()

    @classmethod
    def of(cls, runner: Runner, links: Sequence[Link]) -> "Leader":
        found = cls(
            runner.limits,
            runner.executables,
            runner.weights,
            runner.state,
            runner.rows,
            runner.seal,
            runner.group,
        )
        found.links = links
        return found

    def update(self, packed: np.ndarray) -> None:
        self._tell(UPDATE, packed)
        super().update(packed)

    def prefill(self, entry: EntryPoint, packed: np.ndarray, *, remember: bool) -> jax.Array:
        self._tell(PREFILL, packed, entry.rows, entry.tokens, int(remember))
        return super().prefill(entry, packed, remember=remember)

    def copy(self, source: int, target: int) -> None:
        self._tell(COPY, np.array([source, target], np.int32))
        super().copy(source, target)

    def first(
        self, logits: jax.Array, places: np.ndarray, level: Level, words: np.ndarray | None
    ) -> jax.Array:
        self._tell(FIRST, places, int(level), int(words is not None))
        if words is not None:
            self._tell(MASKS, words)
        return super().first(logits, places, level, words)

    def decode(
        self,
        places: np.ndarray,
        level: Level,
        words: Callable[[int], np.ndarray] | None = None,
    ) -> jax.Array:
        self._tell(DECODE, places, int(level), int(words is not None))
        return super().decode(places, level, words and functools.partial(self._told, words))

    def _told(self, words: Callable[[int], np.ndarray], lines: int) -> np.ndarray:
        found = words(lines)
        self._tell(MASKS, found)
        return found

    def forget(self) -> None:
        self._tell(FORGET)
        super().forget()

    def delete(self) -> None:
        with contextlib.suppress(HostError):  # who is gone needs no word
            self._tell(END)
        super().delete()

    def _tell(self, kind: int, array: np.ndarray | None = None, *numbers: int) -> None:
        for link in self.links:
            link.send(kind, array, *numbers)


def run_as_told(runner: Runner, link: Link) -> None:
    """Sends the leader's steps, until it closes its engine.

    Raises:
        HostError: the leader is gone.
    """
    logits: Any = None
    while True:
        kind, array, numbers = link.receive()
        if kind == END:
            return
        if kind == FORGET:
            runner.forget()
            continue
        assert array is not None, "all others have one"
        if kind == UPDATE:
            runner.update(array)
        elif kind == COPY:
            runner.copy(*array.tolist())
        elif kind == PREFILL:
            rows, tokens, remember = numbers
            entry = EntryPoint("prefill", rows, tokens)
            logits = runner.prefill(entry, array, remember=bool(remember))
        elif kind == FIRST:
            *_, level, masked = numbers
            runner.first(logits, array, Level(level), _masks(link) if masked else None)
        elif kind == DECODE:
            *_, level, masked = numbers
            runner.decode(array, Level(level), (lambda lines: _masks(link)) if masked else None)


def _masks(link: Link) -> np.ndarray:
    """The masks that the leader sends for the step before it is sampled."""
    kind, words, _ = link.receive()
    if kind != MASKS or words is None:
        raise HostError(f"{link.name} sends no masks where they are due")
    return words


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"an address is HOST:PORT; got {address!r}")
    return host, int(port)
