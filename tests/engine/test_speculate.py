"""Drafts by prompt lookup: they change when tokens come, and never which."""

import dataclasses

import pytest

from jaxattn import Engine, Limits, Request
from jaxattn.aliasing.checker import check_aliasing
from jaxattn.engine.requests.outputs import FinishEvent
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.steps.engine_state import cache_size
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import EXACT, ONE_BY_ONE, kept_steps, params_of

pytestmark = pytest.mark.lazy_steps

DRAFTS = dataclasses.replace(ONE_BY_ONE, speculate=3)
REPEATS = b"one two three, one two three, one two "


@pytest.fixture(scope="module")
def params():
    return params_of(EXACT)


@pytest.fixture(scope="module")
def plain(params):
    kept_steps(ONE_BY_ONE, config=EXACT)
    return Engine(Hybrid(EXACT), params, ONE_BY_ONE)


@pytest.fixture(scope="module")
def drafts(params):
    return Engine(Hybrid(EXACT), params, DRAFTS, strict=True)


@pytest.fixture(autouse=True)
def nothing_is_left_in_use(drafts):
    yield
    assert drafts.scheduler.pages.in_use == drafts.scheduler.slots.in_use == 0
    assert not drafts.busy and not drafts.seal.counts


def compared(plain, drafts, requests):
    """The completions of both, which must be the same."""
    wanted, found = plain.generate(requests), drafts.generate(requests)
    for one, other in zip(wanted, found, strict=True):
        assert other.tokens == one.tokens
        assert (other.finish_reason, other.detail) == (one.finish_reason, one.detail)
    return found


# --- whole engines


def test_greedy_rows_say_the_same_in_fewer_steps(plain, drafts):
    requests = [
        Request(REPEATS, max_tokens=70),
        *(Request(bytes([i]), max_tokens=90) for i in (3, 9)),
    ]
    compared(plain, drafts, requests)
    assert drafts.stats.guessed_tokens > 20
    assert drafts.stats.decode_steps < plain.stats.decode_steps
    assert drafts.stats.decoded_tokens == plain.stats.decoded_tokens


def test_drawn_rows_say_the_same(plain, drafts):
    """Each token is drawn by its seed and place, with a draft and without."""
    requests = [Request(REPEATS, max_tokens=60, temperature=0.3, seed=seed) for seed in range(5)]
    compared(plain, drafts, requests)
    assert drafts.stats.guessed_tokens > 0


@pytest.mark.slow(
    reason="a row whose sampling is another's; found by such rows beside drafts of a head in "
    "test_draft_head, by biases and penalties there, and by rows that the host looks at in "
    "test_decode_step_count, too"
)
def test_rows_that_want_more_of_sampling_say_the_same_beside_others(plain, drafts):
    options = (
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        {"temperature": 1.0, "top_k": 3},
        {"logit_bias": {5: 4.0}},
    )
    requests = [
        request
        for one in options
        for request in (Request(REPEATS, max_tokens=40), Request(REPEATS, max_tokens=12, **one))
    ]
    compared(plain, drafts, requests)


def test_top_p_and_biases_have_drafts_and_penalties_none(plain, drafts):
    for options in ({"temperature": 0.3, "top_p": 0.9}, {"logit_bias": {5: 4.0}}):
        requests = [Request(REPEATS, max_tokens=50, seed=seed, **options) for seed in range(3)]
        compared(plain, drafts, requests)
        assert drafts.stats.guessed_tokens > 0
    compared(plain, drafts, [Request(REPEATS, max_tokens=60, presence_penalty=0.1)])
    assert drafts.stats.guessed_tokens == 0


def test_a_row_of_few_tokens_does_not_wait_for_the_pages_of_a_long_one(drafts):
    """Steps in flight may have given all of its tokens; when they have not, it goes on at once."""
    drafts.add(Request(bytes([3]), max_tokens=150))
    short = drafts.add(Request(bytes([9]), max_tokens=6))
    steps, ended = 0, set()
    while short not in ended:
        steps += 1
        events = drafts.step()
        ended = {each.completion.request.id for each in events if isinstance(each, FinishEvent)}
    while drafts.busy:
        drafts.step()
    assert steps <= 18  # 40 where it waits


