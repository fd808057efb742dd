"""/v1/messages: translated to a chat, and written as blocks; Anthropic's own client reads it."""

import pytest

from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import CALL, ScriptedEngine

WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def anthropic():
    """Imported where a test runs: every worker collects this file."""
    return pytest.importorskip("anthropic")


@pytest.fixture
def client(told_server, told, anthropic):
    told.says, told.prompts = "Hello.", []
    with anthropic.Anthropic(base_url=told_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_answered(client, told):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    found = client.messages.create(model="model", max_tokens=99, messages=HI, system=system)
    [block] = found.content
    assert (block.type, block.text, found.stop_reason) == ("text", "Hello.", "end_turn")
    assert told.prompts[-1] == "system: Be brief.\nuser: hi\nassistant: "
    assert found.usage.input_tokens == len(told.prompts[-1]) and found.usage.output_tokens == 6
    count = client.messages.count_tokens(model="model", messages=HI, system=system)
    assert count.input_tokens == found.usage.input_tokens


def test_a_stream_has_the_blocks_of_the_whole_message(client, told):
    told.says = f"<think>\nWhere?\n</think>\n\nSo: {CALL}"
    asked = {"model": "model", "max_tokens": 200, "messages": HI, "tools": [WEATHER]}
    whole = client.messages.create(**asked)
    with client.beta.messages.stream(**asked) as stream:  # ?beta=true
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thoughts, text, call = message.content
        assert thoughts.thinking.strip() == "Where?" and thoughts.signature
        assert text.text.strip() == "So:"
        assert (call.name, call.input) == ("weather", {"city": "Ulm"})
        assert message.stop_reason == "tool_use" and message.usage.output_tokens == len(told.says)
    assert kinds.count("content_block_stop") == 3 and kinds[-1] == "message_stop"


def test_a_history_with_calls_and_results(client, told):
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Where?", "signature": "jaxattn"},
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}},
                {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "rain"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "system", "content": "It is late."},
    ]
    client.messages.create(
        model="model",
        max_tokens=9,
        messages=messages,
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
    )
    assert told.prompts[-1] == (
        "tool weather\nuser: hi\nassistant: So:\ntool: sun\ntool: rain\n"
        "user: Well?\n\nIt is late.\nassistant: "
    )


def test_the_last_message_of_the_assistant_goes_on(client, told):
    messages = [*HI, {"role": "assistant", "content": "He said: "}]
    client.messages.create(model="model", max_tokens=9, messages=messages)
    assert told.prompts[-1] == "user: hi\nassistant: He said: "


def test_stop_sequences_and_lengths(client):
    found = client.messages.create(
        model="model", max_tokens=99, messages=HI, stop_sequences=["lo", "x"]
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "lo")
    assert found.content[0].text == "Hel"
    found = client.messages.create(model="model", max_tokens=2, messages=HI)
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)


def test_a_choice_of_tools_and_a_schema_become_grammars(told_server, client, told):
    added = told_server.service.worker.engine.added
    told.says = CALL
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        client.messages.create(
            model="model", max_tokens=99, messages=HI, tools=[WEATHER], tool_choice=choice
        )
        assert added[-1].grammar is not None
    told.says = "{}"
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    client.messages.create(model="model", max_tokens=99, messages=HI, output_config=config)
    assert added[-1].grammar is not None


def test_errors_have_anthropics_form(told_server, client, anthropic):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="model", max_tokens=0, messages=HI)
    error = refused.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert "max_tokens must be an integer" in error["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=1, messages=HI)
    for method, path in (("GET", "/v1/messages"), ("POST", "/v1/messages/batches")):
        error = told_server.client.request(method, path).json()
        assert error["type"] == "error" and error["error"]["message"]


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"system": 3}, "system"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"tools": [{"name": ""}]}, "tools[0].name"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"temperature": "hot"}, "temperature"),
]


@pytest.mark.parametrize("fields, param", REFUSED, ids=[param for _, param in REFUSED])
def test_a_field_that_does_not_fit_is_named(told_server, fields, param):
    response = told_server.post("/v1/messages", {"max_tokens": 5, "messages": HI, **fields})
    found = response.json()
    assert response.status_code == 400, response.text
    assert found["type"] == "error" and found["error"]["param"] == param
    assert param in found["error"]["message"]


def test_an_error_within_a_stream_is_an_event(anthropic):
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            stream = client.messages.create(model="model", max_tokens=200, messages=HI, stream=True)
            next(iter(stream))
            engine.failures = 1
            with pytest.raises(anthropic.APIError, match="the engine failed"):
                list(stream)
            stream.close()


def test_a_key_may_come_as_x_api_key(anthropic):
    with live(served(ScriptedEngine), keys=("secret",)) as server:
        asked = {"model": "model", "max_tokens": 2, "messages": HI}
        with anthropic.Anthropic(base_url=server.url, api_key="secret") as client:
            assert client.messages.create(**asked).usage.output_tokens == 2
        response = server.post("/v1/messages", asked, headers={"x-api-key": "other"})
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
