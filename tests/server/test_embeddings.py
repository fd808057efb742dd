"""/v1/embeddings: OpenAI's form, of the engine's embeddings."""

import base64
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import openai
import pytest

from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.startup.model_source import choose
from jaxattn.models.loading.pooling_config import (
    MODULES,
    POOLING,
    PoolingConfig,
    read_pooling_config,
)
from jaxattn.text import TextError
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import HIDDEN, LIMITS, ScriptedEngine

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "llama"
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
        ({}, "input", "must be a string"),
        ({"input": []}, "input", "must be a string"),
        ({"input": ""}, "input", "is empty; it needs at least one token"),
        ({"input": [[]]}, "input", "must be a string"),
        ({"input": [1, 300]}, "input", "outside of 0 to 255"),
        ({"input": ["x"] * 2049}, "input", "2,049 prompts, but at most 2,048 are allowed"),
        ({"input": "x", "dimensions": 9}, "dimensions", "8"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ({"input": "x", "pooling": "cls"}, "pooling", "mean, last"),
        ({"input": "x", "model": "other"}, "model", "does not serve the model 'other'"),
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


def write_modules(folder, pooling, *kinds):
    """A folder as Sentence Transformers writes it."""
    (folder / POOLING).mkdir(exist_ok=True)
    (folder / POOLING / "config.json").write_text(json.dumps(pooling))
    modules = [{"idx": n, "type": f"sentence_transformers.models.{k}"} for n, k in enumerate(kinds)]
    (folder / MODULES).write_text(json.dumps(modules))


FLAGS = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "include_prompt": True}


@pytest.mark.parametrize(
    ("pooling", "kinds", "found"),
    [
        (FLAGS | {"pooling_mode_mean_tokens": True}, ["Transformer", "Pooling"], ("mean", False)),
        (
            FLAGS | {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
            ["Transformer", "Pooling", "Normalize"],
            ("last", True),
        ),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Normalize"], ("mean", True)),
        ({"pooling_mode": "lasttoken"}, [], ("last", True)),
    ],
)
def test_a_published_folder_says_what_its_embeddings_are(tmp_path, pooling, kinds, found):
    assert read_pooling_config(tmp_path) == PoolingConfig()
    write_modules(tmp_path, pooling, *kinds)
    read = read_pooling_config(tmp_path)
    assert (read.pooling, read.normalize, read.missing) == (*found, "")
    shutil.copy(TINY / "config.json", tmp_path)
    options = parser().parse_args(["--model", str(tmp_path), "--port", "0"])
    assert choose(options).embedding_defaults() == read


@pytest.mark.parametrize(
    ("path", "pooling"),
    [("pool", "last"), (POOLING, "mean"), (None, "mean"), ("", "mean"), ("../pool", "mean")],
)
def test_the_listed_folder_of_the_pooling_is_read(tmp_path, path, pooling):
    write_modules(tmp_path, {"pooling_mode": "mean"}, "Pooling")
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    module = {"type": "sentence_transformers.models.Pooling"}
    listed = module if path is None else module | {"path": path}
    (tmp_path / MODULES).write_text(json.dumps([listed]))
    assert read_pooling_config(tmp_path).pooling == pooling


@pytest.mark.parametrize(
    ("pooling", "kinds", "missing"),
    [
        (FLAGS | {"pooling_mode_cls_token": True}, ["Pooling"], "asks for cls_token"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            ["Pooling"],
            "asks for mean_tokens and max_tokens",
        ),
        ({"pooling_mode": "lasttoken"}, ["Pooling", "Dense"], "has the module Dense"),
    ],
)
def test_other_embeddings_need_a_pooling_in_the_request(tmp_path, pooling, kinds, missing):
    write_modules(tmp_path, pooling, *kinds)
    own = read_pooling_config(tmp_path)
    model = dataclasses.replace(served(ScriptedEngine, hidden_size=HIDDEN), embedding=own)
    with live(model) as server:
        error = server.post("/v1/embeddings", {"input": "x"}).json()["error"]
        assert error["param"] == "pooling" and missing in error["message"]
        assert str(tmp_path) not in error["message"]
        assert asked(server, input="x", pooling="mean").shape == (1, HIDDEN)


def test_requests_have_the_model_s_own_embeddings(tmp_path):
    own = PoolingConfig(pooling="mean", normalize=False)
    with live(
        dataclasses.replace(served(ScriptedEngine, hidden_size=HIDDEN), embedding=own)
    ) as server:
        raw = asked(server, input="abc")
        assert server.service.worker.engine.added[-1].pooling == "mean"
        np.testing.assert_allclose(asked(server, input="abc", normalize=True), unit(raw), atol=1e-6)
        assert abs(np.linalg.norm(raw) - 1) > 0.1


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        (MODULES, "{}", "modules.json must contain a JSON list; got dict"),
        (MODULES, "[1]", "modules must be a list of objects"),
        (f"{POOLING}/config.json", '{"pooling_mode": 3}', "pooling_mode must be"),
        (
            f"{POOLING}/config.json",
            '{"pooling_mode_mean_tokens": "yes"}',
            "must be true or false; got 'yes'",
        ),
    ],
)
def test_damaged_files_of_embeddings_are_named(tmp_path, file, text, match):
    write_modules(tmp_path, {})
    (tmp_path / file).write_text(text)
    with pytest.raises(TextError, match=match):
        read_pooling_config(tmp_path)
