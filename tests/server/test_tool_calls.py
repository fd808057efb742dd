"""Calls in a model's text: three ways to write them, cut anywhere; what is none stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxattn.server.decoding.tool_parser import ToolParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
WAYS = {
    "hermes": '{"name": "f", "arguments": {"a": "1", "n": 2}}',
    "coder": "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    "</function>",
    "glm": "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>2</arg_value>",
}


def read(pieces):
    reader, content, calls = ToolParser(TOOLS), "", []
    for piece in pieces:
        text, found = reader.push(piece)
        content += text
        calls += found
    return content + reader.end(), calls


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
def test_a_call_may_be_cut_anywhere(way, data):
    text = f"One. \n<tool_call>\n{WAYS[way]}\n</tool_call>\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, [call] = read(pieces)
    assert content == "One."
    assert call.name == "f" and json.loads(call.arguments) == {"a": "1", "n": 2}


@pytest.mark.parametrize(
    "text",
    [
        "a < b <tool",
        "<tool_call>",
        "<tool_call>{not json</tool_call> and on",
        '<tool_call>{"name": 1}</tool_call>',
        "  spaces  ",
        "",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert read(text) == (text, []) and read([text]) == (text, [])