def test_a_row_ends_at_its_limit_and_its_stop_token_inside_a_draft(plain, drafts):
    [whole] = plain.generate([Request(REPEATS, max_tokens=60)])
    limits = [Request(REPEATS, max_tokens=most) for most in range(1, 12)]
    stops = [
        Request(REPEATS, max_tokens=60, stop_tokens=[t]) for t in sorted(set(whole.tokens))[:6]
    ]
    found = compared(plain, drafts, [*limits, *stops])
    assert {each.finish_reason for each in found} == {"length", "stop"}


def test_a_row_stops_at_a_string_that_a_draft_completed(params, plain):
    """A character per token: strings of eight end inside of what a step gave."""

    def spelled(tokens):
        return "".join(chr(0x100 + token) for token in tokens)

    [whole] = plain.generate([Request(REPEATS, max_tokens=60)])
    text, guessed = spelled(whole.tokens), 0
    with Engine(Hybrid(EXACT), params, DRAFTS, detokenize=spelled) as engine:
        for at in range(30, 50, 3):
            stop = text[at : at + 8]
            [done] = engine.generate([Request(REPEATS, max_tokens=60, stop_strings=[stop])])
            assert spelled(done.tokens) == text[: text.index(stop) + 8]
            guessed += engine.stats.guessed_tokens
        assert not engine.scheduler.pages.in_use
    assert guessed > 0


def test_a_row_at_full_length_writes_no_page_of_another(plain, drafts):
    """The last draft of a row of 192 tokens reaches behind them."""
    prompt = REPEATS * 3
    requests = [Request(prompt, max_tokens=190), Request(b"ab" * 9, max_tokens=80)]
    found = compared(plain, drafts, requests)
    assert len(found[0].tokens) == 192 - len(prompt)


@pytest.mark.parametrize("speculate", [0, 3])
def test_a_row_may_be_as_long_as_the_pages_and_no_longer(speculate):
    limits = Limits(batch=1, max_model_len=1024, num_pages=5, speculate=speculate)
    scheduler = Scheduler(limits, vocab_size=9)
    assert limits.longest_row == 5 * 64 + 1 - speculate
    prompt, most = [1] * 60, limits.longest_row - 60
    assert scheduler.refusal(Request(prompt, max_tokens=most)) is None
    assert "need 6 pages" in scheduler.refusal(Request(prompt, max_tokens=most + 1))


@pytest.mark.usefixtures("no_forecast")
def test_rows_that_lose_their_pages_say_the_same(plain, drafts):
    requests = [Request(bytes([65 + i] * 100), max_tokens=80) for i in range(3)]
    alone = [plain.generate([request])[0].tokens for request in requests]
    assert [each.tokens for each in drafts.generate(requests)] == alone
    assert drafts.stats.preemptions > 0


def test_a_prompt_of_the_prefix_cache_is_looked_up_too(drafts):
    """The second row reads nothing of its first 64 tokens, and drafts from them."""
    prompt = bytes(range(40, 100)) + bytes(range(10)) + bytes(range(40, 43))
    [first] = drafts.generate([Request(prompt, max_tokens=30)])
    steps = drafts.stats.decode_steps
    [second] = drafts.generate([Request(prompt, max_tokens=30)])
    assert second.cached_tokens == 64 and second.tokens == first.tokens
    assert drafts.stats.decode_steps == steps


# --- the plan


def test_spare_slots_and_pages_of_drafts_are_in_the_plan(plain, drafts):
    assert cache_size(DRAFTS).checkpoints == 1 + 3 * 3
    of_slot = plain.plan["ssm state"] // 4
    assert drafts.plan["ssm state"] == of_slot * (3 + 1 + 9)
    assert drafts.plan.total > plain.plan.total


def test_drafts_take_the_place_of_rounds_and_update_in_place(drafts):
    assert len(all_steps(Limits(speculate=3))) <= 16
    for name, step in drafts.executables.items():
        if name.startswith("draft"):
            report = check_aliasing(step)
            assert report.aliased_bytes == report.donated_bytes > 0


@pytest.mark.parametrize("wrong", [-1, 4, 1.5])
def test_an_impossible_number_of_drafts_is_refused(wrong):
    with pytest.raises(ValueError, match="speculate"):
        Limits(speculate=wrong)
