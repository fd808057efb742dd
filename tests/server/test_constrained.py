"""Answers of an engine that a grammar rules, from the field to the text."""

import json

import openai
import pytest

from jaxattn.server.decoding.sampling_params import ABLE

pytestmark = pytest.mark.skipif("grammar" not in ABLE, reason="the engine takes no grammars yet")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(real):
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_schema_a_pattern_and_plain_rows_beside_each_other(real, client):
    """White space is bounded by a bias: a model of code writes a lot of it."""
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    found = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "hi"}],
        response_format=asked,
        logit_bias={"32": -100, "10": -100, "9": -100, "13": -100},
        max_tokens=100,
        n=2,
    )
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"a", "b"}
    fields = {"response_format": {"type": "regex", "pattern": "(yes|no)!"}, "max_tokens": 20}
    plain = real.complete("def ", max_tokens=8, temperature=0).json()["choices"][0]["text"]
    ruled = real.complete(["def ", "x"], **fields).json()["choices"]
    assert all(choice["text"] in ("yes!", "no!") for choice in ruled)
    assert [choice["stop_reason"] for choice in ruled] == [None, None]
    again = real.complete("def ", max_tokens=8, temperature=0).json()["choices"][0]["text"]
    assert again == plain


def test_a_tool_has_to_be_called(client):
    found = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "hi"}],
        tools=[TOOL],
        tool_choice="required",
        logit_bias={"32": -100, "9": -100, "13": -100},
        max_tokens=150,
    )
    [choice] = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name == "f" and set(json.loads(call.function.arguments)) == {"a", "b"}
