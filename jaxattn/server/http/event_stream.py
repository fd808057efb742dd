"""Server-sent events: the encoding of events, keep-alive comments and the end marker."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data_events(events: Iterable[object]) -> bytes:
    """Returns the bytes of events without a name, which Chat Completions uses."""
    return b"".join(b"data: " + orjson.dumps(values) + b"\n\n" for values in events)


def named_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns the bytes of events named by their `type`, which Responses and Messages use."""
    return b"".join(
        b"event: " + values["type"].encode() + b"\ndata: " + orjson.dumps(values) + b"\n\n"
        for values in events
    )
