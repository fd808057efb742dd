"""The requests of lm-eval's local-completions backend, answered as its hf backend would.

lm-eval 0.4 sends tokens, and reads `token_logprobs[context:-1]` and `top_logprobs[context:-1]` of
each choice: the last token is the one that it has to ask for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import FLOAT32, params_of
from tests.helpers.live_server import live, served

pytestmark = pytest.mark.lazy_steps

LIMITS = Limits(batch=2, max_model_len=128, prefill_chunk=64, prefill_rows=1, checkpoints=0)
# (context, continuation): one is longer than a chunk, one is the likeliest token after "a".
PAIRS = [(b"def add(", b"self, x)"), (b"ab" * 40, b"cd"), (b"a", b"?")]


@pytest.fixture(scope="module")
def server():
    def make():
        engine = Engine(Hybrid(FLOAT32), params_of(FLOAT32), LIMITS, strict=True)
        engine.start()
        return engine

    with live(served(make, limits=LIMITS)) as server:
        yield server


@pytest.fixture(scope="module")
def chances():
    """Tokens -> float32 [T, vocab] log-probabilities, of one pass without cache or kernel."""
    decoder = Hybrid(FLOAT32).bind(params_of(FLOAT32))
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(decoder(tokens)))

    def of(tokens):
        padded = np.zeros((1, LIMITS.max_model_len), np.int32)
        padded[0, : len(tokens)] = list(tokens)
        return np.asarray(forward(jnp.asarray(padded)))[0, : len(tokens)]

    return of


def pairs(chances):
    """The pairs, of which the last continues with the likeliest token."""
    *others, (context, _) = PAIRS
    return [*others, (context, bytes([int(chances(context)[-1].argmax())]))]


def read(choice, context):
    """(log-likelihood, is_greedy), as lm-eval's `parse_logprobs` reads them."""
    own = choice["logprobs"]["token_logprobs"][context:-1]
    top = choice["logprobs"]["top_logprobs"][context:-1]
    greedy = all(value == max(each.values()) for value, each in zip(own, top, strict=True))
    return sum(own), greedy


def test_a_log_likelihood_is_that_of_the_model(server, chances):
    asked = pairs(chances)
    prompts = [list(context + rest) for context, rest in asked]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    found = server.post("/v1/completions", {**body, "echo": True}).json()
    choices = sorted(found["choices"], key=lambda each: each["index"])
    greedy = []
    for (context, rest), choice in zip(asked, choices, strict=True):
        whole = context + rest
        of = chances(whole)[len(context) - 1 : -1]
        wanted = sum(line[token] for line, token in zip(of, rest, strict=True))
        value, is_greedy = read(choice, len(context))
        assert value == pytest.approx(wanted, abs=1e-3)
        assert is_greedy == all(of.argmax(axis=1) == list(rest))
        greedy.append(is_greedy)
        assert len(choice["logprobs"]["tokens"]) == len(whole) + 1
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert greedy[-1] and not all(greedy)
    assert choices[0]["text"].startswith("def add(self, x)")
    assert found["usage"]["completion_tokens"] == len(asked)


def test_a_prompt_alone_is_scored_and_counted(server, chances):
    text = "naïve €"
    body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0}
    found = server.post("/v1/completions", body).json()
    [choice] = found["choices"]
    told, data = choice["logprobs"], text.encode()
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert found["usage"]["completion_tokens"] == 0
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(data)
    of = chances(data)
    wanted = [of[at, token] for at, token in enumerate(data[1:])]
    np.testing.assert_allclose(told["token_logprobs"][1:], wanted, atol=1e-3)
    # Characters before the byte that begins, or goes on with, this one.
    assert told["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6, 6, 6]
    streamed = server.stream("/v1/completions", body)
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    assert {key: [x for part in parts for x in part[key]] for key in told} == told
    assert "".join(event["choices"][0]["text"] for event in streamed) == text


def test_a_prompt_as_long_as_the_model_is_scored(server):
    body = {"prompt": [[7] * 128], "echo": True, "logprobs": 1, "max_tokens": 0}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 128
    body["prompt"] = [[7] * 129]
    assert server.post("/v1/completions", body).status_code == 400


def test_a_prompt_of_one_token_has_its_place_in_the_lists(server):
    body = {"prompt": [[7], [8, 9]], "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    for most in (0, 1):
        found = server.post("/v1/completions", {**body, "max_tokens": most}).json()["choices"]
        for choice, prompt in zip(found, body["prompt"], strict=True):
            told, tokens = choice["logprobs"], len(prompt) + most
            assert [len(values) for values in told.values()] == [tokens] * 4
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            assert told["text_offset"][0] == 0 and len(choice["prompt_logprobs"]) == len(prompt)


def test_vllm_s_field_has_ranks_by_token(server, chances):
    text = b"import os"
    of, ids = chances(text), list(text)
    body = {"prompt": text.decode(), "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    talked = server.talk("import os", prompt_logprobs=0, max_tokens=1).json()["prompt_logprobs"]
    assert choice["logprobs"] is None and talked[0] is None
    assert all(len(each) == 1 for each in talked[1:])
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for line, token, entry in zip(of, ids[1:], others, strict=False):
        own = entry[str(token)]
        assert own["rank"] == 1 + np.sum(line > line[token])
        assert own["logprob"] == pytest.approx(line[token], abs=1e-3)
        assert own["decoded_token"] == chr(token)
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    refused = server.post("/v1/completions", {**body, "stream": True})
    assert refused.status_code == 400 and "stream: false" in refused.text


def test_tokens_that_are_spelled_alike_are_all_there(server):
    """Bytes above 127 are each a part of a character, and all are spelled U+FFFD."""
    body = {"prompt": "é€", "echo": True, "logprobs": 20, "max_tokens": 1}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    told, named = choice["logprobs"], 0
    for own, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert len(top) in (20, 21) and own in top.values()
        alike = [text for text in top if text.startswith("token_id:")]
        assert all(int(text.removeprefix("token_id:")) > 127 for text in alike)
        named += len(alike)
    assert named
