"""DeepSeek's and Kimi's formats of tool calls, which use a section between special tokens."""

import abc
import re

from jaxattn.server.decoding.tool_formats.lossless_json import object_text
from jaxattn.server.decoding.tool_formats.text_cursor import Scan, TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallDraft,
    CallFrame,
    Reading,
    ToolFormat,
    ToolSchemas,
)

_KIMI_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*")


class SectionFormat(ToolFormat, abc.ABC):
    """The base class of formats with marks around each call and around the section of all calls.

    The reader also accepts a section without its begin mark.

    Attributes:
        section: The marks before and after the section.
        call: The marks before and after each call.
    """

    section: tuple[str, str]
    call: tuple[str, str]

    @abc.abstractmethod
    def _call(self, cursor: TextCursor) -> Scan[CallDraft]:
        """Reads a call after its begin mark, up to its end mark."""

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (self.section[0], self.call[0])

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        if (yield from cursor.one_of(self.section[0])) is not None:
            yield from cursor.space()
        yield from cursor.literal(self.call[0])
        mark: str | None = self.call[0]
        while mark == self.call[0]:
            call = yield from self._call(cursor)
            yield from cursor.space()
            yield from cursor.literal(self.call[1])
            yield call
            yield from cursor.space()
            mark = yield from cursor.one_of(self.call[0], self.section[1])


class DeepSeekV31Format(SectionFormat):
    """DeepSeek-V3.1's format: name<｜tool▁sep｜>{...} in each call."""

    name = "deepseek_v31"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    between = "<｜tool▁sep｜>"
    shown = (*section, *call, between)
    frame = CallFrame(
        begin=section[0],
        before=f"{call[0]}NAME{between}",
        after=call[1],
        separator="",
        end=section[1],
    )

    def _call(self, cursor: TextCursor) -> Scan[CallDraft]:
        yield from cursor.space()
        name = yield from cursor.word()
        yield from cursor.space()
        yield from cursor.literal(self.between)
        yield from cursor.space()
        return CallDraft(name, object_text((yield from cursor.json())))


class DeepSeekV3Format(DeepSeekV31Format):
    """DeepSeek-V3's and R1's format: function<｜tool▁sep｜>name and a JSON code block per call."""

    name = "deepseek_v3"
    frame = CallFrame(
        begin=DeepSeekV31Format.section[0],
        before=f"{DeepSeekV31Format.call[0]}function{DeepSeekV31Format.between}NAME\n```json\n",
        after=f"\n```{DeepSeekV31Format.call[1]}",
        end=DeepSeekV31Format.section[1],
    )

    def _call(self, cursor: TextCursor) -> Scan[CallDraft]:
        yield from cursor.space()
        yield from cursor.literal("function")
        yield from cursor.literal(self.between)
        yield from cursor.space()
        name = yield from cursor.word()
        yield from cursor.space()
        yield from cursor.literal("```json")
        yield from cursor.space()
        arguments = object_text((yield from cursor.json()))
        yield from cursor.space()
        yield from cursor.literal("```")
        return CallDraft(name, arguments)


class KimiFormat(SectionFormat):
    """Kimi-K2's format: functions.name:0<|tool_call_argument_begin|>{...} in each call.

    The model writes the id of each call itself, and expects this id in the history.
    """

    name = "kimi_k2"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    between = "<|tool_call_argument_begin|>"
    shown = (*section, *call, between)
    frame = CallFrame(
        begin=section[0],
        before=f"{call[0]}functions.NAME:INDEX{between}",
        after=call[1],
        separator="",
        end=section[1],
    )

    def _call(self, cursor: TextCursor) -> Scan[CallDraft]:
        text, mark = yield from cursor.until(self.between, self.call[1])
        match = _KIMI_ID.fullmatch(text)
        if mark != self.between or match is None:
            raise Unreadable
        yield from cursor.space()
        return CallDraft(match[2], object_text((yield from cursor.json())), match[1])

    def id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"
