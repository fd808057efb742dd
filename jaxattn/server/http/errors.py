"""API errors in OpenAI's format: a status, a message, the field's name and a code."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """The error of a request that is refused, or of an answer that is not completed.

    Args:
        status: The HTTP status.
        message: The reason, and what to change.
        param: The name of the field, if one is at fault.
        code: A machine-readable reason, such as "context_length_exceeded".
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Returns the error with the client's field name in `param` and in the message.

        Args:
            names: A map from internal field names to the client's. The first match counts.
        """
        for name, other in names.items():
            if self.param is not None and re.match(rf"{re.escape(name)}(?![\w])", self.param):
                message = re.sub(rf"\b{re.escape(name)}(?![\w])", other, self.message)
                param = other + self.param[len(name) :]
                return ApiError(
                    self.status, message, param=param, code=self.code, headers=self.headers
                )
        return self

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, sent as a response or as an event of a stream."""
        kind = TYPES.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """Returns the 400 error of a field."""
    return ApiError(400, message, param=param, code=code)


@contextlib.contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """A context whose errors name the fields of the called API; see `ApiError.renamed`."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error
