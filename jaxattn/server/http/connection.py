"""One connection: uvicorn's HTTP/1.1, with a limit to the time that a request's head may take.

uvicorn waits for a head for as long as a client likes, so that clients who never end theirs would
take every file descriptor. It waits as long for the rest of a body that was answered before its
end. It also takes up WebSockets and another parser where packages for them
are installed; a server should not depend on what else is.
"""

import asyncio
import functools
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxattn.server.settings import ServerSettings

CHUNKS = "jaxattn.chunks"  # among a scope's extensions


class ChunkWriter:
    """Writes chunks of a response that has begun, without h11 and without a task of its own.

    A token of 128 streams is 128 small writes, for which h11 and a task's wake-up take longer than
    the write itself. h11 keeps no count of a chunked body, so both may write to one response.

    Args:
        connection: of the response, whose body is chunked.
    """

    def __init__(self, connection: "HttpConnection"):
        self._connection = connection

    @property
    def ready(self) -> bool:
        """Whether what is written leaves at once, or soon."""
        connection = self._connection
        return not (connection.flow.write_paused or connection.transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a chunk, which is not empty."""
        self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class UvicornConfig(uvicorn.Config):
    """uvicorn's settings.

    Args:
        close_seconds: that connections have to end after the last answer.

    Attributes:
        head_seconds: for a request's head to arrive.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, close_seconds: int):
        super().__init__(
            app,
            http=HttpConnection,
            ws="none",
            access_log=False,
            log_config=None,
            log_level="critical",  # what it says of broken requests is noise
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=close_seconds,
        )
        self.head_seconds = settings.body_seconds


class HttpConnection(H11Protocol):
    """Closes itself where a head, or a body's rest behind its answer, does not arrive in time."""

    config: UvicornConfig

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._late: asyncio.TimerHandle | None = None

        self.app = functools.partial(self._with_chunks, self.app)

    async def _with_chunks(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, which may write a stream's chunks without an `await`."""
        if scope["type"] == "http" and scope["http_version"] == "1.1":
            scope.setdefault("extensions", {})[CHUNKS] = ChunkWriter(self)
        await app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _await(self) -> None:
        self._cancel()
        if not self.transport.is_closing():
            self._late = self.loop.call_later(self.config.head_seconds, self.transport.close)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
