"""Exact mode: a row's log-probabilities are the same bits in any company, and when it is scored."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request, logprob_array
from jaxattn.engine.requests.outputs import Logprobs
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.startup.decode_step_count import choose_decode_steps
from jaxattn.nn import token_logprobs
from tests.helpers.exact_rows import (
    FAMILIES,
    LEAST,
    TINY,
    bits,
    compare,
    exact_engine,
    exact_model,
    exact_params,
    on_gpu,
    random_rows,
)

pytestmark = pytest.mark.lazy_steps

REASON = "a mixer whose bits depend on other rows; found in the hybrids too"


@functools.cache
def engine_of(family: str) -> Engine:
    return exact_engine(family, TINY, batch=4, num_pages=9)


@pytest.mark.usefixtures("no_forecast")
@pytest.mark.parametrize(
    "family",
    [
        family if family == "gdn" else pytest.param(family, marks=pytest.mark.slow(reason=REASON))
        for family in FAMILIES
    ],
)
def test_no_bit_differs_in_other_company_or_when_a_row_is_scored(family):
    engine = engine_of(family)
    found = compare(engine, random_rows(random.Random(4), 8, TINY), random.Random(5))
    assert not found.differing
    assert found.preempted and found.replayed and found.cached and found.tokens > 150


def test_a_prompt_has_the_same_bits_beside_one_of_which_more_is_told():
    engine, draw = engine_of("gdn"), random.Random(2)
    prompts = [[draw.randrange(TINY["vocab"]) for _ in range(n)] for n in (90, 70, 110)]
    asked = [
        Request(prompt, max_tokens=1, prompt_logprobs=most)
        for prompt, most in zip(prompts, (0, 3, 1), strict=True)
    ]
    together = engine.generate(asked)
    for request, found in zip(asked, together, strict=True):
        [alone] = engine.generate([request])
        assert bits(found.prompt_logprobs) == bits(alone.prompt_logprobs)
        assert len(bits(found.prompt_logprobs)) == len(request.prompt) - 1


def test_one_executable_decodes_whatever_rows_ask_for():
    names = set(engine_of("gdn").executables)
    assert {name for name in names if name.startswith("decode")} == {"decode of 4 x 1 tokens"}
    assert not any("round" in name or "draft" in name for name in names)
    small = {"weights": jax.ShapeDtypeStruct((4,), np.float32)}
    several = choose_decode_steps(Limits(), small, gpu=True)
    assert several.round_steps == 8
    assert choose_decode_steps(Limits(reproducible=True), small, gpu=True).round_steps == 1


@pytest.mark.usefixtures("no_forecast")
def test_a_row_that_lost_its_pages_says_each_token_once():
    engine, seen = engine_of("gdn"), {}
    requests = [Request([7] * 130, max_tokens=80, seed=n, temperature=1.0) for n in range(4)]
    done = engine.generate(
        requests, on_token=lambda request, token: seen.setdefault(request.id, []).append(token)
    )
    assert engine.stats.preemptions and engine.stats.replayed_tokens > 50
    for number, each in enumerate(done):
        assert len(each.tokens) == 80 and seen[number] == list(each.tokens)
        [alone] = engine.generate([requests[number]])
        assert alone.tokens == each.tokens and not engine.stats.preemptions


def test_a_request_goes_on_behind_what_it_replays():
    engine = engine_of("gdn")
    asked = Request([1, 2, 3], max_tokens=12, temperature=1.0, seed=5, logprobs=2)
    [drawn] = engine.generate([asked])
    [again] = engine.generate([dataclasses.replace(asked, replay=drawn.tokens[:7])])
    assert again.tokens == drawn.tokens and again.logprobs == drawn.logprobs
    [other] = engine.generate([dataclasses.replace(asked, replay=[9] * 3, max_tokens=3)])
    assert other.tokens == (9,) * 3


def test_what_cannot_be_replayed_is_refused_by_name():
    engine, text = engine_of("gdn"), list(range(20))
    for starts, said in (
        ([3, 4], "starts has 2 numbers for 1 texts"),
        ([0], r"starts\[0\] must be a positive integer"),
        ([21], r"starts\[0\]=21 is after the end of the text of 20 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.score([text], starts=starts)
    with pytest.raises(TypeError, match="starts must be integers, one for each text; got 3"):
        engine.score([text], starts=3)
    with pytest.raises(RuntimeError, match="400 prompt tokens and 200 to replay exceed"):
        engine.score([[1] * 600], starts=[400])
    with pytest.raises(RuntimeError, match="replay has a token outside of 0 to 63"):
        engine.score([[1, 64]], starts=[1])
    with pytest.raises(ValueError, match="replay has 2 tokens, more than max_tokens=1"):
        Request([1], replay=[2, 3], max_tokens=1)
    request = Request([1], replay=[2], max_tokens=1)
    assert "which needs an engine with Limits" in Scheduler(Limits(), 64).refusal(request)
    [whole] = engine.score([text], starts=[20])
    assert whole == (None,) * 20


def test_an_array_for_a_trainer_has_what_was_told_and_names_what_does_not_fit():
    found = logprob_array([(None, Logprobs(-1.5)), ()], 3)
    np.testing.assert_array_equal(found, np.float32([[np.nan, -1.5, np.nan], [np.nan] * 3]))
    with pytest.raises(ValueError, match="text 0 has 2 tokens, more than length=1"):
        logprob_array([(None, None)], 1)
    logits, tokens = np.zeros((1, 3, 4), np.float32), np.zeros((1, 3), np.int32)
    with pytest.raises(ValueError, match=r"scored \(1, 2\) must have the shape of tokens \(1, 3\)"):
        token_logprobs(logits, tokens, scored=np.zeros((1, 2), np.float32))
    with pytest.raises(TypeError, match="scored must be float32; got float64"):
        token_logprobs(logits, tokens, scored=np.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"tokens \(3,\) must have the shape \[B, T\]"):
        token_logprobs(logits, tokens[0])


def test_a_token_that_filters_left_out_is_left_out_of_a_ratio():
    """The way of docs/reproducibility.md: no NaN, and no gradient of that token."""
    tokens, scored = np.array([[1, 2, 3]]), np.float32([[np.nan, -1.5, -np.inf]])
    answered = np.isfinite(scored)
    old = np.where(answered, scored, 0)

    def loss(logits):
        new = token_logprobs(logits, tokens, scored=scored)
        return jnp.where(answered, jnp.exp(new - old), 0).sum(), new

    (ratio, new), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.zeros((1, 3, 4)))
    assert ratio == 1 and new[0, 2] == -np.inf and new[0, 1] == -1.5
    np.testing.assert_allclose(gradient[0], [[-0.25, -0.25, 0.75, -0.25], [0] * 4, [0] * 4])


@functools.cache
def drawn(family: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [B, T], what was told of them as they were drawn, what is told by their prefill)."""
    engine = engine_of(family)
    draw = random.Random(11)
    prompts = [[draw.randrange(TINY["vocab"]) for _ in range(n)] for n in (5, 30, 60)]
    options = dict(max_tokens=25, temperature=1.0, logprobs=0)
    done = engine.generate([Request(each, **options) for each in prompts])
    texts = [[*each.request.prompt, *each.tokens] for each in done]
    tokens = np.zeros((3, 90), np.int32)
    for line, text in zip(tokens, texts, strict=True):
        line[: len(text)] = text
    told = [(*(None,) * len(each.request.prompt), *each.logprobs) for each in done]
    return tokens, logprob_array(told, 90), logprob_array(engine.score(texts), 90)


