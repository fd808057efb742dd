"""Which tokens may come and what is told of them: allowed tokens, bad words, token ids."""

import json

import numpy as np
import pytest

from jaxattn.server.decoding.token_rules import TokenLimits, TokenRules
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine


def bits(rules, words=8):
    mask = np.zeros(words, np.int32)
    rules.mask(mask)
    return {32 * word + bit for word in range(words) for bit in range(32) if mask[word] >> bit & 1}


def test_stop_tokens_may_come_after_min_tokens():
    rules = TokenRules(2, None, [], (0, 31))
    for _ in range(2):
        assert bits(rules) == set(range(256)) - {0, 31}
        assert rules.accept(5)
    assert bits(rules) == set(range(256))


def test_only_allowed_tokens_come_and_bad_words_never_whole():
    rules = TokenRules(0, [7, 31, 200, 7], [(7, 31), (200,)], ())
    assert bits(rules) == {7, 31}
    rules.accept(7)
    assert bits(rules) == {7}
    rules.accept(7)
    rules.accept(31)
    assert bits(rules) == {7, 31}


class Even:
    """A grammar of even tokens, complete after the first."""

    def mask(self, words):
        words[:] = 0x55555555

    def accept(self, token):
        return False


def test_rules_go_along_with_a_grammar():
    rules = TokenRules(0, [1, 2, 4], [], ()).around(Even())
    assert bits(rules) == {2, 4} and rules.error is None
    assert not rules.accept(2)
    none = TokenRules(0, [1, 3], [], ()).around(Even())
    assert bits(none) == set() and none.error.param == "allowed_token_ids"


def test_a_request_without_limits_has_no_rules():
    assert TokenLimits().rules((0,), list) is None
    assert TokenLimits(min_tokens=3).rules((), list) is None
    words = TokenLimits(bad_words=("ab",)).rules((0,), lambda text: [1, *text.encode()])
    assert words._bad_words and {*words._bad_words} == {(97, 98), (32, 97, 98)}  # without BOS


def test_an_engine_follows_them(real, generated):
    [prompt, *_] = generated
    allowed = [ord("a"), ord("b")]
    asked = {"max_tokens": 6, "temperature": 0}
    found = real.complete(prompt, **asked, allowed_token_ids=allowed, return_token_ids=True).json()
    [choice] = found["choices"]
    assert set(choice["text"]) <= {"a", "b"} and len(choice["text"]) == 6
    assert choice["token_ids"] == list(choice["text"].encode())
    assert choice["prompt_token_ids"] == list(prompt.encode())
    whole = real.complete(prompt, **asked).json()["choices"][0]["text"]
    word = whole[1:3]
    without = real.complete(prompt, **asked, bad_words=[word]).json()["choices"][0]["text"]
    assert word not in without and without[:2] == whole[:2]
    stop = ord(whole[2])
    short = real.complete(prompt, **asked, stop_token_ids=[stop]).json()["usage"]
    long = real.complete(prompt, **asked, stop_token_ids=[stop], min_tokens=5).json()["usage"]
    assert short["completion_tokens"] == 2 and long["completion_tokens"] >= 5
    refused = real.complete(
        prompt, **asked, allowed_token_ids=[stop], stop_token_ids=[stop], min_tokens=2
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


STRUCTURED = [
    ({"choice": ["maybe", "no"]}, {"maybe", "no"}),
    ({"regex": "(yes|no)!"}, {"yes!", "no!"}),
    ({"grammar": 'root ::= "up" | "down"'}, {"up", "down"}),
    ({"grammar": 'start: "up" | "down"'}, {"up", "down"}),
    ({"json": {"enum": ["a", 1]}}, {'"a"', "1"}),
    ({"json": json.dumps({"const": 12})}, {"12"}),
]


@pytest.mark.parametrize("constraint, texts", STRUCTURED)
def test_structured_outputs_as_vllm_has_them(real, constraint, texts):
    asked = {"max_tokens": 20, "temperature": 0}
    found = real.complete("x", **asked, structured_outputs=constraint)
    assert found.json()["choices"][0]["text"] in texts
    [(name, value)] = constraint.items()
    older = real.complete("x", **asked, **{f"guided_{name}": value})
    assert older.json()["choices"][0]["text"] in texts


def test_token_ids_of_streams_and_chats(scripted):
    body = {"prompt": "é", "max_tokens": 4, "return_token_ids": True}
    events = scripted.stream("/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    assert [id for choice in choices for id in choice["token_ids"]] == list("éé".encode())
    assert choices[0]["prompt_token_ids"] == list("é".encode())
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    found = scripted.talk("hi", max_tokens=2, n=2, return_token_ids=True).json()
    for choice in found["choices"]:
        assert choice["token_ids"] == list(b"us")
        assert bytes(choice["prompt_token_ids"]) == b"user: hi\nassistant: "


def test_a_prompt_is_cut_at_its_beginning(scripted):
    found = scripted.complete("abcdef", max_tokens=2, truncate_prompt_tokens=2).json()
    assert found["choices"][0]["text"] == "ef" and found["usage"]["prompt_tokens"] == 2
    found = scripted.complete("x" * 300, max_tokens=2, truncate_prompt_tokens=-1).json()
    assert found["usage"]["prompt_tokens"] == 255
    found = scripted.talk("hi", max_tokens=2, truncate_prompt_tokens=11).json()
    assert found["usage"]["prompt_tokens"] == 11


def test_a_final_message_goes_on(scripted):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "He said: "},
    ]
    body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
    refused = scripted.post("/v1/chat/completions", body)
    assert refused.json()["error"]["param"] == "continue_final_message"
    scripted.post("/v1/chat/completions", body | {"add_generation_prompt": False})
    prompt = bytes(scripted.service.worker.engine.added[-1].prompt)
    assert prompt == b"user: hi\nassistant: He said: "


def test_what_the_cache_of_prefixes_held_is_told(real):
    asked = {"max_tokens": 1, "temperature": 0, "cache_salt": "of this test"}
    prompt = "import numpy as np\n" * 8
    first, again = (real.complete(prompt, **asked).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]


def test_models_and_the_tokenizer_are_described(scripted):
    assert scripted.client.get("/v1/models/model").json()["id"] == "model"
    found = scripted.client.get("/tokenizer_info").json()
    assert found["vocab_size"] == 256 and found["eos_token_ids"] == [0]
    with live(served(ScriptedEngine), names=("org/model", "b")) as server:
        assert server.client.get("/v1/models/org/model").json()["id"] == "org/model"
        ends = server.client.get("/v1/models").json()
        assert (ends["first_id"], ends["last_id"]) == ("org/model", "b")


def test_drafts_and_those_that_were_right_are_counted(scripted):
    stats = scripted.service.worker.engine.stats
    stats.drafted_tokens, stats.guessed_tokens, stats.drafting = 6, 4, {1: True, 32: False}
    scripted.complete("x", max_tokens=1)
    text = scripted.client.get("/metrics").text
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="model"} 6.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="model"} 4.0' in text
    for rows, drafts in (("1", 1.0), ("32", 0.0)):
        assert f'jaxattn:drafting{{model_name="model",rows="{rows}"}} {drafts}' in text
