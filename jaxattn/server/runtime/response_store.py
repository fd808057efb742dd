"""A bounded in-memory store of responses, so that a later request can continue one."""

import collections
import dataclasses
from typing import Any

import orjson

from jaxattn.server.http.errors import ApiError

MOST_RESPONSES = 4096
MOST_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its conversation, as JSON.

    Attributes:
        response: The response as it was sent.
        items: The items of the whole conversation, including the response's output.
        output: The ids of the response's output items.
    """

    response: bytes
    items: bytes
    output: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """An LRU cache of responses.

    Args:
        max_responses: The maximum number of responses.
        max_bytes: The maximum total size.
    """

    def __init__(self, max_responses: int = MOST_RESPONSES, max_bytes: int = MOST_BYTES):
        self._max_responses, self._max_bytes, self._bytes = max_responses, max_bytes, 0
        self._responses: collections.OrderedDict[str, StoredResponse] = collections.OrderedDict()
        self._response_ids: dict[str, str] = {}

    def put(self, response: dict[str, Any], items: list[Any]) -> None:
        """Stores a response and the items that it answered, unless it exceeds `max_bytes`."""
        output = response["output"]
        ids = tuple(item["id"] for item in output)
        stored = StoredResponse(orjson.dumps(response), orjson.dumps([*items, *output]), ids)
        self._responses[response["id"]] = stored
        self._response_ids |= dict.fromkeys(ids, response["id"])
        self._bytes += stored.size
        while self._bytes > self._max_bytes or len(self._responses) > self._max_responses:
            self.remove(next(iter(self._responses)), "response_id")

    def items(self, id: str, param: str) -> list[Any]:
        """Returns the items of a conversation up to a response, including its output.

        Args:
            param: The field that names the response, for the error.

        Raises:
            ApiError: 404 if the response is not stored.
        """
        return orjson.loads(self._get(id, param).items)

    def response(self, id: str) -> dict[str, Any]:
        """Returns a response as it was sent.

        Raises:
            ApiError: 404 if it is not stored.
        """
        return orjson.loads(self._get(id, "response_id").response)

    def item(self, id: str) -> dict[str, Any] | None:
        """Returns an output item of a stored response; None if no response has it."""
        of = self._response_ids.get(id)
        found = self.response(of)["output"] if of is not None else []
        return next((item for item in found if item["id"] == id), None)

    def remove(self, id: str, param: str) -> None:
        """Deletes a response.

        Raises:
            ApiError: 404 if it is not stored.
        """
        stored = self._get(id, param)
        del self._responses[id]
        self._bytes -= stored.size
        for item in stored.output:
            del self._response_ids[item]

    def _get(self, id: str, param: str) -> StoredResponse:
        stored = self._responses.get(id)
        if stored is None:
            raise ApiError(
                404,
                f"{param} {id[:100]!r} is not stored: the server keeps at most the last "
                f"{self._max_responses:,} responses and {self._max_bytes >> 20} MiB in memory, and "
                "none with store: false; send the whole conversation as input",
                param=param,
                code="previous_response_not_found",
            )
        self._responses.move_to_end(id)
        return stored
