"""/v1/completions: the text is the engine's, in OpenAI's form, whole or as it comes."""

import pytest


def texts(response):
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_the_text_is_what_the_engine_generates(real, generated):
    """Rows beside others, whole and in a stream."""
    prompts = list(generated)
    assert texts(real.complete(prompts, max_tokens=12)) == list(generated.values())
    streamed = [""] * len(prompts)
    for event in real.stream("/v1/completions", {"prompt": prompts, "max_tokens": 12}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == list(generated.values())


def test_the_form(scripted):
    found = scripted.complete("ab", max_tokens=5).json()
    assert found.pop("id").startswith("cmpl-") and found.pop("created") > 1.7e9
    assert found.pop("system_fingerprint").startswith("fp_")
    assert found == {
        "object": "text_completion",
        "model": "model",
        "choices": [
            {
                "index": 0,
                "text": "ababa",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    "prompt, wanted",
    [
        ("ab", ["aba"]),
        ([97, 98], ["aba"]),
        (["ab", "c"], ["aba", "ccc"]),
        ([[97, 98], [99]], ["aba", "ccc"]),
    ],
    ids=["text", "tokens", "texts", "lists of tokens"],
)
def test_a_prompt_may_be(scripted, prompt, wanted):
    assert texts(scripted.complete(prompt, max_tokens=3)) == wanted


def test_every_prompt_has_n_choices_and_its_echo(scripted):
    found = scripted.complete(["ab", "c"], n=2, max_tokens=2, echo=True)
    assert texts(found) == ["abab", "abab", "ccc", "ccc"]
    assert found.json()["usage"]["completion_tokens"] == 8
    events = scripted.stream("/v1/completions", {"prompt": "ab", "echo": True, "max_tokens": 2})
    assert "".join(event["choices"][0]["text"] for event in events) == "abab"


def test_without_a_limit_there_are_16_tokens(scripted):
    assert texts(scripted.complete("ab")) == ["ab" * 8]


def test_choices_of_a_seed_differ_and_come_again(real):
    asked = {"n": 3, "max_tokens": 6, "temperature": 1.5, "seed": 7}
    first, second = (texts(real.complete("def ", **asked)) for _ in range(2))
    assert first == second and len(set(first)) == 3
    assert texts(real.complete("def ", **{**asked, "seed": 8})) != first


def test_an_unseeded_draw_is_another_each_time(real):
    # Two draws of 6 tokens are equal in 1 of 200 pairs; of 24 tokens, 150 draws were all different.
    drawn = {texts(real.complete("def ", max_tokens=24, temperature=1.5))[0] for _ in range(3)}
    assert len(drawn) == 3


def test_a_seed_may_be_any_int64(scripted):
    for seed in (-(2**63), -1, 2**63 - 1):
        assert scripted.complete("ab", seed=seed).status_code == 200
    seeds = [request.seed for request in scripted.service.worker.engine.added[-3:]]
    assert all(0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == 3


def test_a_stop_string_is_cut_and_ends_the_row(scripted):
    found = scripted.complete("abcd", stop=["x", "da"], max_tokens=100).json()
    [choice] = found["choices"]
    assert choice["text"] == "abc"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "da")
    assert found["usage"]["completion_tokens"] == 5  # the stop string's tokens count
    kept = scripted.complete("abcd", stop="da", include_stop_str_in_output=True, max_tokens=100)
    assert texts(kept) == ["abcda"]


def test_a_stop_token_ends_the_row_unless_eos_is_ignored(scripted):
    stopped = scripted.complete("abcd", stop_token_ids=[99], max_tokens=9).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("ab", "stop", 99)
    [own] = scripted.complete("ab\0", stop_token_ids=[99], max_tokens=9).json()["choices"]
    assert (own["text"], own["finish_reason"], own["stop_reason"]) == ("ab", "stop", None)
    assert len(texts(scripted.complete("ab\0", max_tokens=9, ignore_eos=True))[0]) == 6
    shown = scripted.complete("ab\0", max_tokens=9, ignore_eos=True, skip_special_tokens=False)
    assert texts(shown) == ["ab\0" * 3]


def test_a_row_ends_at_the_model_length(scripted):
    found = scripted.complete("ab", max_tokens=100_000).json()
    assert found["usage"]["completion_tokens"] == 254
    assert found["choices"][0]["finish_reason"] == "length"


def test_no_character_is_cut_in_a_stream(scripted):
    said = "aé€😀"
    events = scripted.stream("/v1/completions", {"prompt": said, "max_tokens": 20})
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == said * 2 and "\ufffd" not in "".join(pieces)
    cut = scripted.complete("é", max_tokens=1).json()["choices"][0]["text"]
    assert cut == "\ufffd"  # half of a character is all there is
