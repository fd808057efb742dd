"""The access log: one JSON line per request, without prompts, answers, query strings and keys."""

import logging
import secrets
import time
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("jaxattn.access")
LEFT = 499  # nginx's status of a request whose client disconnected
MOST_ID_CHARACTERS = 128


class AccessLog:
    """ASGI middleware that logs each request at its end, and sets the `x-request-id` header.

    Args:
        enabled: Whether to log. The header is set in any case.
    """

    def __init__(self, app: ASGIApp, *, enabled: bool):
        self._app, self._enabled = app, enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.perf_counter(), 0
        id = _id(Headers(scope=scope).get("x-request-id", ""))
        log_fields: dict[str, Any] = {}
        scope.setdefault("state", {})["log"] = log_fields

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if self._enabled:
                line = {
                    "time": round(time.time(), 3),
                    "client": (scope.get("client") or ("",))[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": LEFT if log_fields.pop("left", False) else status,
                    "ms": round(1e3 * (time.perf_counter() - began), 1),
                    "id": id,
                    **log_fields,
                }
                LOG.info(orjson.dumps(line, default=str).decode())


def _id(given: str) -> str:
    """Returns the client's request id if it is printable ASCII and short, otherwise a new id."""
    plain = given.isascii() and given.isprintable() and given
    return given if plain and len(given) <= MOST_ID_CHARACTERS else secrets.token_hex(12)
