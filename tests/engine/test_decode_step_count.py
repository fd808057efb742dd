"""Several decode steps per call: they change how many tokens come at a time, and never which."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.aliasing.checker import check_aliasing
from jaxattn.engine.requests.outputs import FinishEvent, TokenEvent
from jaxattn.engine.startup.decode_step_count import choose_decode_steps
from jaxattn.engine.startup.engine_build import prepare
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.limits import MOST_STEPS
from jaxattn.models import Hybrid
from jaxattn.parallel import Parallel
from tests.helpers.engine_cases import (
    EXACT,
    ONE_BY_ONE,
    kept_steps,
    params_of,
    random_requests,
)

pytestmark = pytest.mark.lazy_steps

MODEL = Hybrid(EXACT)
FOUR = dataclasses.replace(ONE_BY_ONE, steps_per_round=4)


def spelled(tokens):
    """A character per token."""
    return "".join(chr(0x100 + token) for token in tokens)


@pytest.fixture(scope="module")
def params():
    return params_of(EXACT)


@pytest.fixture(scope="module")
def one(params):
    kept_steps(ONE_BY_ONE, config=EXACT)
    return Engine(MODEL, params, ONE_BY_ONE, detokenize=spelled)


@pytest.fixture(scope="module")
def four(params):
    return Engine(MODEL, params, FOUR, detokenize=spelled, strict=True)


@pytest.fixture(autouse=True)
def nothing_is_left_in_use(four):
    yield
    assert four.scheduler.pages.in_use == four.scheduler.slots.in_use == 0
    assert not four.busy and not four.seal.counts


@pytest.fixture
def sent(four, monkeypatch):
    """How many steps each call of decode steps ran."""
    four.start()
    log, decode = [], four._loop.runner.decode

    def counted(lines, level, words, steps, *more):
        log.append(steps)
        return decode(lines, level, words, steps, *more)

    monkeypatch.setattr(four._loop.runner, "decode", counted)
    return log


def compared(one, four, requests):
    """The completions of both, which must be the same: the logprobs but for rounding, since a row
    that decodes beside a prompt is computed among other rows."""
    wanted, found = one.generate(requests), four.generate(requests)
    for first, other in zip(wanted, found, strict=True):
        assert other.tokens == first.tokens
        assert (other.finish_reason, other.detail) == (first.finish_reason, first.detail)
        assert len(other.logprobs or ()) == len(first.logprobs or ())
        for one_token, other_token in zip(first.logprobs or (), other.logprobs or (), strict=True):
            assert other_token.token == pytest.approx(one_token.token, rel=1e-4)
            assert [token for token, _ in other_token.top] == [token for token, _ in one_token.top]
    return found


# --- tokens


def test_the_bits_are_those_of_single_steps(sent, one, four):
    """What the device holds of the rows and caches in the end, too, in one bucket."""
    requests = [
        Request(b"bits", max_tokens=62),
        Request(b"of a row that draws", max_tokens=62, temperature=0.9, seed=3, min_p=0.01),
        Request(b"and of a third", max_tokens=60),
    ]
    compared(one, four, requests)
    assert 4 in sent
    held = [(engine.state.caches, engine._runner.rows.cursor) for engine in (one, four)]
    for wanted, found in zip(*map(jax.tree.leaves, held), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.usefixtures("no_forecast")
def test_rows_that_lose_their_pages_say_the_same(one, four):
    requests = [Request(bytes([65 + i] * 100), max_tokens=80) for i in range(3)]
    alone = [one.generate([request])[0].tokens for request in requests]
    assert [each.tokens for each in four.generate(requests)] == alone
    assert four.stats.preemptions > 0


@pytest.mark.slow(
    reason="a rare mix of rows in too few pages; found by comings and goings, by rows that lose "
    "their pages or end inside a call, and by rows that the host looks at there too"
)
@pytest.mark.usefixtures("no_forecast")
def test_random_requests_say_the_same(one, four):
    """Rows that end anywhere in a call, beside rows that want single steps, in too few pages."""
    draw = random.Random(5)

    def drawn(id):
        options = draw.choice(
            [
                {},
                {},
                {"temperature": 0.8},
                {"stop_tokens": [draw.randrange(256) for _ in range(8)]},
                {"stop_tokens": range(40, 60)},
                {"stop_strings": [spelled([draw.randrange(256)])]},
                {"repetition_penalty": 1.3},
                {"temperature": 0.8, "top_k": 4},
                {"logprobs": 1},
            ]
        )
        prompt = bytes(draw.randrange(256) for _ in range(draw.randint(1, 90)))
        return Request(prompt, max_tokens=draw.randint(1, 100), seed=id, id=id, **options)

    requests = [drawn(id) for id in range(24)]
    found = compared(one, four, requests)
    assert {each.finish_reason for each in found} == {"length", "stop"}
    assert four.stats.preemptions > 0


def test_a_row_ends_at_its_limit_and_its_stop_token_inside_a_call(one, four):
    [whole] = one.generate([Request(b"inside", max_tokens=60)])
    limits = [Request(b"inside", max_tokens=most) for most in range(1, 14)]
    stops = [
        Request(b"inside", max_tokens=60, stop_tokens=[t]) for t in sorted(set(whole.tokens))[:6]
    ]
    found = compared(one, four, [*limits, *stops])
    assert {each.finish_reason for each in found} == {"length", "stop"}


def test_prefixes_of_the_cache_say_the_same(four):
    prompt = bytes(range(40, 110))
    first, second = (four.generate([Request(prompt, max_tokens=30)])[0] for _ in range(2))
    assert second.cached_tokens == 64 and second.tokens == first.tokens


def test_comings_and_goings_leave_nothing(one, four):
    draw = random.Random(4)
    requests = random_requests(draw, 10)
    wanted = {request.id: one.generate([request])[0].tokens for request in requests}
    told = {request.id: [] for request in requests}
    aborted, done, waiting = set(), {}, list(requests)
    while waiting or four.busy:
        if waiting and draw.random() < 0.4:
            four.add(waiting.pop())
        if draw.random() < 0.1:
            for id in list(told)[: draw.randint(0, 10)]:
                if draw.random() < 0.2 and four.abort(id):
                    aborted.add(id)
        for event in four.step():
            if isinstance(event, TokenEvent):
                assert event.request.id not in done
                told[event.request.id].append(event.token)
            elif isinstance(event, FinishEvent):
                assert event.completion.request.id not in done
                done[event.completion.request.id] = event.completion
    assert done.keys() == wanted.keys() and aborted
    for id, completion in done.items():
        assert list(completion.tokens) == told[id] == list(wanted[id][: len(told[id])])
        assert id in aborted or completion.tokens == wanted[id]


# --- which calls have how many


def test_steps_come_several_at_a_time_where_nobody_waits_for_fewer(sent, four):
    four.generate([Request(b"alone", max_tokens=30)])
    assert sent == [4] * 7 + [1]  # the last token is not worth four steps
    assert four.stats.decode_steps == four.stats.decoded_tokens == 29


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["none"]},
        {"ends_at": lambda token: False},
        {"logprobs": 1},
        {"top_k": 3, "temperature": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_row_that_the_host_looks_at_gets_its_tokens_one_by_one(sent, four, options):
    four.generate([Request(b"plain", max_tokens=12), Request(b"looked", max_tokens=8, **options)])
    beside = sent[: sent.index(4)] if 4 in sent else sent
    assert len(beside) >= 7 and set(beside) == {1}
    assert 4 in sent  # once it is gone


def test_rows_go_on_one_by_one_while_a_prompt_is_read(sent, four):
    """Three chunks: the row decodes within each, and none of several steps before the last."""
    four.add(Request(b"first", max_tokens=40))
    four.step()
    del sent[:]
    four.add(Request(bytes(range(150)), max_tokens=9))
    before = dataclasses.replace(four.stats)
    for _ in range(2):
        four.step()
    assert sent == []
    assert four.stats.decode_steps == before.decode_steps + 2
    assert four.stats.prefill_steps == before.prefill_steps + 2
    four.step()
    assert sent == [4]
    while four.busy:
        four.step()


def test_a_pool_without_pages_for_several_tokens_gives_them_one_by_one(sent, one, four):
    """Three rows of 126 tokens in seven pages, of which each has two: at most one gets a third."""
    requests = [Request(bytes([60 + i] * 64), max_tokens=62 + i % 2) for i in range(3)]
    compared(one, four, requests)
    assert {1, 4} <= set(sent)


# --- plan, limits, executables


def test_executables_are_no_more_than_without_and_update_in_place(four):
    assert len(all_steps(dataclasses.replace(FOUR, batch=16))) <= 16
    several = [name for name in four.executables if "rounds of" in name]
    assert several == [f"4 rounds of 3 rows: {level}" for level in ("greedy", "draws")]
    for name in several:
        report = check_aliasing(four.executables[name])
        assert report.aliased_bytes == report.donated_bytes > 0


def test_several_steps_take_no_more_temp_than_one(four):
    one, several = (
        four.executables[name].memory_analysis().temp_size_in_bytes
        for name in ("round of 3 rows: draws", "4 rounds of 3 rows: draws")
    )
    assert several <= one + 4096


@pytest.mark.parametrize(
    ("gigabytes", "gpu", "steps"),
    [(0.01, True, 8), (1.1, True, 8), (2, True, 8), (4.4, True, 4), (4.5, True, 1), (1, False, 1)],
)
def test_the_number_follows_from_the_weights(gigabytes, gpu, steps):
    weights = jax.ShapeDtypeStruct((int(gigabytes * 2**29),), "bfloat16")
    assert choose_decode_steps(Limits(), weights, gpu=gpu).round_steps == steps
    assert choose_decode_steps(Limits(steps_per_round=3), weights, gpu=gpu).round_steps == 3
    assert choose_decode_steps(Limits(speculate=1), weights, gpu=gpu) == Limits(speculate=1)
    assert choose_decode_steps(Limits(), weights, gpu=gpu, gpus=2) == Limits()


def test_limits_that_make_no_sense_are_refused():
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="steps_per_round"):
            Limits(steps_per_round=wrong)
    with pytest.raises(ValueError, match=f"at most {MOST_STEPS}; got 9"):
        Limits(steps_per_round=9)
    with pytest.raises(ValueError, match="speculate=2"):
        Limits(steps_per_round=2, speculate=2)
    with pytest.raises(ValueError, match="a single GPU, but parallel has 2"):
        prepare(MODEL, MODEL.param_shapes(), FOUR, parallel=Parallel(tensor=2))
