"""Request ids: the ones that requests came with, and unused ones for the others."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from jaxattn.engine.requests.request import Request

MOST_IDS = 2**31


def assign_request_ids(requests: Iterable[Any]) -> list[Request]:
    """Returns the requests with unique ids. One without an id gets its index, or an unused number.

    Raises:
        TypeError: `requests` is a single request, or an element is not a request.
        ValueError: Two requests have the same id; the message names both indices.
    """
    if isinstance(requests, Request):
        raise TypeError("requests must be a list of jaxattn.Request; write [request]")
    if not isinstance(requests, Iterable):
        raise TypeError(
            f"requests must be a list of jaxattn.Request, got {type(requests).__name__}"
        )
    found = list(requests)
    taken: dict[int, int] = {}
    for place, request in enumerate(found):
        id = getattr(request, "id", None)
        if id is not None and taken.setdefault(id, place) != place:
            raise ValueError(f"requests {taken[id]} and {place} have the same id {id}")
    free = (number for number in itertools.count(len(found)) if number not in taken)
    return [
        numbered(request, next(free) if place in taken else place)
        for place, request in enumerate(found)
    ]


def numbered(request: Any, number: int) -> Request:
    if not isinstance(request, Request):
        raise TypeError(
            f"a request must be a jaxattn.Request, got {type(request).__name__}; write "
            "Request(prompt)"
        )
    return dataclasses.replace(request, id=number) if request.id is None else request
