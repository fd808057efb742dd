"""/v1/responses: translated to a chat, and written as output items; openai-python reads it."""

import json

import openai
import pydantic
import pytest

from jaxattn.server.runtime.response_store import ResponseStore
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import CALL, ScriptedEngine

WEATHER = {"type": "function", "name": "weather", "parameters": {}, "strict": False}


@pytest.fixture
def client(told_server, told):
    told.says, told.prompts = "Hello.", []
    with openai.OpenAI(base_url=f"{told_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_is_answered(client, told):
    found = client.responses.create(
        model="model", input="hi", instructions="Be brief.", metadata={"a": "b"}
    )
    assert found.output_text == "Hello." and found.status == "completed"
    assert found.usage.output_tokens == 6 and found.usage.input_tokens == len(told.prompts[-1])
    assert found.usage.input_tokens_details.cached_tokens == 0
    assert found.metadata == {"a": "b"} and found.instructions == "Be brief."
    assert told.prompts[-1] == "system: Be brief.\nuser: hi\nassistant: "


def test_a_stream_has_the_items_of_the_whole_answer(client, told):
    told.says = f"<think>\nWhere?\n</think>\n\nSo: {CALL}"
    asked = {"model": "model", "input": "hi", "tools": [WEATHER]}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [item.type for item in whole.output]
    assert (
        kinds == [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    )
    for response in (whole, final):
        thoughts, message, call = response.output
        assert thoughts.content[0].text.strip() == "Where?"
        assert message.content[0].text.strip() == "So:"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == final.output[0].content[0].text
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert events[-1].type == "response.completed"


def test_a_conversation_goes_on_from_a_stored_response(client, told):
    told.says = CALL
    first = client.responses.create(model="model", input="hi", tools=[WEATHER])
    [call] = first.output
    told.says = "Sun."
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model="model", previous_response_id=first.id, input=[output])
    assert second.output_text == "Sun." and told.prompts[-1].endswith("tool: sunny\nassistant: ")
    client.responses.create(model="model", previous_response_id=second.id, input="And now?")
    assert told.prompts[-1].endswith("assistant: Sun.\nuser: And now?\nassistant: ")
    reference = {"type": "item_reference", "id": second.output[0].id}
    client.responses.create(model="model", input=[reference, {"role": "user", "content": "x"}])
    assert told.prompts[-1] == "assistant: Sun.\nuser: x\nassistant: "
    assert client.responses.retrieve(first.id).output[0].call_id == call.call_id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="model", previous_response_id=first.id, input="x")
    assert missing.value.param == "previous_response_id"
    unkept = client.responses.create(model="model", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_thoughts_come_back_with_what_the_client_keeps_of_them(client, told):
    told.says = "<think>\nWhere?\n</think>\n\nHere."
    found = client.responses.create(
        model="model", input="hi", store=False, include=["reasoning.encrypted_content"]
    )
    thoughts = found.output[0].model_dump(exclude={"content"})
    assert thoughts["encrypted_content"]
    message = found.output[1].model_dump()
    history = [
        {"role": "user", "content": "hi"},
        thoughts,
        message,
        {"role": "user", "content": "x"},
    ]
    client.responses.create(model="model", input=history, store=False)
    assert told.prompts[-1] == "user: hi\nassistant: Here.\nuser: x\nassistant: "
    history[1]["encrypted_content"] = "of another server"
    client.responses.create(model="model", input=history, store=False)


def test_an_answer_follows_a_schema(told_server, client, told):
    class Point(pydantic.BaseModel):
        x: int

    told.says = '{"x": 3}'
    found = client.responses.parse(model="model", input="hi", text_format=Point)
    assert found.output_parsed == Point(x=3)
    assert told_server.service.worker.engine.added[-1].grammar is not None
    assert found.text.format.name == "Point"


def test_custom_tools_and_namespaces_keep_their_names_and_hosted_tools_are_skipped(client, told):
    tools = [
        {"type": "web_search"},
        {"type": "custom", "name": "patch", "description": "of files"},
        {"type": "namespace", "name": "team", "description": "", "tools": [WEATHER]},
    ]
    told.says = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    [found] = client.responses.create(model="model", input="hi", tools=tools).output
    assert (found.type, found.name, found.input) == ("custom_tool_call", "patch", "*** Begin")
    assert told.prompts[-1].startswith("tool patch\ntool weather\nuser: hi")
    told.says = CALL
    with client.responses.stream(model="model", input="hi", tools=tools) as stream:
        [call] = stream.get_final_response().output
    assert (call.name, call.namespace) == ("weather", "team")
    result = {"type": "custom_tool_call_output", "call_id": found.call_id, "output": "done"}
    told.says = "x"
    client.responses.create(model="model", input=[found.model_dump(), result], tools=tools)
    assert told.prompts[-1].endswith("tool: done\nassistant: ")


def test_what_several_pieces_say_is_one_message(client, told):
    items = [
        {"role": "developer", "content": "A."},
        {"role": "system", "content": [{"type": "input_text", "text": "B."}]},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    client.responses.create(model="model", input=items, instructions="Z.")
    assert told.prompts[-1] == "system: Z.\n\nA.\n\nB.\nuser: c\n\nd\n\ne\nassistant: "


def test_a_cut_answer_is_incomplete(client):
    found = client.responses.create(model="model", input="hi", max_output_tokens=3)
    assert found.status == "incomplete" and found.output_text == "Hel"
    assert found.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="model", input="hi", max_output_tokens=3) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_log_probabilities_are_asked_for_with_include(client, told):
    found = client.responses.create(
        model="model", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert found.output[0].content[0].logprobs == []  # a scripted model has none
    assert told.prompts


def test_an_error_within_a_stream_fails_the_response():
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        base = f"{server.url}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            stream = client.responses.create(model="model", input="hi", stream=True)
            kinds = []
            for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    engine.failures = 1
            assert kinds[-1] == "response.failed"
            assert "the engine failed" in event.response.error.message


REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [1]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "mesage"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": "x" * 300}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize("fields, param", REFUSED, ids=[param for _, param in REFUSED])
def test_a_field_that_does_not_fit_is_named(told_server, fields, param):
    response = told_server.post("/v1/responses", {"input": "x", **fields})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == param and param.split(".")[-1].split("[")[0] in error["message"]


def test_the_store_forgets_the_oldest_within_its_bounds():
    store = ResponseStore(max_responses=2, max_bytes=1000)
    for number in range(3):
        store.put({"id": f"r{number}", "output": [{"id": f"i{number}"}]}, [])
    assert store.item("i0") is None and store.item("i2") == {"id": "i2"}
    store.items("r1", "previous_response_id")  # used again, so that r2 is the oldest
    store.put({"id": "r3", "output": []}, [{"content": "x" * 800}])
    with pytest.raises(Exception, match="'r2' is not stored"):
        store.response("r2")
    store.put({"id": "r4", "output": []}, [{"content": "x" * 1000}])
    with pytest.raises(Exception, match="'r4' is not stored"):
        store.response("r4")
