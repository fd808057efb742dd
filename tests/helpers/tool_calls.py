"""A tool call in each published format, and the result of parsing a text."""

from jaxattn.server.decoding.message_events import MessageParts
from jaxattn.server.decoding.message_format import MessageFormat
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.json_fields import JsonFields

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "r": {"$ref": "#/$defs/R"},
        "u": {"type": ["integer", "string"]},
    },
    "$defs": {"R": {"enum": ["1", "2"]}},
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("f", "g_2")]
JSON = '{"a":"1","n":2}'
THINK, THOUGHT = "<think>\n", "\n</think>\n\n"
# A call with the arguments of JSON in each format; NAME and JSON are replaced.
TAGS = "<tool_call>\n{}\n</tool_call>"
CALLS = {
    "hermes": TAGS.format('{"name": "NAME", "arguments": JSON}'),
    "qwen3_coder": TAGS.format(
        "<function=NAME>\n<parameter=a>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
        "</function>"
    ),
    "glm": "<tool_call>NAME\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
    "```json\nJSON\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n'
    '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
    "<|tool_call_argument_begin|>JSON<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
    "llama3": '{"name": "NAME", "parameters": JSON}',
    "mistral": "[TOOL_CALLS]NAME[ARGS]JSON",
    "mistral_array": '[TOOL_CALLS] [{"name": "NAME", "arguments": JSON, "id": "abcdef123"}]',
}
# The same call without its begin marker.
UNBEGUN = {
    "hermes": CALLS["hermes"].removeprefix("<tool_call>\n"),
    "qwen3_coder": CALLS["qwen3_coder"].removeprefix("<tool_call>\n"),
    "glm": CALLS["glm"].removeprefix("<tool_call>"),
    "deepseek_v3": CALLS["deepseek_v3"].removeprefix("<｜tool▁calls▁begin｜>"),
    "deepseek_v31": CALLS["deepseek_v31"].removeprefix("<｜tool▁calls▁begin｜>"),
    "deepseek_v32": CALLS["deepseek_v32"].removeprefix("<｜DSML｜function_calls>\n"),
    "kimi_k2": CALLS["kimi_k2"].removeprefix("<|tool_calls_section_begin|>"),
    "harmony": CALLS["harmony"].removeprefix("<|channel|>"),
    "mistral": CALLS["mistral"].removeprefix("[TOOL_CALLS]"),
    "mistral_array": CALLS["mistral_array"].removeprefix("[TOOL_CALLS] "),
}


def call(name, arguments=JSON, function="f"):
    return CALLS[name].replace("NAME", function).replace("JSON", arguments)


def chosen(**fields):
    return read_tools(JsonFields({"tools": TOOLS, **fields}))


ANY = chosen()


def read(name, pieces, prompt_end="", choice=ANY):
    """(reasoning, content, calls as (name, arguments)) of a text that is fed in pieces."""
    parser, parts = MessageFormat.of("", name).parser(choice, prompt_end), MessageParts()
    for piece in pieces:
        parts.add(parser.feed(piece))
    parts.add(parser.finish())
    assert [each.index for each in parts.calls] == list(range(len(parts.calls)))
    assert len({each.id for each in parts.calls}) == len(parts.calls)
    return parts.reasoning, parts.content, [(each.name, each.arguments) for each in parts.calls]
