"""Random texts of marks, calls and parts of calls, per format: a stream equals the whole answer, and
no call comes out that the text does not hold."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxattn.server.decoding.message_format import FORMATS
from jaxattn.server.decoding.tool_formats.json_arguments import parsed
from tests.server.test_tool_calls import CALLS, THINK, TOOLS, UNBEGUN, call, read

QUICK, FULL = 60, 10_000
NAMES = [tool["function"]["name"] for tool in TOOLS]
MARKS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0", "<|channel|>", "<|end|>",
    "<|message|>", "<|start|>assistant", "commentary to=functions.f", "analysis", "final",
    "<|call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", '{"name": "f"', '"arguments": ', "```",
    "<think>", "</think>", "f", "g_2", "other", "{", "}", "[", "]", '"', "\\", "\n", " ", "1", ";",
    "é", "🙂", "text", "{}", '{"a": "1"}',
)  # fmt: skip


def damaged(text, data):
    """The text with a few characters left out or put in."""
    for _ in range(data.draw(st.integers(0, 2))):
        at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = text[:at] + data.draw(st.sampled_from(["", "<", '"', "}", "\n"])) + text[min(end, at + 8) :]
    return text


def check(name, data):
    calls = [call(name, '{"a": "é\\n</tool_call>", "n": 1}'), call(name, "{}", "g_2"), call(name)]
    calls += [UNBEGUN[name].replace("NAME", "f").replace("JSON", "{}")] if name in UNBEGUN else []
    part = st.one_of(st.sampled_from(MARKS), st.sampled_from(calls), st.text(max_size=5))
    text = damaged("".join(data.draw(st.lists(part, max_size=12))), data)
    end = data.draw(st.sampled_from(["", THINK]))
    found = read(name, [text], end)
    assert read(name, text, end) == found, "a character at a time"
    cut = data.draw(st.integers(0, len(text)))
    assert read(name, [text[:cut], text[cut:]], end) == found
    reasoning, content, calls = found
    for function, arguments in calls:
        assert function in text and isinstance(parsed(arguments), dict)
        assert not end or f"</think>" in text or name == "harmony"
        if name not in ("qwen3_coder", "glm"):
            assert arguments in text or json.loads(arguments) in ({}, json_in_string(text, arguments))
    for part in (reasoning, content):
        rest = iter(text)
        assert all(character in rest for character in part.replace("\n", ""))
    if not calls and not reasoning and "think>" not in text and name != "harmony" and not end:
        assert content == text


def json_in_string(text, arguments):
    """The arguments, if the text has them as a string of JSON."""
    return json.loads(arguments) if json.dumps(arguments, ensure_ascii=False) in text else None


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=QUICK, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_a_stream_equals_the_whole_and_no_call_is_made_up(name, data):
    check(name, data)


@pytest.mark.slow(reason="a rarer text that a stream reads otherwise; 60 texts per format run always")
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=FULL, suppress_health_check=list(HealthCheck), deadline=None, database=None)
@given(data=st.data())
def test_ten_thousand_texts(name, data):
    check(name, data)
