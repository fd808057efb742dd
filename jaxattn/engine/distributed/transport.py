"""Connections between the processes of one engine: messages of numbers, and who is gone.

    links = lead("0.0.0.0:9876", processes=2)       in the process that leads
    link = follow("host-0:9876")                    in each of the others

A message is 9 int32 numbers and an array of int32; a text goes as the numbers of its bytes. It is
read as numbers and nothing else. Once a link listens, a thread reads what comes in.
"""

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Of steps, and of the processes themselves.
UPDATE, COPY, PREFILL, WANTED, REMEMBER, FIRST, DECODE, MASKS, FORGET, END = range(10)
FACTS, AGREED, FAILED, ALIVE = range(10, 14)
HEAD = 9
MAGIC = 0x6A786174
MOST_NUMBERS = 2**28  # of an array


class HostError(RuntimeError):
    """Another process of the engine is gone, or is not of this engine."""


class TransportMessage(NamedTuple):
    """What came: its kind, its array if it has one, the numbers at the end of its head."""

    kind: int
    array: np.ndarray | None
    numbers: list[int]

    @property
    def text(self) -> str:
        return "" if self.array is None else self.array.astype(np.uint8).tobytes().decode()


class TransportLink:
    """A connection between the leader and another process.

    Attributes:
        name: of the other process, for people.
        heard: when something came last, by `time.monotonic`.
        taken: how many steps the other process has sent to its devices, as it last said.
    """

    def __init__(self, connection: socket.socket, name: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self.name = connection, name
        self._sending = threading.Lock()
        self._reader: threading.Thread | None = None
        self._closing = False
        self._came: queue.SimpleQueue[TransportMessage | HostError] | None = None
        self.heard, self.taken = time.monotonic(), 0

    def send(self, kind: int, array: np.ndarray | None = None, *numbers: int) -> None:
        """Sends a message.

        Raises:
            HostError: the other process is gone.
        """
        with self._sending:
            self._send(_packed(kind, array, numbers))

    def send_text(self, kind: int, text: str) -> None:
        """Sends a text as a message.

        Raises:
            HostError: the other process is gone.
        """
        self.send(kind, _numbers_of(text))

    def offer(self, kind: int, text: str | None = None, *numbers: int, wait: float = 0.0) -> bool:
        """Sends a short message if the connection takes it, and says whether it did.

        A process that is stopped takes none once its buffers are full: `send` then waits for ever,
        and with it whoever sends next.

        Args:
            wait: seconds for a message that is being sent.

        Raises:
            HostError: the other process is gone.
        """
        if not self._sending.acquire(timeout=wait):
            return False
        try:
            ready = select.poll()
            ready.register(self._connection, select.POLLOUT)
            if not ready.poll(0):
                return False
            self._send(_packed(kind, None if text is None else _numbers_of(text), numbers))
            return True
        finally:
            self._sending.release()

    def _send(self, message: bytes) -> None:
        try:
            self._connection.sendall(message)
        except OSError as error:
            raise HostError(f"{self.name} is gone: {error.strerror or error}") from error

    def receive(self) -> TransportMessage:
        """The next message that is no ALIVE.

        Raises:
            HostError: the other process is gone, sends something else, or failed: what it said.
        """
        while True:
            found = self._read_message() if self._came is None else self._came.get()
            if isinstance(found, HostError):
                raise found
            if found.kind == FAILED:
                raise HostError(found.text)
            if found.kind != ALIVE:
                return found

    def listen(self, on_end: Callable[[HostError | None], None]) -> None:
        """Reads in a thread from here on.

        Args:
            on_end: called from the thread when the other process fails or is gone, with what to say
                of it, or with None when it has sent END.
        """
        came = self._came = queue.SimpleQueue()

        def read() -> None:
            while True:
                try:
                    message = self._read_message()
                except HostError as error:
                    came.put(error)
                    return on_end(error)
                self.heard = time.monotonic()
                if message.kind == ALIVE:
                    self.taken = message.numbers[-1]
                    continue
                came.put(message)
                if message.kind == FAILED:
                    return on_end(HostError(message.text))
                if message.kind == END:
                    return on_end(None)

        def read_and_close() -> None:
            read()
            if self._closing:
                self._connection.close()

        self._reader = threading.Thread(target=read_and_close, name=f"from {self.name}")
        self._reader.daemon = True
        self._reader.start()

    def close(self) -> None:
        """Sends no more. What was sent arrives, and a thread that reads does so to the end."""
        self._closing = True
        with contextlib.suppress(OSError):  # the other was first
            self._connection.shutdown(socket.SHUT_WR)
        if self._reader is None or not self._reader.is_alive():
            self._connection.close()

    def _read_message(self) -> TransportMessage:
        head = np.frombuffer(self._read(4 * HEAD), np.int32)
        shape = tuple(int(side) for side in head[3 : 3 + head[2]])
        known = head[0] == MAGIC and 0 <= head[2] <= 2 and 0 <= head[1] <= ALIVE
        if not known or min(shape, default=0) < 0 or int(np.prod(shape)) > MOST_NUMBERS:
            raise HostError(f"{self.name} is no process of this engine")
        array = None
        if shape:
            data = self._read(4 * int(np.prod(shape)))
            array = np.frombuffer(data, np.int32).reshape(shape)
        return TransportMessage(int(head[1]), array, head[5:].tolist())

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


def _packed(kind: int, array: np.ndarray | None, numbers: Sequence[int]) -> bytes:
    """A message as it is sent."""
    shape = () if array is None else array.shape
    head = np.zeros(HEAD, np.int32)
    head[: 3 + len(shape)] = MAGIC, kind, len(shape), *shape
    head[HEAD - len(numbers) : HEAD] = numbers
    body = b"" if array is None else np.ascontiguousarray(array, np.int32).tobytes()
    return head.tobytes() + body


def _numbers_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def listen_for_workers(
    address: str, processes: int, *, timeout: float = 300.0
) -> list[TransportLink]:
    """The leader's links to the others, as soon as all are there.

    Args:
        address: "HOST:PORT" to listen at.
        processes: of the engine, this one included.

    Raises:
        HostError: some have not come in `timeout` seconds; how many is said.
    """
    host, port = host_and_port(address)
    links: list[TransportLink] = []
    end = time.monotonic() + timeout
    with socket.create_server((host, port)) as server:
        while len(links) < processes - 1:
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                connection, (name, *_) = server.accept()
            except TimeoutError as error:
                raise HostError(
                    f"{len(links)} of {processes - 1} other processes came to {address} in "
                    f"{timeout:.0f} s; start the others, or give another number of processes"
                ) from error
            connection.settimeout(None)
            links.append(TransportLink(connection, f"a process at {name}"))
    return links


def connect_to_driver(address: str, *, timeout: float = 300.0) -> TransportLink:
    """The link to the leader at "HOST:PORT", which may still be starting.

    Raises:
        HostError: there is none in `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(host_and_port(address), timeout=5)
            connection.settimeout(None)
            return TransportLink(connection, f"the leader at {address}")
        except OSError as error:
            if time.monotonic() > end:
                raise HostError(
                    f"no leader at {address} in {timeout:.0f} s: {error.strerror or error}"
                ) from error
            time.sleep(0.2)


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "HOST:PORT".

    Raises:
        ValueError: it is written in another way.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address is HOST:PORT; got {address!r}")
    return host.strip("[]"), int(port)
