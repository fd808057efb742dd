"""What a request may ask of its tokens beside temperature and filters: refused by name, or kept."""

import dataclasses

import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.engine.requests.outputs import FinishReason
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import LIMITS, SMALLEST, kept_steps, params_of

pytestmark = pytest.mark.lazy_steps


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repetition_penalty": 0}, r"repetition_penalty must be from 1e-30 to 1e\+30; got 0"),
        # In float32 it would be 0, and logits infinite.
        ({"repetition_penalty": 1e-60}, "repetition_penalty must be from 1e-30"),
        ({"presence_penalty": -1e39}, r"presence_penalty must be from -1e\+30 to"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty must be from -1e\+30 to"),
        (
            {"temperature": 10**400},
            "temperature must be finite; got a number too large for a float",
        ),
        ({"logprobs": 21}, "logprobs must be from 0 to 20; got 21"),
        ({"logit_bias": {3: 101}}, r"logit_bias\[3\] must be from -100 to 100; got 101"),
        ({"logit_bias": {i: 1.0 for i in range(301)}}, "logit_bias has 301 tokens; at most 300"),
        ({"priority": 2**31}, "priority must be an int32"),
    ],
)
def test_a_control_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Request(b"x", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"logit_bias": 5}, "logit_bias must map tokens to numbers, got 5"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: a token must be an integer"),
        ({"logit_bias": {1: "a"}}, r"logit_bias\[1\] must be a number"),
        ({"logprobs": 1.5}, "logprobs must be an integer"),
        ({"presence_penalty": "a"}, "presence_penalty must be a number"),
    ],
)
def test_a_control_of_another_type_is_refused_by_name(options, message):
    with pytest.raises(TypeError, match=message):
        Request(b"x", **options)


def test_biases_are_kept_as_pairs_in_the_order_of_tokens():
    request = Request(b"x", logit_bias={7: -1, 3: 2.5})
    assert request.logit_bias == ((3, 2.5), (7, -1.0))
    assert Request(b"x", logit_bias=request.logit_bias) == request
    assert hash(request)


# --- what they do to tokens


@pytest.fixture(scope="module")
def engine():
    kept_steps(LIMITS)
    return Engine(Hybrid(SMALLEST), params_of(SMALLEST), LIMITS, strict=True)


def alone(engine, **options):
    return engine.generate([Request(b"controls", max_tokens=40, **options)])[0]


def test_a_bias_forbids_a_token_and_forces_another(engine):
    plain = alone(engine).tokens
    often = max(plain, key=plain.count)
    assert often not in alone(engine, logit_bias={often: -100}).tokens
    assert set(alone(engine, logit_bias={17: 100}).tokens) == {17}
    beyond = alone(engine, logit_bias={256: 100, 2**31 - 1: 100})
    assert (beyond.finish_reason, beyond.tokens) == (FinishReason.REFUSED, ())
    assert beyond.detail == "logit_bias has a token outside of 0 to 255"


def test_a_penalty_of_presence_lets_no_token_come_twice(engine):
    found = alone(engine, presence_penalty=1e6).tokens
    assert len(set(found)) == len(found) == 40


def test_a_penalty_of_repetition_looks_at_the_prompt_too(engine):
    found = alone(engine, repetition_penalty=1e6, presence_penalty=1e9).tokens
    assert len(set(found)) == len(found)
    plain = alone(engine).tokens
    prompt = bytes(plain[:1]) + b"controls"  # the likeliest first token, in the prompt
    [as_it_is] = engine.generate([Request(prompt, max_tokens=1)])
    forbidden = Request([*prompt, as_it_is.tokens[0]], max_tokens=1, logprobs=20)
    [before], [after] = (
        engine.generate([dataclasses.replace(forbidden, repetition_penalty=penalty)])
        for penalty in (1.0, 1e6)
    )
    likeliest = before.logprobs[0].top[0][0]
    assert before.tokens == (likeliest,)
    if likeliest in forbidden.prompt:
        assert after.tokens != before.tokens


def test_rows_with_controls_leave_rows_without_them_as_they_are(engine):
    plain = Request(b"plain", max_tokens=20)
    drawn = Request(b"drawn", max_tokens=20, temperature=1.0, seed=3)
    wanted = [engine.generate([request])[0].tokens for request in (plain, drawn)]
    for options in (
        {"temperature": 1.0, "top_k": 3},
        {"repetition_penalty": 1.5},
        {"logit_bias": {5: 3.0}},
        {"logprobs": 5},
    ):
        beside = Request(b"beside", max_tokens=9, **options)
        found = engine.generate([beside, plain, drawn])
        assert [each.tokens for each in found[1:]] == wanted


def test_every_token_comes_with_its_logprobs(engine):
    events = []
    engine.add(Request(b"chances", max_tokens=6, logprobs=4, temperature=1.0, seed=1))
    while engine.busy:
        events += engine.step()
    *tokens, finished = events
    done = finished.completion
    assert tuple(event.logprobs for event in tokens) == done.logprobs
    for token, chances in zip(done.tokens, done.logprobs, strict=True):
        values = [value for _, value in chances.top]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        assert chances.token <= values[0] <= 0
        assert dict(chances.top).get(token, chances.token) == chances.token
    assert not alone(engine).logprobs


def test_logprobs_do_not_change_the_text(engine):
    assert alone(engine, logprobs=0).tokens == alone(engine).tokens
    assert not alone(engine, logprobs=0).logprobs[0].top


def test_the_list_of_executables_stays_short():
    assert len(all_steps(Limits())) <= 15
