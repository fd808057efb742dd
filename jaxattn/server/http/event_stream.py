"""Server-sent events: the bytes of a stream's events, comments and end."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data_events(found: Iterable[object]) -> bytes:
    """Events without a name, as Chat Completions has them."""
    return b"".join(b"data: " + orjson.dumps(values) + b"\n\n" for values in found)


def named_events(found: Iterable[Mapping[str, Any]]) -> bytes:
    """Events whose name is their `type`, as Responses and Messages have them."""
    return b"".join(
        b"event: " + values["type"].encode() + b"\ndata: " + orjson.dumps(values) + b"\n\n"
        for values in found
    )
