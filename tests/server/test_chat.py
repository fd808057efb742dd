"""/v1/chat/completions: the template, tools, and what a conversation may hold."""

import json

import pytest

from jaxattn.limits import Limits
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import CALL, ScriptedEngine

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def says():
    """A server that says the text after "say " of the last message."""

    def script(request):
        return bytes(request.prompt).rpartition(b"say ")[2].rpartition(b"\nassistant: ")[0]

    limits = Limits(batch=2, max_model_len=1024)
    with live(served(lambda: ScriptedEngine(script, limits), limits=limits)) as server:
        yield server


def test_the_form(scripted):
    found = scripted.talk("hi", max_tokens=6).json()
    assert found["id"].startswith("chatcmpl-") and found["object"] == "chat.completion"
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "user: "},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert found["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_an_answer_ends_at_the_model_length_where_no_limit_is_given(scripted):
    assert scripted.talk("hi").json()["usage"]["completion_tokens"] == 256 - 20


def test_max_completion_tokens_wins(scripted):
    usage = scripted.talk("hi", max_completion_tokens=3, max_tokens=9).json()["usage"]
    assert usage["completion_tokens"] == 3


def test_parts_of_text_are_joined_and_other_roles_reach_the_template(scripted):
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    body = {"messages": messages, "max_tokens": 40}
    text = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("system: a\nuser: bc\nassistant: ")


def test_a_call_is_no_content(says):
    found = says.talk(f"say Let me look.\n{CALL}", tools=[WEATHER]).json()["choices"][0]
    message = found["message"]
    assert message["content"] == "Let me look." and found["finish_reason"] == "tool_calls"
    [call] = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}


def test_only_calls_leave_no_content(says):
    message = says.talk(f"say {CALL}{CALL}", tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2


def test_calls_in_a_stream(says):
    messages = [{"role": "user", "content": f"say So: {CALL}\n{CALL}"}]
    events = says.stream("/v1/chat/completions", {"messages": messages, "tools": [WEATHER]})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


THOUGHTS = f"<think>\nSay {CALL}?\n</think>\n\n"


def test_thoughts_are_no_content_and_have_two_names(says):
    message = says.talk(f"say {THOUGHTS}Yes.", tools=[WEATHER]).json()["choices"][0]["message"]
    said = f"Say {CALL}?"
    assert message == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": said,
        "reasoning": said,
    }
    fields = {"tools": [WEATHER], "include_reasoning": False}
    message = says.talk(f"say {THOUGHTS}{CALL}", **fields).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    assert "reasoning" not in message and "reasoning_content" not in message


def test_thoughts_in_a_stream_are_those_of_a_whole_answer(says):
    messages = [{"role": "user", "content": f"say {THOUGHTS}Yes: {CALL}"}]
    body = {"messages": messages, "tools": [WEATHER]}
    events = says.stream("/v1/chat/completions", body)
    whole = says.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]
    [call] = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call["function"] == whole["tool_calls"][0]["function"]


def test_a_developer_and_a_history_with_nulls_reach_the_template(scripted):
    past = {"role": "assistant", "content": "ok", "tool_calls": None, "refusal": None}
    messages = [{"role": "developer", "content": "a"}, past, {"role": "user", "content": "b"}]
    body = {"messages": messages, "max_tokens": 60}
    text = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("system: a\nassistant: ok\nuser: b\nassistant: ")


def test_without_tools_a_call_is_text(says):
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = says.talk(f"say {CALL}", **more).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": CALL}


def test_tools_reach_the_template(scripted):
    count = scripted.talk("hi", max_tokens=1).json()["usage"]["prompt_tokens"]
    asked = scripted.talk("hi", max_tokens=1, tools=[WEATHER]).json()["usage"]["prompt_tokens"]
    assert asked == count + len("tool weather\n")


def test_tokens_of_a_conversation_and_back(scripted):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    found = scripted.post("/tokenize", body).json()
    assert found == {"count": 20, "max_model_len": 256, "tokens": found["tokens"]}
    text = scripted.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text == "user: hi\nassistant: "
    assert scripted.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]


def deep(levels):
    """A tool whose parameters lie in as many lists."""
    kind = {"type": "string"}
    for _ in range(levels):
        kind = {"type": "array", "items": kind}
    return {"type": "function", "function": {"name": "f", "parameters": kind}}


@pytest.mark.parametrize(
    "fields, param, said",
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "no robots"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0] must be an object with"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "'image_url'",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "is not supported"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "and without"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be a function with a name"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "and without"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [deep(500)], "tool_choice": "required"}, "tools", "cannot be enforced"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "one of text"),
    ],
)  # fmt: skip
def test_a_bad_conversation_names_its_field(scripted, fields, param, said):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = scripted.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param and said in error["message"]
