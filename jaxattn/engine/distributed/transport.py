"""Connections between the processes of one engine: messages of numbers, and lost connections.

    links = listen_for_workers("0.0.0.0:9876", processes=2)    in the leader
    link = connect_to_driver("host-0:9876")                    in each of the others

A message is 9 int32 numbers and an array of int32. A text is sent as the values of its bytes. The
receiver only reads numbers, so a message cannot run code. Once a link listens, a thread reads the
incoming messages.
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

# Kinds of messages: of steps, and of the processes themselves.
UPDATE, COPY, PREFILL, WANTED, REMEMBER, FIRST, DECODE, MASKS, FORGET, END = range(10)
FACTS, AGREED, FAILED, ALIVE = range(10, 14)
HEAD = 9
MAGIC = 0x6A786174
MOST_NUMBERS = 2**28  # per array


class HostError(RuntimeError):
    """Another process is gone, or does not belong to this engine."""


class TransportMessage(NamedTuple):
    """A received message: its kind, its array or None, and the last numbers of its head."""

    kind: int
    array: np.ndarray | None
    numbers: list[int]

    @property
    def text(self) -> str:
        return "" if self.array is None else self.array.astype(np.uint8).tobytes().decode()


class TransportLink:
    """A connection between the leader and another process.

    Attributes:
        name: The name of the other process, for messages.
        last_received: The time of the last received message, by `time.monotonic`.
        steps_begun: The number of steps that the other process has sent to its devices, as it last
            reported.
    """

    def __init__(self, connection: socket.socket, name: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self.name = connection, name
        self._sending = threading.Lock()
        self._reader: threading.Thread | None = None
        self._closing = False
        self._inbox: queue.SimpleQueue[TransportMessage | HostError] | None = None
        self.last_received, self.steps_begun = time.monotonic(), 0

    def send(self, kind: int, array: np.ndarray | None = None, *numbers: int) -> None:
        """Sends a message.

        Raises:
            HostError: The other process is gone.
        """
        with self._sending:
            self._send(_packed(kind, array, numbers))

    def send_text(self, kind: int, text: str) -> None:
        """Sends a text as a message.

        Raises:
            HostError: The other process is gone.
        """
        self.send(kind, _numbers_of(text))

    def offer(
        self, kind: int, text: str | None = None, *numbers: int, timeout: float = 0.0
    ) -> bool:
        """Sends a short message if the connection accepts it. Returns whether it did.

        A closed link accepts no message. A stopped process accepts none once its buffers are full.
        Then `send` waits forever, and so does every later sender.

        Args:
            timeout: The seconds to wait while another message is being sent.

        Raises:
            HostError: The other process is gone.
        """
        if not self._sending.acquire(timeout=timeout):
            return False
        try:
            if self._closing:
                return False
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
            raise HostError(
                f"the connection to {self.name} failed: {error.strerror or error}"
            ) from error

    def receive(self) -> TransportMessage:
        """Returns the next message that is not ALIVE.

        Raises:
            HostError: The other process is gone, sends something else, or failed. In the last case
                the error has its message.
        """
        while True:
            found = self._read_message() if self._inbox is None else self._inbox.get()
            if isinstance(found, HostError):
                raise found
            if found.kind == FAILED:
                raise HostError(found.text)
            if found.kind != ALIVE:
                return found

    def listen(self, on_end: Callable[[HostError | None], None]) -> None:
        """Starts a thread that reads incoming messages from now on.

        Args:
            on_end: A function that the thread calls when the other process fails or is gone, with
                an error that describes it, or with None when the process has sent END.
        """
        inbox = self._inbox = queue.SimpleQueue()

        def read() -> None:
            while True:
                try:
                    message = self._read_message()
                except HostError as error:
                    inbox.put(error)
                    return on_end(error)
                self.last_received = time.monotonic()
                if message.kind == ALIVE:
                    self.steps_begun = message.numbers[-1]
                    continue
                inbox.put(message)
                if message.kind == FAILED:
                    return on_end(HostError(message.text))
                if message.kind == END:
                    return on_end(None)

        def read_and_close() -> None:
            read()
            if self._closing:
                self._close_connection()

        self._reader = threading.Thread(target=read_and_close, name=f"from {self.name}")
        self._reader.daemon = True
        self._reader.start()

    def close(self) -> None:
        """Stops sending. Sent messages still arrive, and a reading thread reads to the end."""
        self._closing = True
        with contextlib.suppress(OSError):  # the other process closed it first
            self._connection.shutdown(socket.SHUT_WR)
        if self._reader is None or not self._reader.is_alive():
            self._close_connection()

    def _close_connection(self) -> None:
        # No thread polls or writes meanwhile. The shutdown has ended a write that waited.
        with self._sending:
            self._connection.close()

    def _read_message(self) -> TransportMessage:
        head = np.frombuffer(self._read(4 * HEAD), np.int32)
        shape = tuple(int(side) for side in head[3 : 3 + head[2]])
        known = head[0] == MAGIC and 0 <= head[2] <= 2 and 0 <= head[1] <= ALIVE
        if not known or min(shape, default=0) < 0 or int(np.prod(shape)) > MOST_NUMBERS:
            raise HostError(f"{self.name} is not a process of this engine")
        array = None
        if shape:
            data = self._read(4 * int(np.prod(shape)))
            array = np.frombuffer(data, np.int32).reshape(shape)
        return TransportMessage(int(head[1]), array, head[5:].tolist())

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._connection.recv(size - len(data))
            except OSError as error:
                raise HostError(
                    f"the connection to {self.name} failed: {error.strerror or error}"
                ) from error
            if not part:
                raise HostError(f"the connection to {self.name} failed: the other side closed it")
            data += part
        return bytes(data)


def _packed(kind: int, array: np.ndarray | None, numbers: Sequence[int]) -> bytes:
    """Returns the bytes of a message."""
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
    """Returns the leader's links to the others, once all have connected.

    Args:
        address: The "HOST:PORT" to listen at.
        processes: The number of processes of the engine, including this one.

    Raises:
        HostError: Some have not connected in `timeout` seconds; the message has the number.
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
                    f"{len(links)} of {processes - 1} other processes connected to {address} "
                    f"within {timeout:.0f} s; start the others, or change the number of processes"
                ) from error
            connection.settimeout(None)
            links.append(TransportLink(connection, f"a process at {name}"))
    return links


def connect_to_driver(address: str, *, timeout: float = 300.0) -> TransportLink:
    """Returns the link to the leader at "HOST:PORT", which may still be starting.

    Raises:
        HostError: No leader accepts the connection in `timeout` seconds.
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
                    f"no connection to the leader at {address} within {timeout:.0f} s: "
                    f"{error.strerror or error}"
                ) from error
            time.sleep(0.2)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of "HOST:PORT".

    Raises:
        ValueError: The address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address must be HOST:PORT; got {address!r}")
    return host.strip("[]"), int(port)
