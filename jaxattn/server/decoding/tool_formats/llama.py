"""Llama 3's format of tool calls: bare JSON objects."""

from jaxattn.server.decoding.tool_formats.json_call import declared_name, draft
from jaxattn.server.decoding.tool_formats.text_cursor import TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallFrame,
    Reading,
    ToolFormat,
    ToolSchemas,
)

TAG = "<|python_tag|>"
STARTS = ('{"name": "', '{"name":"', '{"type": "function", "name": "')


class LlamaFormat(ToolFormat):
    """{"name": "f", "parameters": {...}}, with or without <|python_tag|>; `;` separates calls.

    Without the tag, the calls must be the whole message, and each must name a tool of the request.
    """

    name = "llama3"
    shown = (TAG,)
    frame = CallFrame(call_begin='{"name": "NAME", "parameters": ', call_end="}", separator="; ")

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (TAG,)

    def starts(self, tools: ToolSchemas) -> tuple[str, ...]:
        return STARTS

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        tagged = (yield from cursor.one_of(TAG)) is not None
        if not tagged:
            start = next(each for each in STARTS if cursor.text.startswith(each))
            yield from declared_name(cursor, start, tools)
        while True:
            yield from cursor.space()
            call = draft((yield from cursor.json()))
            yield from cursor.space()
            another = (yield from cursor.one_of(";")) is not None
            if not tagged and (call.name not in tools or (cursor.text and not another)):
                raise Unreadable
            yield call
            if not another:
                return
