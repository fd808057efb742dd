"""Error responses in the format of the called API, which is OpenAI's or Anthropic's."""

import abc
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.event_stream import DONE, data_events, named_events

MESSAGES = "/v1/messages"  # this path and the paths below it belong to Anthropic's API
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorForm(abc.ABC):
    """The error format of an API."""

    @abc.abstractmethod
    def body(self, error: ApiError) -> dict[str, Any]:
        """Returns the body of the error response."""

    @abc.abstractmethod
    def stream_end(self, error: ApiError) -> bytes:
        """Returns the last bytes of a stream that the error ends."""


class OpenAIErrors(ErrorForm):
    """`{"error": {"message", "type", "param", "code"}}`."""

    def body(self, error: ApiError) -> dict[str, Any]:
        return error.body

    def stream_end(self, error: ApiError) -> bytes:
        return data_events([error.body]) + DONE


class AnthropicErrors(ErrorForm):
    """`{"type": "error", "error": {"type", "message", "param"}}`; the message names the field."""

    def body(self, error: ApiError) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(error.status, "api_error")
        message = error.message
        if error.param and error.param not in message:
            message = f"{error.param}: {message}"
        found = {"type": kind, "message": message, "param": error.param}
        return {"type": "error", "error": found}

    def stream_end(self, error: ApiError) -> bytes:
        return named_events([self.body(error)])


def error_form(path: str) -> ErrorForm:
    """Returns the error format of the API that a path belongs to."""
    anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return AnthropicErrors() if anthropic else OpenAIErrors()


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error response."""
    await response(error, scope["path"])(scope, receive, send)


def response(error: ApiError, path: str) -> Response:
    """Returns the error response in the format of the API that the path belongs to."""
    body = orjson.dumps(error_form(path).body(error))
    return Response(body, error.status, error.headers, media_type="application/json")
