"""The check of a request's origin: pages of other sites must not call the server.

Every page that a browser has open can reach a server on the same machine. A request from another
site's page carries the site in `Origin`. After DNS rebinding, it carries the site's name in
`Host`. The server refuses both.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxattn.server.http.error_responses import refuse
from jaxattn.server.http.errors import ApiError
from jaxattn.server.settings import LOOPBACK


class AllowedOrigins:
    """ASGI middleware that refuses requests from the pages of other sites.

    Args:
        origins: The origins that may call, such as https://chat.example.org; "*" allows all.
        local: Whether the server listens only on loopback, so that `Host` must be a loopback name.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], *, local: bool):
        self._app, self._origins, self._local = app, frozenset(origins), local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is not None:
            return await refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    def _error(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._local and _name(f"//{host}") not in (*LOOPBACK, None):
            return ApiError(
                403, f"the Host header {host[:200]!r} does not name this server", code="host"
            )
        if origin is None or origin in self._origins or "*" in self._origins:
            return None
        if _authority(origin) == host:
            return None
        message = (
            f"pages of {origin[:200]!r} may not call this server; allow them with --cors-origin"
        )
        return ApiError(403, message, code="origin")


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
