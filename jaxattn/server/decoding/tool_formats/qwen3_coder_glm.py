"""Qwen3-Coder's and GLM's formats of tool calls, whose arguments are between tags.

A value is the text between its tags. Only the tool's schema determines whether `12345` is a string.
An end tag ends a value only if it is followed by a tag that may come after an argument.
"""

from jaxattn.server.decoding.tool_formats import lossless_json, schema_types
from jaxattn.server.decoding.tool_formats.hermes import BEGIN, END, HermesFormat
from jaxattn.server.decoding.tool_formats.text_cursor import TextCursor, Unreadable
from jaxattn.server.decoding.tool_formats.tool_format import CallDraft, Reading, ToolSchemas

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
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
        name = yield from cursor.name(">")
        if not tagged and name not in tools:
            raise Unreadable
        values: dict[str, str] = {}
        yield from cursor.space()
        mark = yield from cursor.one_of(PARAMETER, FUNCTION_END)
        while mark == PARAMETER:
            key = yield from cursor.name(">")
            if key in values:
                raise Unreadable
            other_parameters = [
                each for each in tools.arguments(name) if each not in {*values, key}
            ]
            values[key], mark = yield from cursor.value(
                PARAMETER_END,
                following=(PARAMETER, FUNCTION_END),
                missing=[f"\n{PARAMETER}{each}>" for each in other_parameters],
                closing=(FUNCTION_END, END),
            )
            values[key] = values[key].removeprefix("\n").removesuffix("\n")
        if mark is None:
            raise Unreadable
        yield from cursor.space()
        yield from cursor.one_of(END)
        yield _call(name, values, tools)


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
            key = yield from cursor.name(KEY_END)
            if key in values:
                raise Unreadable
            yield from cursor.space()
            yield from cursor.literal(VALUE)
            values[key], mark = yield from cursor.value(
                VALUE_END, following=(KEY, END), missing=[VALUE], closing=(END, BEGIN)
            )
        if mark is None:
            raise Unreadable
        yield _call(name, values, tools)


def _call(name: str, values: dict[str, str], tools: ToolSchemas) -> CallDraft:
    root = tools.parameters.get(name, {})
    spelled = {
        key: schema_types.spelled(value, tools.arguments(name).get(key), root)
        for key, value in values.items()
    }
    return CallDraft(name, lossless_json.object_of(spelled))
