"""Log-probabilities of prompts: those of the model's own forward pass, whatever the chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Request, logprob_array
from jaxattn.engine.requests.outputs import FinishEvent, FinishReason, PromptEvent, TokenEvent
from jaxattn.engine.startup.executable_memory import bound_of
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.score_step import LOGITS_BYTES, ScoreStep
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import EXACT, ONE_BY_ONE, kept_steps, params_of, with_steps

pytestmark = pytest.mark.lazy_steps

# Less than a chunk, some chunks and a part, a whole chunk, and a token alone.
TEXTS = [bytes((7 * i + j * j) % 256 for j in range(n)) for i, n in enumerate((9, 150, 64, 1))]


@pytest.fixture(scope="module")
def engine():
    kept_steps(ONE_BY_ONE, config=EXACT)
    with Engine(Hybrid(EXACT), params_of(EXACT), ONE_BY_ONE, strict=True) as engine:
        engine.start()
        yield engine


@pytest.fixture(scope="module")
def expected(engine):
    """Text -> float32 [T, vocab]: the log-probabilities of its next token, of one forward pass."""
    decoder = engine.model.bind(params_of(EXACT))
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(decoder(tokens)))
    longest = max(map(len, TEXTS))
    found = {}
    for text in TEXTS:
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(text)] = list(text)
        found[text] = np.asarray(forward(jnp.asarray(tokens)))[0, : len(text)]
    return found


def check(text, found, expected, top):
    assert len(found) == len(text) and found[0] is None
    for place, each in enumerate(found[1:]):
        chances = expected[text][place]
        own = chances[text[place + 1]]
        assert each.token == pytest.approx(own, abs=1e-4)
        close = np.sum(chances > own - 1e-4)
        assert np.sum(chances > own + 1e-4) < each.rank <= close
        best = np.sort(chances)[::-1][:top]
        np.testing.assert_allclose([value for _, value in each.top], best, atol=1e-4)
        for token, value in each.top:
            assert value == pytest.approx(chances[token], abs=1e-4)


@pytest.mark.parametrize("top", [0, 3, 20])
def test_a_score_is_that_of_one_forward_pass(engine, expected, top):
    for text, found in zip(TEXTS, engine.score(TEXTS, top=top), strict=True):
        check(text, found, expected, top)


@pytest.mark.parametrize("top", [0, 2])
def test_a_score_is_a_sequence_and_an_array_of_the_same_numbers(engine, top):
    [found] = engine.score(TEXTS[1:2], top=top)
    tokens = [np.nan, *(each.token for each in found[1:])]
    np.testing.assert_array_equal(found.tokens, np.float32(tokens))
    np.testing.assert_array_equal(logprob_array([found], 160)[0, :150], found.tokens)
    assert found == tuple(found) and hash(found) == hash(tuple(found)) and tuple(found) == found
    assert found != tuple(found)[:-1] and found != 3 and len(found[1].top) == top
    assert found[-1] == found[149] and found[-3:] == tuple(found)[-3:] and found[0] is None
    with pytest.raises(IndexError):
        found[150]
    assert repr(found) == f"PromptLogprobs({tuple(found)})"


def drawn_from(chances, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Log-probabilities [vocab] of what is drawn with these filters, by sorting."""
    scaled = (chances / temperature).astype(np.float64)
    chances = np.exp(scaled - np.logaddexp.reduce(scaled))
    kept = chances >= min_p * chances.max()
    order = np.argsort(-chances, kind="stable")
    kept[order[top_k or len(order) :]] = False
    chances = np.where(kept, chances, 0)
    chances /= chances.sum()
    before = np.cumsum(chances[order]) - chances[order]
    kept[order[before >= top_p]] = False
    with np.errstate(divide="ignore"):
        return np.log(np.where(kept, chances, 0) / chances[kept].sum())


@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=0.6),
        dict(temperature=1.3, top_k=60),
        dict(temperature=0.8, top_p=0.9),
        dict(temperature=0.9, min_p=0.02, top_k=150, top_p=0.97),
    ],
)
def test_a_score_is_of_the_distribution_that_rows_draw_from(engine, expected, sampling):
    left_out = 0
    for top in (0, 2):
        for text, found in zip(TEXTS, engine.score(TEXTS, top=top, **sampling), strict=True):
            for place, each in enumerate(found[1:]):
                chances = drawn_from(expected[text][place], **sampling)
                assert each.token == pytest.approx(chances[text[place + 1]], abs=2e-4)
                best = np.sort(chances)[::-1][:top]
                np.testing.assert_allclose([value for _, value in each.top], best, atol=2e-4)
                left_out += each.token == -np.inf
    assert (left_out > 0) == (len(sampling) > 1)


def test_prompts_that_are_scored_in_different_ways_are_read_together(engine):
    ways = [{}, {"temperature": 0.5}, {"temperature": 0.5, "top_k": 3}]
    apart = [engine.score([TEXTS[1]], **way)[0] for way in ways]
    asked = [
        Request(TEXTS[1], max_tokens=0, prompt_logprobs=0, processed_logprobs=bool(way), **way)
        for way in ways
    ]
    for found, own in zip(engine.generate(asked), apart, strict=True):
        tokens = [[x.token for x in each[1:]] for each in (found.prompt_logprobs, own)]
        np.testing.assert_allclose(*tokens, atol=1e-4)
    assert len({each[5].token for each in apart}) > 1
    with pytest.raises(ValueError, match="processed_logprobs needs a temperature above 0"):
        engine.score([TEXTS[1]], temperature=0)


