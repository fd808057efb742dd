"""Bad input: OpenAI's error with the field's name, and nothing is queued for it."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxattn.limits import Limits
from tests.helpers.live_server import live, served
from tests.helpers.odd_requests import answer, sane
from tests.helpers.scripted_engine import LIMITS, ScriptedEngine

FIELDS = [
    ("prompt", None), ("prompt", []), ("prompt", ""), ("prompt", [""]), ("prompt", [1, "a"]),
    ("prompt", [[]]), ("prompt", [1.5]), ("prompt", [-1]), ("prompt", [256]), ("prompt", [2**70]),
    ("prompt", {"a": 1}), ("prompt", "x" * 256), ("prompt", ["x"] * 129),
    ("max_tokens", -1), ("prompt_logprobs", 21), ("max_tokens", 1.5), ("max_tokens", "5"),
    ("max_tokens", True), ("max_tokens", 2**31),
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("temperature", 1e9),
    ("top_p", 1.1), ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("n", 0),
    ("n", 129),
    ("seed", 2**63), ("seed", 0.5), ("stop", 1), ("stop", [""]), ("stop", ["x"] * 17),
    ("stop", "x" * 257), ("stop", [1]), ("stop_token_ids", 5), ("stop_token_ids", [-1]),
    ("stop_token_ids", [0] * 65), ("stream", "yes"), ("stream_options", {"include_usage": True}),
    ("logprobs", 21), ("suffix", "x"), ("best_of", 2), ("min_tokens", 17), ("user", None),
    ("presence_penalty", 3), ("repetition_penalty", 0), ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("logit_bias", {"1": "x"}),
    ("logit_bias", {str(i): 1 for i in range(301)}), ("ignore_eos", 1), ("echo", "x"),
    ("logit_bias", {"256": 1}), ("logit_bias", {"9" * 20: 1}),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("allowed_token_ids", []),
    ("allowed_token_ids", [256]), ("bad_words", [1]), ("guided_json", "{"), ("guided_choice", [3]),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}), ("structured_outputs", {"json": 3}),
    ("structured_outputs", {"grammar": "root ::= ("}), ("structured_outputs", {"odd": 1}),
]  # fmt: skip


@pytest.mark.parametrize("field, value", [pair for pair in FIELDS if pair[0] != "user"])
def test_a_field_that_does_not_fit_is_named(scripted, field, value):
    added = len(scripted.service.worker.engine.added)
    response = scripted.post("/v1/completions", {"prompt": "x", field: value})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == field and field in error["message"]
    assert len(scripted.service.worker.engine.added) == added


NOTHING = [
    {"user": "me"}, {"nobody_knows": [1]}, {"suffix": ""}, {"logprobs": None}, {"n": None},
    {"repetition_penalty": 1.0}, {"presence_penalty": 0}, {"logit_bias": {}}, {"best_of": 1},
    {"min_tokens": 3, "ignore_eos": True}, {"top_k": -1},
]  # fmt: skip


@pytest.mark.parametrize("fields", NOTHING)
def test_what_changes_nothing_is_taken(scripted, fields):
    assert scripted.complete("x", max_tokens=2, **fields).status_code == 200


def test_a_prompt_as_long_as_the_model_has_a_code_of_its_own(scripted):
    error = scripted.complete("x" * 256).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"] and "model length is 256" in error["message"]
    assert error["message"].endswith("start the server with a larger --max-model-len")
    assert scripted.complete("x" * 255).status_code == 200


@pytest.mark.parametrize(
    "limits, longest, said",
    [
        (
            LIMITS,
            256,
            "256, including at least one generated token; make it shorter: the model supports",
        ),
        (LIMITS, 4096, "start the server with a larger --max-model-len, up to the model's 4,096"),
        (
            dataclasses.replace(LIMITS, num_pages=2),
            4096,
            "129, including at least one generated token; make it shorter, or increase --num-pages "
            "or --utilization of the server: its cache has room for 128 tokens",
        ),
    ],
    ids=["model", "context", "cache"],
)
def test_a_prompt_that_is_too_long_names_the_option_that_raises_the_length(limits, longest, said):
    with live(served(lambda: ScriptedEngine(limits=limits), longest=longest)) as server:
        response = server.complete("x" * 300)
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "prompt has 300 tokens" in error["message"]
        assert said in error["message"]
        turn = {"messages": [{"role": "user", "content": "x" * 300}]}
        chat = server.client.post("/v1/chat/completions", json=turn)
        assert chat.status_code == 400 and said in chat.json()["error"]["message"]
        many = server.client.post("/v1/completions", json={"prompt": [[1], [1] * 300]})
        assert many.status_code == 400 and said in many.json()["error"]["message"]
        fits = "x" * (limits.longest_row - 1)
        assert server.complete(fits, max_tokens=1).status_code == 200


def test_the_queue_is_as_long_as_the_engine_that_chose_its_rows_allows():
    """The limits that a server is made with may leave the rows open."""
    chosen = dataclasses.replace(LIMITS, batch=9)
    with live(served(lambda: ScriptedEngine(limits=chosen), limits=Limits())) as server:
        admission, waiting = server.service.admission, server.service.settings.max_waiting
        assert admission.max_choices == 9 + waiting and server.service.limits.batch == 9
        assert server.complete("x", max_tokens=1, n=9).status_code == 200


def test_an_unknown_model_or_path_is_404(scripted):
    response = scripted.complete("x", model="gpt-5")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert scripted.complete("x", model="model").status_code == 200
    for method, path, status in (
        ("GET", "/v1/images", 404),
        ("GET", "/v1/models/gpt-5", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ):
        response = scripted.client.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"a":"\\ud800"}',
    ],
)
def test_a_body_that_is_no_object_is_400(scripted, body):
    response = scripted.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_a_large_body_is_413_whether_it_says_so_or_not():
    with live(served(ScriptedEngine), max_body_bytes=1000) as server:
        body = json.dumps({"prompt": "x" * 1000}).encode()
        for content in (body, iter([body[:500], body[500:]])):
            response = server.client.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert server.complete("x").status_code == 200


# --- whatever the fields hold

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.integers(-2, 5),
    st.floats(),
    st.floats(0, 2),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
SHARED = (
    "model max_tokens temperature top_p top_k min_p n seed stop stream stream_options logprobs "
    "logit_bias presence_penalty frequency_penalty repetition_penalty min_tokens ignore_eos "
    "stop_token_ids skip_special_tokens include_stop_str_in_output user priority cache_salt"
).split()
OF_CHAT = (
    "messages tools tool_choice response_format chat_template_kwargs max_completion_tokens "
    "top_logprobs parallel_tool_calls reasoning_effort add_generation_prompt"
).split()
OF_COMPLETIONS = "prompt suffix echo best_of".split()
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"])},
        optional={"content": VALUES, "tool_calls": VALUES, "name": SCALARS},
    ),
    max_size=3,
)
SMALL = st.fixed_dictionaries(
    {}, optional={"max_tokens": st.integers(1, 3), "stream": st.just(True)}
)


def bodies(names, own):
    fields = st.dictionaries(st.sampled_from(names), VALUES, max_size=4)
    return st.tuples(fields, own, SMALL).map(lambda parts: parts[0] | parts[1] | parts[2])


COMPLETIONS = bodies(
    SHARED + OF_COMPLETIONS,
    st.fixed_dictionaries({}, optional={"prompt": st.text("ab", min_size=1)}),
)
CHATS = bodies(SHARED + OF_CHAT, st.fixed_dictionaries({}, optional={"messages": MESSAGES}))
PATHS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/tokenize": bodies(SHARED + OF_CHAT + ["prompt"], st.just({})),
    "/detokenize": bodies(["tokens", "model"], st.just({})),
}


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_comes_no_answer_is_500_and_no_row_is_stuck(path, data, scripted):
    body = sane(data.draw(PATHS[path]))
    response = answer(scripted, path, body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    elif body.get("stream") and path.startswith("/v1"):
        assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
