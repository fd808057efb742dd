"""One HTTP request and its answer: a body within limits, answered by JSON or an event stream.

If the client disconnects, or reads so slowly that a write times out, the server ends its work:
`HttpRequest.attended` cancels the task, and the task's `finally` block aborts the rows.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from jaxattn.server.http.chunk_writer import CHUNKS, ChunkWriter
from jaxattn.server.http.error_responses import error_form
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.settings import ServerSettings

LOG = logging.getLogger("jaxattn.server")
JSON = "application/json"
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # keeps nginx from buffering the events
}


class ClientClosed(Exception):
    """The client has disconnected, or no longer reads the answer."""


class HttpRequest:
    """A request and its response.

    Attributes:
        response_started: Whether the response's status has been sent.
        complete: Whether the response's last byte has been sent.
        log: Additional fields of the request's access log line.
        errors: The error format of the called API.
        stream_errors: The format of an error that ends a stream, by default `errors`.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: ServerSettings):
        self.request = Request(scope, receive)
        self.response_started = self.complete = False
        self.errors = self.stream_errors = error_form(scope["path"])
        self.log: dict[str, Any] = scope.setdefault("state", {}).setdefault("log", {})
        self._receive, self._send, self._settings = receive, send, settings

    async def fields(self) -> JsonFields:
        """Reads the body, which must be a JSON object.

        Raises:
            ApiError: 413 if it is too large, 408 if it takes too long, 400 if it is not an object.
            ClientClosed: If the client disconnects before the end of the body.
        """
        data = await self._body()
        try:
            values = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            message = f"the body is not valid JSON: {error}"
            raise ApiError(400, message, code="invalid_json") from None
        if not isinstance(values, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        return JsonFields(values)

    def path(self, name: str) -> str:
        """Returns a parameter of the path, such as the id of a model."""
        return str(self.request.path_params[name])

    async def _body(self) -> bytes:
        max_bytes, data = self._settings.max_body_bytes, bytearray()
        length = self.request.headers.get("content-length", "0")
        large = ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="body_too_large")
        if not length.isdecimal() or int(length) > max_bytes:
            raise large
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                async for piece in self.request.stream():
                    data += piece
                    if len(data) > max_bytes:
                        raise large
        except TimeoutError:
            seconds = self._settings.body_seconds
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
        except ClientDisconnect:
            raise ClientClosed from None
        return bytes(data)

    async def attended(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, and cancels it if the client disconnects. Read the body before the call.

        Raises:
            ClientClosed: If the client disconnected.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() or self.complete:
                return await task
            raise ClientClosed
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def json(
        self, values: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a JSON response."""
        await self.whole(orjson.dumps(values), status, {"content-type": JSON} | dict(headers or {}))

    async def whole(self, data: bytes, status: int, headers: Mapping[str, str]) -> None:
        await self._begin(status, {**headers, "content-length": str(len(data))})
        await self._write(data, more_body=False)

    async def refuse(self, error: ApiError) -> None:
        """Sends an error as the response, or as the last event of a stream that has begun."""
        if not self.response_started:
            await self.json(self.errors.body(error), error.status, error.headers)
        elif not self.complete:
            await self.stream(self.stream_errors.stream_end(error), more_body=False)

    def chunks(self) -> ChunkWriter | None:
        """Returns the direct writer to a stream that has begun; None if the connection has none.

        The caller must not use it during another write.
        """
        return self.request.scope.get("extensions", {}).get(CHUNKS)

    async def begin_events(self) -> None:
        await self._begin(200, EVENTS)

    async def stream(self, data: bytes, *, more_body: bool = True) -> None:
        """Sends the bytes of events in one write. Sends nothing if `data` is empty, except at the
        end of the stream."""
        if data or not more_body:
            await self._write(data, more_body=more_body)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.response_started = True
        pairs = [
            (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes, *, more_body: bool = True) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more_body}
        try:
            async with asyncio.timeout(self._settings.write_seconds):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientClosed from None
        self.complete = not more_body


Handler = Callable[[HttpRequest], Awaitable[None]]


class Endpoint:
    """An ASGI application that runs one handler, sends its errors, and ignores disconnects.

    Args:
        on_rejected: Called with the status of each error response.
    """

    def __init__(
        self, handler: Handler, settings: ServerSettings, on_rejected: Callable[[int], None]
    ) -> None:
        self._handler, self._settings, self._on_rejected = handler, settings, on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpRequest(scope, receive, send, self._settings)
        with contextlib.suppress(ClientClosed):
            try:
                await self._handler(exchange)
            except ApiError as error:
                exchange.log["error"] = error.code or error.param
                self._on_rejected(error.status)
                await exchange.refuse(error)
            except ClientClosed:
                exchange.log["left"] = True
            except Exception:  # a bug: the client gets no details, and other requests go on
                LOG.exception("an unexpected error ended a request")
                self._on_rejected(500)
                await exchange.refuse(
                    ApiError(500, "internal server error; the server's log has the details")
                )
