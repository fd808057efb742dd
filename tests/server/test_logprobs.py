"""Log-probabilities in both endpoints' forms, of an engine."""

import math

import pytest


def test_a_completion_has_the_logarithm_of_each_token_and_of_likely_ones(real):
    asked = {"logprobs": 3, "max_tokens": 6, "temperature": 0}
    choice = real.complete("def add(", **asked).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5]
    for token, own, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert len(top) == 3 and own == pytest.approx(max(top.values()), abs=1e-5)
        assert top[token] == pytest.approx(own, abs=1e-5)
        assert sum(map(math.exp, top.values())) <= 1.0001
    events = real.stream("/v1/completions", {"prompt": "def add(", **asked})
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [text for part in parts for text in part["tokens"]] == found["tokens"]
    assert [place for part in parts for place in part["text_offset"]] == [0, 1, 2, 3, 4, 5]


def test_a_chat_has_them_with_their_bytes(real):
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "temperature": 0}
    choice = real.talk("hi", **asked).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert (
        bytes(b for each in content for b in each["bytes"]).decode()
        == (choice["message"]["content"])
    )
    assert all(len(each["top_logprobs"]) == 2 and each["logprob"] <= 0 for each in content)
    assert real.talk("hi", max_tokens=1).json()["choices"][0]["logprobs"] is None


def test_a_bias_decides_and_a_penalty_changes(real):
    forced = real.complete("def ", logit_bias={"122": 100}, max_tokens=5, temperature=0)
    assert forced.json()["choices"][0]["text"] == "zzzzz"
    plain = real.complete("x = ", max_tokens=20, temperature=0).json()["choices"][0]["text"]
    penalized = real.complete("x = ", max_tokens=20, temperature=0, repetition_penalty=5.0)
    assert penalized.json()["choices"][0]["text"] != plain
