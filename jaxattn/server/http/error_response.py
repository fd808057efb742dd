"""Error responses outside of an `HttpRequest`."""

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxattn.server.http.errors import ApiError


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error."""
    await response(error)(scope, receive, send)


def response(error: ApiError) -> Response:
    """The error's status, headers and body."""
    return Response(
        orjson.dumps(error.body), error.status, error.headers, media_type="application/json"
    )
