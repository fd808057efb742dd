"""Mistral's two formats of tool calls, both after [TOOL_CALLS]."""

import re
import secrets

from jaxattn.server.decoding.tool_formats.json_call import declared_name, draft
from jaxattn.server.decoding.tool_formats.lossless_json import object_text
from jaxattn.server.decoding.tool_formats.text_cursor import Scan, TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallDraft,
    CallFrame,
    Reading,
    ToolFormat,
    ToolSchemas,
)

TAG, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
BARE = '[{"name": "'  # begins a message whose tag is missing
_ID = re.compile("[a-zA-Z0-9]{9}")  # the chat templates reject other ids


class MistralFormat(ToolFormat):
    """The format of Mistral's tokenizers from version 11: [TOOL_CALLS]f[ARGS]{...} per call."""

    name = "mistral"
    shown = (TAG, ID, ARGUMENTS)
    frame = CallFrame(call_begin=f"{TAG}NAME{ARGUMENTS}", call_end="", separator="")

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (TAG, *(f"\n{start}" for start in self._named(tools)))

    def starts(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (BARE, *self._named(tools))

    def _named(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Returns the beginnings of calls whose tag is missing."""
        return tuple(f"{name}{ARGUMENTS}" for name in tools.parameters)

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        tagged = (yield from cursor.one_of(TAG)) is not None
        yield from cursor.space()
        if cursor.text.startswith("["):
            if not tagged:
                yield from declared_name(cursor, BARE, tools)
            calls = yield from self._array(cursor)
            if not (tagged or all(call.name in tools for call in calls)):
                raise Unreadable
            for call in calls:
                yield self._with_id(call.name, call.arguments, call.id)
            return
        name = yield from cursor.word()
        mark, id = (yield from cursor.one_of(ARGUMENTS, ID)), None
        if mark == ID:
            id, _ = yield from cursor.until(ARGUMENTS)
        elif mark is None:
            raise Unreadable
        yield from cursor.space()
        yield self._with_id(name, object_text((yield from cursor.json())), id)

    def _array(self, cursor: TextCursor) -> Scan[list[CallDraft]]:
        calls, mark = list[CallDraft](), "["
        yield from cursor.literal(mark)
        while mark != "]":
            yield from cursor.space()
            calls.append(draft((yield from cursor.json())))
            yield from cursor.space()
            found = yield from cursor.one_of(",", "]")
            if found is None:
                raise Unreadable
            mark = found
        return calls

    def _with_id(self, name: str, arguments: str, id: str | None) -> CallDraft:
        return CallDraft(name, arguments, id if id and _ID.fullmatch(id) else None)

    def id(self, name: str, index: int) -> str:
        return secrets.token_hex(5)[:9]


class MistralArrayFormat(MistralFormat):
    """The format of the older tokenizers: [TOOL_CALLS] [{"name": "f", "arguments": {...}}]"""

    name = "mistral_array"
    frame = CallFrame(
        begin=f"{TAG} [",
        call_begin='{"name": "NAME", "arguments": ',
        call_end="}",
        separator=", ",
        end="]",
    )
