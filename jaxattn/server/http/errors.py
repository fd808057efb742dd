"""Refusals in OpenAI's form: a status, a message, the field's name and a code."""

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
    """A request that is not served, or an answer that does not come to its end.

    Args:
        status: of HTTP.
        message: what is wrong, and what to change.
        param: the field.
        code: a word for programs, such as "context_length_exceeded".
        headers: of the response, beside the usual ones.
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
        """The error with other names of fields, in `param` and in the message.

        Args:
            names: of fields here -> of those that the client sent. The first that fits counts.
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
        """What the client reads, in a response of its own or as an event of a stream."""
        kind = TYPES.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """Status 400 for a field."""
    return ApiError(400, message, param=param, code=code)


@contextlib.contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields of the API that was called; see `ApiError.renamed`."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error
