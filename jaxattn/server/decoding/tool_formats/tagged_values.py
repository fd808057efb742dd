"""Formats of tool calls with arguments between tags: Qwen3-Coder's, GLM's and DeepSeek-V3.2's.

A value is the text between its tags. Only the tool's schema determines whether `12345` is a string.
An end tag ends a value only if it is followed by a tag that may come after an argument.
"""

from jaxattn.server.decoding.tool_formats import lossless_json, schema_types
from jaxattn.server.decoding.tool_formats.hermes import BEGIN, END, HermesFormat
from jaxattn.server.decoding.tool_formats.text_cursor import (
    MOST_NAME,
    Scan,
    TextCursor,
    Unreadable,
)
from jaxattn.server.decoding.tool_formats.tool_format import (
    CallDraft,
    CallFrame,
    Reading,
    ToolFormat,
    ToolSchemas,
)

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
DSML = "｜DSML｜"
SECTIONS = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
GIVEN, GIVEN_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class QwenCoderFormat(HermesFormat):
    """<tool_call><function=f><parameter=x>1</parameter></function></tool_call>

    Qwen3-Coder and Qwen3.5 use this format. As these models also write Hermes' JSON, the reader
    accepts it.
    """

    name = "qwen3_coder"

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (BEGIN, FUNCTION)

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        tagged = (yield from cursor.one_of(BEGIN)) is not None
        yield from cursor.space()
        if cursor.text.startswith("{"):
            yield (yield from self._body(cursor, tools))
            return
        yield from cursor.literal(FUNCTION)
        name = yield from _name(cursor, ">")
        if not tagged and name not in tools:
            raise Unreadable
        values: dict[str, str] = {}
        yield from cursor.space()
        mark = yield from cursor.one_of(PARAMETER, FUNCTION_END)
        while mark == PARAMETER:
            key = yield from _name(cursor, ">")
            if key in values:
                raise Unreadable
            others = [each for each in tools.arguments(name) if each not in {*values, key}]
            values[key], mark = yield from self._value(cursor, others)
        if mark is None:
            raise Unreadable
        yield from cursor.space()
        yield from cursor.one_of(END)
        yield _call(name, values, tools)

    def _value(self, cursor: TextCursor, others: list[str]) -> Scan[tuple[str, str]]:
        """Reads a value and its end tag, and returns the value and the tag after it.

        Raises:
            Unreadable: If the end tag is missing, because the call ends or an argument without a
                value begins before it.
        """
        begun = [f"\n{PARAMETER}{each}>" for each in others]
        parts: list[str] = []
        while True:
            text, mark = yield from cursor.until(PARAMETER_END, FUNCTION_END, *begun)
            if mark in begun:
                raise Unreadable
            space = yield from cursor.space()
            if mark == FUNCTION_END:
                if (yield from cursor.one_of(END)) is not None:
                    raise Unreadable
            elif (after := (yield from cursor.one_of(PARAMETER, FUNCTION_END))) is not None:
                return "".join([*parts, text]).removeprefix("\n").removesuffix("\n"), after
            parts += text, mark, space


class GlmFormat(HermesFormat):
    """<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>

    GLM-4.5 and later models use this format. The reader also accepts Hermes' JSON.
    """

    name = "glm"

    def begins(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (BEGIN, *(f"\n{start}" for start in self.starts(tools)))

    def starts(self, tools: ToolSchemas) -> tuple[str, ...]:
        return tuple(f"{name}{space}{KEY}" for name in tools.parameters for space in ("\n", ""))

    def read(self, cursor: TextCursor, tools: ToolSchemas) -> Reading:
        yield from cursor.one_of(BEGIN)
        yield from cursor.space()
        if cursor.text.startswith("{"):
            yield (yield from self._body(cursor, tools))
            return
        name = yield from cursor.word()
        values: dict[str, str] = {}
        yield from cursor.space()
        mark = yield from cursor.one_of(KEY, END)
        if mark == END and name not in tools:  # a tag around a plain word
            raise Unreadable
        while mark == KEY:
            key = yield from _name(cursor, KEY_END)
            if key in values:
                raise Unreadable
            yield from cursor.space()
            yield from cursor.literal(VALUE)
            values[key], mark = yield from self._value(cursor)
        if mark is None:
            raise Unreadable
        yield _call(name, values, tools)

    def _value(self, cursor: TextCursor) -> Scan[tuple[str, str]]:
        """Reads a value and its end tag, and returns the value and the tag after it.

        Raises:
            Unreadable: If the end tag is missing, because the next value or call begins before it.
        """
        parts: list[str] = []
        while True:
            text, mark = yield from cursor.until(VALUE_END, END, VALUE)
            if mark == VALUE:
                raise Unreadable
            space = yield from cursor.space()
            if mark == END:
                if (yield from cursor.one_of(BEGIN)) is not None:
                    raise Unreadable
            elif (after := (yield from cursor.one_of(KEY, END))) is not None:
                return "".join([*parts, text]), after
            parts += text, mark, space


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
        before=f'{INVOKE}NAME">\n',
        after=f"\n{INVOKE_END}",
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
            name = yield from _name(cursor, '">')
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
            key = yield from _name(cursor, '" string="')
            kind = yield from cursor.one_of('true">', 'false">')
            if kind is None or key in found:
                raise Unreadable
            text, mark = yield from self._value(cursor)
            is_text = kind.startswith("true")
            found[key] = lossless_json.quoted(text) if is_text else lossless_json.literal(text)
        if mark is None:
            raise Unreadable
        return _object(found)

    def _value(self, cursor: TextCursor) -> Scan[tuple[str, str]]:
        """Reads a value and its end tag, and returns the value and the tag after it.

        Raises:
            Unreadable: If the end tag is missing, because the next value begins or the call ends
                before it.
        """
        parts: list[str] = []
        while True:
            text, mark = yield from cursor.until(GIVEN_END, GIVEN, INVOKE_END)
            if mark != GIVEN_END:
                raise Unreadable
            space = yield from cursor.space()
            if (after := (yield from cursor.one_of(GIVEN, INVOKE_END))) is not None:
                return "".join([*parts, text]), after
            parts += text, mark, space


def _name(cursor: TextCursor, end: str) -> Scan[str]:
    """Reads the name of a function or an argument, up to an end mark in the same line."""
    text, mark = yield from cursor.until(end, "\n")
    name = text.strip()
    if mark != end or not 0 < len(name) <= MOST_NAME:
        raise Unreadable
    return name


def _call(name: str, values: dict[str, str], tools: ToolSchemas) -> CallDraft:
    root = tools.parameters.get(name, {})
    spelled = {
        key: schema_types.spelled(value, tools.arguments(name).get(key), root)
        for key, value in values.items()
    }
    return CallDraft(name, _object(spelled))


def _object(values: dict[str, str]) -> str:
    """Returns a JSON object, given the JSON of its values."""
    pairs = (f"{lossless_json.quoted(key)}:{value}" for key, value in values.items())
    return "{" + ",".join(pairs) + "}"