def test_drawn_tokens_have_the_score_of_their_distribution(engine):
    """Next to a row that is told the model's own."""
    sampling = dict(temperature=0.8, top_k=40, top_p=0.9)
    asked = [
        Request(TEXTS[0], max_tokens=12, seed=n, logprobs=1, processed_logprobs=n < 2, **sampling)
        for n in range(3)
    ]
    for number, done in enumerate(engine.generate(asked)):
        text = (*done.request.prompt, *done.tokens)
        [scored] = engine.score([text], **(sampling if number < 2 else {}))
        own, other = ([x.token for x in each] for each in (done.logprobs, scored[-12:]))
        np.testing.assert_allclose(own, other, atol=1e-3)
    assert engine.generate([dataclasses.replace(asked[0], processed_logprobs=False)])[0].tokens == (
        engine.generate(asked[:1])[0].tokens
    )


def test_a_request_that_draws_as_the_model_is_told_the_models_own():
    asked = Request(TEXTS[0], temperature=1.0, processed_logprobs=True)
    assert not asked.processed
    assert dataclasses.replace(asked, temperature=0.5).processed
    assert dataclasses.replace(asked, logit_bias={3: 1.0}).processed


def test_a_prompt_is_told_before_its_first_token_and_whole(engine, expected):
    asked = [Request(TEXTS[1], max_tokens=3, prompt_logprobs=2), Request(TEXTS[0], max_tokens=3)]
    ids, events = [engine.add(each) for each in asked], []
    while engine.busy:
        events += engine.step()
    own = [e for e in events if not isinstance(e, FinishEvent) and e.request.id == ids[0]]
    assert [type(e) for e in own] == [PromptEvent, TokenEvent, TokenEvent, TokenEvent]
    check(TEXTS[1], own[0].logprobs, expected, 2)
    done = {e.completion.request.id: e.completion for e in events if isinstance(e, FinishEvent)}
    assert done[ids[0]].prompt_logprobs == own[0].logprobs
    assert done[ids[1]].prompt_logprobs == ()


def test_nothing_is_generated_for_no_tokens(engine):
    [done] = engine.generate([Request(TEXTS[0], max_tokens=0)])
    assert (done.tokens, done.finish_reason, done.detail) == ((), FinishReason.LENGTH, "max_tokens")
    assert done.prompt_logprobs == ()


def test_a_prompt_as_long_as_the_model_is_scored_and_one_token_more_is_refused(engine):
    text = bytes(j % 256 for j in range(193))
    [found] = engine.score([text[:192]])
    assert len(found) == 192
    with pytest.raises(RuntimeError, match="193 tokens"):
        engine.score([text])


def test_what_the_cache_holds_is_read_again_and_entered(engine, expected):
    first, second, third = (
        engine.generate([Request(TEXTS[1], max_tokens=2, **more, cache_salt="mine")])[0]
        for more in ({"prompt_logprobs": 1}, {"prompt_logprobs": 1}, {})
    )
    assert first.cached_tokens == second.cached_tokens == 0 < third.cached_tokens
    assert first.prompt_logprobs == second.prompt_logprobs
    check(TEXTS[1], first.prompt_logprobs, expected, 1)
    assert first.tokens == third.tokens


@pytest.mark.usefixtures("no_forecast")
def test_a_row_that_loses_its_pages_keeps_what_was_told(engine, expected):
    texts = [TEXTS[1][:n] for n in (120, 121, 122)]
    done = engine.generate([Request(each, max_tokens=60, prompt_logprobs=1) for each in texts])
    assert engine.stats.preemptions > 0
    whole = {text: expected[TEXTS[1]][: len(text)] for text in texts}
    for text, each in zip(texts, done, strict=True):
        check(text, each.prompt_logprobs, whole, 1)
        assert len(each.tokens) == 60


def test_a_prompt_of_nan_ends_and_others_go_on(engine):
    real = engine.executables
    spoiled = dict(real)

    def score(hidden, weights, wanted):
        hidden, told = real["score of 64 tokens"](hidden, weights, wanted)
        return hidden, jnp.asarray(told).at[:, 1].set(np.float32(np.nan).view(np.int32))

    spoiled["score of 64 tokens"] = score
    with_steps(engine, spoiled)
    seal = engine.seal.strict
    engine.seal.strict = False  # the spoiling compiles
    try:
        asked = [
            Request(TEXTS[0], max_tokens=3, prompt_logprobs=0),
            Request(TEXTS[0], max_tokens=3),
        ]
        bad = engine.generate(asked[:1])[0]
        good = engine.generate(asked[1:])[0]
    finally:
        with_steps(engine, dict(real))
        engine.seal.strict = seal
    assert (bad.finish_reason, bad.tokens) == (FinishReason.NOT_FINITE, ())
    assert len(good.tokens) == 3


@pytest.mark.parametrize("wrong", [-1, 21, 2.5, "1"])
def test_a_count_that_is_none_is_named(wrong):
    with pytest.raises((TypeError, ValueError), match="prompt_logprobs must be"):
        Request(b"x", prompt_logprobs=wrong)


def test_logits_of_a_chunk_never_exist_at_once():
    """The plan of a step is bounded by its slice of tokens, whatever the chunk."""
    model = Hybrid(dataclasses.replace(EXACT, vocab_size=50_000))
    params = packed_shapes(model)
    temps = [
        bound_of(model, ScoreStep(tokens), ONE_BY_ONE, params, None).temp for tokens in (1024, 8192)
    ]
    sizes = [ScoreStep(tokens).size(50_000) for tokens in (1024, 8192)]
    assert sizes == [1024, 1024] and 4 * sizes[0] * 50_000 <= LOGITS_BYTES
    assert temps[0] == temps[1] < 36 * 2**20 + 4 * LOGITS_BYTES
