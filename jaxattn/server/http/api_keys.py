"""API keys, read from the environment and a file, and compared in constant time."""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxattn.server.http.error_responses import refuse
from jaxattn.server.http.errors import ApiError

VARIABLE = "JAXATTN_API_KEY"
OPEN = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
OPEN_FOLDER = "/page/"  # the page's files, which contain no data of the model or its users


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the keys from JAXATTN_API_KEY and from a file with one key per line.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has no key, or a key is not printable ASCII without spaces.
    """
    keys = [environment[VARIABLE].strip()] if environment.get(VARIABLE, "").strip() else []
    if file is not None:
        lines = [line.strip() for line in file.read_text().splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"{file} has no key; write one key per line")
        keys += found
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("a key must be printable ASCII without spaces")
    return tuple(keys)


class ApiKeyAuth:
    """ASGI middleware that requires a key, except for `OPEN` paths and the page's files.

    Args:
        keys: The accepted keys. If there are none, every request passes.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        # Digests have equal lengths, so that the comparison's time does not reveal a key's length.
        self._app, self._digests = app, tuple(map(_digest, keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or _is_open(scope["path"]):
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS" or self._known(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        error = ApiError(
            401,
            "a valid API key is required: send it as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refuse(error, scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = headers.get("x-api-key", "")  # sent by Anthropic's clients
        given = _digest(key.strip())
        matches = [secrets.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_FOLDER)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
