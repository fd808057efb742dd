"""Hermes' format of tool calls: JSON in <tool_call> tags, which Qwen3 also uses."""

from jaxattn.server.decoding.tool_formats.json_call import declared_name, draft
from jaxattn.server.decoding.tool_formats.text_cursor import Scan, TextCursor
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallDraft,
    CallFrame,
    Reading,
    ToolFormat,
    ToolSchemas,
)

BEGIN, END = "<tool_call>", "</tool_call>"
BARE = '{"name": "'  # a call whose begin tag is missing


class HermesFormat(ToolFormat):
    """Hermes' and Qwen3's format: <tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

    name = "hermes"
    frame = CallFrame(
        call_begin='<tool_call>\n{"name": "NAME", "arguments": ', call_end="}\n</tool_call>"
    )
    shown = (BEGIN, END)

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (BEGIN, BARE)

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        if (yield from cursor.one_of(BEGIN)) is None:
            yield from declared_name(cursor, BARE, tools)
        yield from cursor.space()
        yield (yield from self._body(cursor, tools))

    def _body(self, cursor: TextCursor, tools: ToolSchemas) -> Scan[CallDraft]:
        """Reads a call and its end tag."""
        call = draft((yield from cursor.json()))
        yield from cursor.space()
        yield from cursor.literal(END)
        return call
