"""Error responses outside of an `HttpRequest`."""

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxattn.server.http.error_forms import error_form
from jaxattn.server.http.errors import ApiError


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error."""
    await response(error, scope["path"])(scope, receive, send)


def response(error: ApiError, path: str) -> Response:
    """The error's status, headers and body, in the form of the API that the path belongs to."""
    body = orjson.dumps(error_form(path).body(error))
    return Response(body, error.status, error.headers, media_type="application/json")
