"""uvicorn's HTTP/1.1 connection, with a time limit for a request's headers.

uvicorn waits for headers without a limit, so clients that never complete them could take every
file descriptor. It also waits without a limit for the rest of a body that was answered early.
The configuration here disables WebSockets and fixes the parser, which uvicorn would otherwise
choose by the installed packages.
"""

import asyncio
import functools
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxattn.server.http.chunk_writer import CHUNKS, ChunkWriter
from jaxattn.server.settings import ServerSettings

# The time that an idle connection stays open. A client that sends a request just when its
# connection is closed gets no answer, so this is longer than clients and proxies keep one: aiohttp
# 15 s, nginx and load balancers 60 s. uvicorn's default is 5 s.
KEEP_ALIVE_SECONDS = 75


class UvicornConfig(uvicorn.Config):
    """uvicorn's configuration for this server.

    Args:
        close_seconds: The time that connections get to close at the shutdown.

    Attributes:
        head_seconds: The time limit for a request's headers.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, close_seconds: int):
        super().__init__(
            app,
            http=HttpConnection,
            ws="none",
            access_log=False,
            log_config=None,
            log_level="critical",  # its warnings about broken requests are noise
            server_header=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=close_seconds,
        )
        self.head_seconds = settings.body_seconds


class HttpConnection(H11Protocol):
    """A connection that closes if a request's headers, or the rest of a body that was answered
    early, do not arrive in time."""

    config: UvicornConfig

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None

        self.app = functools.partial(self._with_chunks, self.app)

    async def _with_chunks(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application with a `ChunkWriter` in its scope."""
        if scope["type"] == "http" and scope["http_version"] == "1.1":
            scope.setdefault("extensions", {})[CHUNKS] = ChunkWriter(self)
        await app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answered = self.cycle is None or self.cycle.response_complete
        if self.conn.their_state is h11.IDLE:
            if self._head_timer is None:  # a connection that was idle
                self._await()
        elif not answered:
            self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun or self.conn.their_state is h11.SEND_BODY:
            self._await()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _await(self) -> None:
        self._cancel()
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.config.head_seconds, self.transport.close)

    def _cancel(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
