"""/v1/embeddings: OpenAI's form, of the engine's embeddings."""

import base64

import numpy as np
import openai
import pytest

from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import HIDDEN, LIMITS, ScriptedEngine

TEXTS = ["def add(", "import numpy", "x"]


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def client(real):
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(server, **body):
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return np.array([each["embedding"] for each in data], np.float32)


@pytest.fixture(scope="module")
def expected(engine, real):
    """Pooling -> of each text. The server's thread has not used the engine yet, or waits."""
    assert real.quiet()
    tokens = [text.encode() for text in TEXTS]
    return {pooling: engine.embed(tokens, pooling=pooling) for pooling in ("mean", "last")}


def test_openai_reads_embeddings_of_length_1(client, real, expected):
    # The client asks for base64 and decodes it.
    found = client.embeddings.create(model="model", input=TEXTS)
    assert (found.object, found.model) == ("list", "model")
    tokens = sum(map(len, TEXTS))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
    got = np.array([each.embedding for each in found.data], np.float32)
    np.testing.assert_allclose(got, unit(expected["last"]), atol=2e-2)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    floats = client.embeddings.create(model="model", input=TEXTS, encoding_format="float")
    np.testing.assert_allclose([each.embedding for each in floats.data], got, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_each_form_of_input_gives_the_same(real, expected, pooling):
    wanted = unit(expected[pooling])
    tokens = [list(text.encode()) for text in TEXTS]
    for given in (TEXTS, tokens, [TEXTS[0], tokens[1], TEXTS[2]]):
        found = asked(real, input=given, pooling=pooling)
        np.testing.assert_allclose(found, wanted, atol=2e-2)
    for one in (TEXTS[0], tokens[0]):
        np.testing.assert_allclose(asked(real, input=one, pooling=pooling), wanted[:1], atol=2e-2)


def test_dimensions_are_cut_off_before_the_length_is_1(real):
    raw = asked(real, input=TEXTS, normalize=False)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
    few = asked(real, input=TEXTS, dimensions=16)
    np.testing.assert_allclose(few, unit(raw[:, :16]), atol=1e-5)
    coded = real.post("/v1/embeddings", {"input": "x", "encoding_format": "base64"}).json()
    text = coded["data"][0]["embedding"]
    [plain] = asked(real, input="x")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), plain, atol=2e-2)


def test_more_inputs_than_rows_are_answered_and_others_pass(scripted):
    texts = ["x" * (n % 50 + 1) for n in range(600)]
    found = asked(scripted, input=texts, normalize=False)
    np.testing.assert_array_equal(found[:, 0], [len(text) for text in texts])
    added = scripted.service.worker.engine.added[-600:]
    assert [each.priority for each in added] == [0] * LIMITS.batch + [1] * (600 - LIMITS.batch)
    metrics = scripted.client.get("/metrics").text
    [line] = [line for line in metrics.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
    assert float(line.split()[-1]) >= sum(map(len, texts))


def test_a_prompt_may_be_as_long_as_the_model(scripted):
    longest = scripted.service.limits.max_model_len
    assert asked(scripted, input="x" * longest).shape == (1, HIDDEN)
    response = scripted.post("/v1/embeddings", {"input": "x" * (longest + 1)})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    cut = asked(scripted, input="x" * 900, truncate_prompt_tokens=7, normalize=False)
    np.testing.assert_array_equal(cut, np.full((1, HIDDEN), 7))


@pytest.mark.parametrize(
    ("body", "param", "match"),
    [
        ({}, "input", "must be a text"),
        ({"input": []}, "input", "must be a text"),
        ({"input": ""}, "input", "has no tokens"),
        ({"input": [[]]}, "input", "must be a text"),
        ({"input": [1, 300]}, "input", "outside of 0 to 255"),
        ({"input": ["x"] * 2049}, "input", "2,049 prompts, and a request may have 2,048"),
        ({"input": "x", "dimensions": 9}, "dimensions", "8"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ({"input": "x", "pooling": "cls"}, "pooling", "mean, last"),
        ({"input": "x", "model": "other"}, "model", "no model"),
    ],
)
def test_what_is_wrong_is_named(scripted, body, param, match):
    response = scripted.post("/v1/embeddings", body)
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == param and match in error["message"]


def test_a_model_without_hidden_states_says_so():
    with live(served(ScriptedEngine)) as server:
        response = server.post("/v1/embeddings", {"input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_embeddings")
