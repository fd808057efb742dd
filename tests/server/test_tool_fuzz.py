"""Random texts of marks, calls and parts of calls, in each format.

A stream equals the whole answer, and no call comes out that the text does not hold.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.server.decoding.message_format import FORMATS
from jaxattn.server.decoding.tool_formats.lossless_json import parsed
from tests.helpers.tool_calls import THINK, TOOLS, UNBEGUN, call, read

QUICK = 60
NAMES = [tool["function"]["name"] for tool in TOOLS]
MARKS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0", "<|channel|>", "<|end|>",
    "<|message|>", "<|start|>assistant", "commentary to=functions.f", "analysis", "final",
    "<|call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f"', '"arguments": ', "```",
    "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '" string="',
    'true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "<think>", "</think>", "f", "g_2",
    "other", "{", "}", "[", "]", '"',
    "\\", "\n", " ", "1", ";", "é", "🙂", "text", "{}", '{"a":"1"}',
)  # fmt: skip


def made(name, luck):
    """Marks, calls and characters; at times a few are left out or put in."""
    calls = [call(name, '{"a":"é\\n</tool_call>","n":1}'), call(name, "{}", "g_2"), call(name)]
    calls += [UNBEGUN[name].replace("NAME", "f").replace("JSON", "{}")] if name in UNBEGUN else []
    parts = [luck.choice(luck.choice((MARKS, MARKS, calls))) for _ in range(luck.randint(0, 9))]
    text = "".join(parts)
    for _ in range(luck.choice((0, 0, 1, 2))):
        at = luck.randint(0, len(text))
        text = text[:at] + luck.choice(("", "<", '"', "}", "\n")) + text[at + luck.randint(0, 8) :]
    return text


def check(name, luck):
    text = made(name, luck)
    end = luck.choice(("", THINK))
    found = read(name, [text], end)
    assert read(name, text, end) == found, "a character at a time"
    cut = luck.randint(0, len(text))
    assert read(name, [text[:cut], text[cut:]], end) == found
    reasoning, content, calls = found
    for function, arguments in calls:
        assert function in text and isinstance(parsed(arguments), dict)
        assert not end or "</think>" in text or name == "harmony"
        if name not in ("qwen3_coder", "glm", "deepseek_v32"):
            held = squeezed(arguments) in squeezed(text)
            assert held or json.loads(arguments) in ({}, json_in_string(text, arguments))
    for part in (reasoning, content):
        rest = iter(text)
        assert all(character in rest for character in part.replace("\n", ""))
    if not calls and not reasoning and "think>" not in text and name != "harmony" and not end:
        assert content == text


def squeezed(text):
    return "".join(text.split())


def json_in_string(text, arguments):
    """The arguments, if the text has them as a string of JSON."""
    return json.loads(arguments) if json.dumps(arguments, ensure_ascii=False) in text else None


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=QUICK, deadline=None)
@given(luck=st.randoms(use_true_random=False))
def test_a_stream_equals_the_whole_and_no_call_is_made_up(name, luck):
    check(name, luck)


@pytest.mark.slow(
    reason="a rarer text that a stream reads otherwise; 60 texts per format run always"
)
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_texts(name):
    for seed in range(10_000):
        check(name, random.Random(seed))