def of_family(*quick: str) -> list:
    """Families of which the first run takes the quick ones."""
    slow = pytest.mark.slow(reason="a family's forward for training; found by models/test_parity")
    return [each if each in quick else pytest.param(each, marks=slow) for each in FAMILIES]


@pytest.mark.parametrize("family", of_family("gdn"))
def test_a_trainer_has_the_bits_of_fresh_rows_and_the_gradient_of_its_forward(family):
    tokens, told, scored = drawn(family)
    model = exact_model(family, TINY)
    params, counts = jax.device_put(exact_params(model, TINY)), ~np.isnan(told)
    old = np.nan_to_num(told)

    @jax.jit
    def run(params, scored):
        def loss(params):
            own = model.token_logprobs(params, tokens, scored=scored)
            return jnp.where(counts, own, 0).sum(), (own, jnp.exp(own - old))

        return jax.grad(loss, has_aux=True)(params)

    exact, (own, ratio) = run(params, told)
    assert own.dtype == np.float32 and counts.sum() == 75
    np.testing.assert_array_equal(np.asarray(ratio)[counts], 1)
    np.testing.assert_array_equal(
        np.asarray(own)[counts].view(np.int32), told[counts].view(np.int32)
    )
    gradients, (own, _) = run(params, np.full_like(told, np.nan))
    jax.tree.map(np.testing.assert_array_equal, exact, gradients)
    for engines in (told, scored):
        there = ~np.isnan(engines)
        assert np.abs(np.asarray(own) - engines)[there].mean() < 0.03


@pytest.mark.usefixtures("no_forecast")
@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_2_000_rows_of_a_family_differs(family):
    draw = random.Random(7)
    found = compare(on_gpu(family), random_rows(draw, 2_000, LEAST), draw)
    assert not found.differing
    assert found.preempted and found.replayed and found.cached
