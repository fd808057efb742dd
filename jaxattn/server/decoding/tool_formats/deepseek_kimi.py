"""Calls in a section of special tokens: DeepSeek's and Kimi's."""

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
    """Calls between two marks of their own, in a section that one mark begins and one ends.

    Calls whose section has no begin mark are read too.
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
    """name<｜tool▁sep｜>{...} in each call, of DeepSeek-V3.1."""

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
    """function<｜tool▁sep｜>name and a code block of JSON in each call, of DeepSeek-V3 and R1."""

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
    """functions.name:0<|tool_call_argument_begin|>{...} in each call, of Kimi-K2.

    The model writes the id of a call itself and expects it in the history.
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
