"""Origins of web pages that may call the server: its own, and those that were named.

A server on one's own machine can be reached by every page that the browser there has open. A
request from another site has that site in its `Origin`, or a name of it in `Host` where the name
was made to point here. Both are refused.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxattn.server.http.error_responses import refuse
from jaxattn.server.http.errors import ApiError
from jaxattn.server.settings import LOOPBACK


class AllowedOrigins:
    """Refuses requests of other sites' pages.

    Args:
        origins: sites that may call, such as https://chat.example.org; "*" is every site.
        local: whether the server listens on loopback alone, where `Host` must be a name of it.
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
            return ApiError(403, f"the host {host[:200]!r} is not this server's", code="host")
        if origin is None or origin in self._origins or "*" in self._origins:
            return None
        if _authority(origin) == host:
            return None
        message = f"pages of {origin[:200]!r} may not call this server; --cors-origin names those"
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
