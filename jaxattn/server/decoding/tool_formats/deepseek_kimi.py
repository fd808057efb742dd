"""DeepSeek's and Kimi's formats of tool calls, which use a section between special tokens."""

import abc
import re

from jaxattn.server.decoding.tool_formats import lossless_json
from jaxattn.server.decoding.tool_formats.text_cursor import Scan, TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallDraft,
    CallFrame,
    Reading,
    ToolFormat,
    ToolSchemas,
)

DSML = "｜DSML｜"
SECTIONS = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
GIVEN, GIVEN_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
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
        call_begin=f"{call[0]}NAME{between}",
        call_end=call[1],
        separator="",
        end=section[1],
    )

    def _call(self, cursor: TextCursor) -> Scan[CallDraft]:
        yield from cursor.space()
        name = yield from cursor.word()
        yield from cursor.space()
        yield from cursor.literal(self.between)
        yield from cursor.space()
        return CallDraft(name, lossless_json.object_text((yield from cursor.json())))


class DeepSeekV3Format(DeepSeekV31Format):
    """DeepSeek-V3's and R1's format: function<｜tool▁sep｜>name and a JSON code block per call."""

    name = "deepseek_v3"
    frame = CallFrame(
        begin=DeepSeekV31Format.section[0],
        call_begin=f"{DeepSeekV31Format.call[0]}function{DeepSeekV31Format.between}NAME\n```json\n",
        call_end=f"\n```{DeepSeekV31Format.call[1]}",
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
        arguments = lossless_json.object_text((yield from cursor.json()))
        yield from cursor.space()
        yield from cursor.literal("```")
        return CallDraft(name, arguments)


class DsmlFormat(ToolFormat):
    """DeepSeek-V3.2's markup, which marks each parameter as a string or as JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

    An invocation may contain a JSON object instead of parameters. DeepSeek-V4 calls the section
    tool_calls.
    """

    name = "deepseek_v32"
    shown = (DSML,)
    frame = CallFrame(
        begin=f"<{DSML}function_calls>\n",
        call_begin=f'{INVOKE}NAME">\n',
        call_end=f"\n{INVOKE_END}",
        end=f"\n</{DSML}function_calls>",
    )

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (*SECTIONS, INVOKE)

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        if (yield from cursor.one_of(*SECTIONS)) is not None:
            yield from cursor.space()
        yield from cursor.literal(INVOKE)
        invokes = True
        while invokes:
            name = yield from cursor.name('">')
            yield from cursor.space()
            if cursor.text.startswith("{"):
                arguments = lossless_json.object_text((yield from cursor.json()))
                yield from cursor.space()
                yield from cursor.literal(INVOKE_END)
            else:
                arguments = yield from self._parameters(cursor)
            yield CallDraft(name, arguments)
            yield from cursor.space()
            ends = (f"</{section[1:]}" for section in SECTIONS)
            invokes = (yield from cursor.one_of(INVOKE, *ends)) == INVOKE

    def _parameters(self, cursor: TextCursor) -> Scan[str]:
        """Reads an invocation's parameters and its end tag, and returns them as a JSON object."""
        found: dict[str, str] = {}
        mark = yield from cursor.one_of(GIVEN, INVOKE_END)
        while mark == GIVEN:
            key = yield from cursor.name('" string="')
            kind = yield from cursor.one_of('true">', 'false">')
            if kind is None or key in found:
                raise Unreadable
            text, mark = yield from cursor.value(
                GIVEN_END, following=(GIVEN, INVOKE_END), missing=(GIVEN, INVOKE_END)
            )
            is_text = kind.startswith("true")
            found[key] = lossless_json.quoted(text) if is_text else lossless_json.literal(text)
        if mark is None:
            raise Unreadable
        return lossless_json.object_of(found)


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
        call_begin=f"{call[0]}functions.NAME:INDEX{between}",
        call_end=call[1],
        separator="",
        end=section[1],
    )

    def _call(self, cursor: TextCursor) -> Scan[CallDraft]:
        text, mark = yield from cursor.until(self.between, self.call[1])
        match = _KIMI_ID.fullmatch(text)
        if mark != self.between or match is None:
            raise Unreadable
        yield from cursor.space()
        return CallDraft(match[2], lossless_json.object_text((yield from cursor.json())), match[1])

    def id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"
