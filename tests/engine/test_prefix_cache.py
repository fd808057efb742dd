"""The cache of prefixes: what is shared is what would have been computed, and nothing else is.

Each test of a fault is named for what must not happen; most have happened to other engines.
"""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import Engine, Limits, Request
from jaxattn.aliasing.checker import check_aliasing
from jaxattn.engine.scheduling.page_pool import PagePool
from jaxattn.engine.scheduling.prefix_cache import PendingInsert, PrefixCache, PrefixCacheStats
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import RECURRENT, SMALLEST, params_of, with_steps

pytestmark = pytest.mark.lazy_steps

WITH = Limits(batch=2, max_model_len=256, prefill_chunk=64, num_pages=10, checkpoints=3)
KINDS = {"pages": SMALLEST, "states": RECURRENT}
SYSTEM = bytes(range(1, 131))  # two blocks and a bit


class Uncached:
    """The engine as if it had no cache: each request has a salt of its own. It counts nothing."""

    def __init__(self, engine):
        self.engine, self.salts = engine, itertools.count()

    def generate(self, requests):
        kept = vars(counts(self.engine)).copy()
        salted = [
            dataclasses.replace(each, cache_salt=f"its own {next(self.salts)}") for each in requests
        ]
        done = self.engine.generate(salted)
        assert not any(each.cached_tokens for each in done)
        vars(counts(self.engine)).update(kept)
        return done


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """An engine with a cache, and the same without."""
    config = KINDS[request.param]
    engine = Engine(Hybrid(config), params_of(config), WITH, strict=True)
    engine.start()  # which gives back all pages
    return engine, Uncached(engine)


# A model with states has pages too: the first run takes it alone where their order matters little.
states_first = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            "pages",
            marks=pytest.mark.slow(
                reason="a page that a model without states shares wrongly; found with states, "
                "whose rows have pages too, and by all other tests there"
            ),
        ),
        "states",
    ],
    indirect=True,
)


@pytest.fixture(autouse=True)
def forgotten(request):
    """Each test begins with nothing cached, and leaves no page, slot or event."""
    if "pair" not in request.fixturenames:
        yield
        return
    engine, _ = request.getfixturevalue("pair")
    engine.scheduler.drop_rows()
    vars(counts(engine)).update(vars(PrefixCacheStats()))
    yield
    assert engine.scheduler.pages.in_use == engine.scheduler.slots.in_use == 0
    assert engine.scheduler.pages.available == engine.limits.pages
    assert not engine.busy and not engine.seal.counts


def request(text, **options):
    return Request(text, **{"max_tokens": 4} | options)


def served(engine, *requests):
    return [engine.generate([each])[0] for each in requests]


def texts(completions):
    return [each.tokens for each in completions]


def counts(engine):
    return engine.prefixes


def has_states(engine):
    return engine.scheduler.recurrent


# --- what is shared


def test_a_prompt_that_was_read_before_is_read_from_its_last_block_on(pair):
    cached, plain = pair
    [first] = served(cached, request(SYSTEM))
    assert first.tokens == served(plain, request(SYSTEM))[0].tokens
    [again] = served(cached, request(SYSTEM))
    assert cached.stats.prompt_tokens == 2 and cached.stats.prefill_steps == 1
    assert again.tokens == first.tokens
    assert (first.cached_tokens, again.cached_tokens) == (0, 128)
    assert counts(cached) == PrefixCacheStats(asked=260, hits=128)


@states_first
@pytest.mark.slow_cases(
    reason="a rare order of conversations; found by 20 rounds, for a frequent one too"
)
@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_conversations_say_what_they_say_without_a_cache(pair, rounds):
    """Turns that begin with all that was said before, beside others, in a pool that evicts.

    A talk that grows too long begins anew behind its first tokens: 500 rounds have 200 of them.
    """
    cached, plain = pair
    draw, hits, begun = random.Random(0), 0, 5
    talks = [bytes([i]) * draw.randint(1, 9) for i in range(5)]
    for _ in range(rounds):
        turn = draw.sample(range(5), 2)
        for i in turn:
            talks[i] += bytes(draw.randrange(256) for _ in range(draw.randint(1, 50)))
            if len(talks[i]) > 220:
                talks[i] = talks[i][: draw.choice([64, 65, 100, 128, 129])]
                begun += 1
        requests = [request(talks[i], max_tokens=draw.randint(1, 9), logprobs=0) for i in turn]
        done = cached.generate(requests)
        wanted = plain.generate(requests)
        assert texts(done) == texts(wanted)
        # Tokens alone may be the same where a state is another's. A row beside one whose prefix is
        # cached is read by steps of other sizes, which round differently.
        for each, other in zip(done, wanted, strict=True):
            found, expected = ([x.token for x in e.logprobs] for e in (each, other))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        hits += sum(each.cached_tokens for each in done)
        for i, each in zip(turn, done, strict=True):
            talks[i] += bytes(each.tokens)
    assert begun >= 200 or rounds < 500
    assert hits > 300  # those without a cache take its room
    assert counts(cached).hits == hits


@states_first
@pytest.mark.usefixtures("no_forecast")
def test_what_is_sampled_does_not_depend_on_the_cache(pair):
    cached, plain = pair
    requests = [request(SYSTEM, temperature=1.0, seed=i, logprobs=2) for i in range(3)]
    assert texts(served(cached, *requests)) == texts(served(plain, *requests))
    assert counts(cached).hits == 256


@states_first
@pytest.mark.usefixtures("no_forecast")
def test_a_row_that_loses_its_pages_finds_them_again(pair):
    cached, _ = pair
    requests = [request(bytes([i]) * 70, max_tokens=180) for i in range(2)]
    cached.scheduler.pages.allocate(5 * 64)  # half of the pool, until no request is left
    assert [len(each.tokens) for each in cached.generate(requests)] == [180, 180]
    assert cached.stats.preemptions > 0 and not cached.seal.counts


# --- what must not happen


def test_states_are_not_kept_in_unique_tails_alone(pair):
    """Every prompt has its own tail: where the third leaves the others, states are there."""
    cached, plain = pair
    requests = [request(SYSTEM[:128] + bytes([200 + i]) * 70) for i in range(4)]
    done = served(cached, *requests)
    assert texts(done) == texts(served(plain, *requests))
    expected = [0, 0, 128, 128] if has_states(cached) else [0, 128, 128, 128]
    assert [each.cached_tokens for each in done] == expected
    if has_states(cached):  # the miss is told, as such
        assert counts(cached).states_missed == 128


def test_pages_without_their_states_are_no_hit(pair):
    cached, plain = pair
    if not has_states(cached):
        pytest.skip("it has no states")
    served(cached, request(SYSTEM))
    # Three other prompts take the three checkpoint slots; the pages of the first are still there.
    served(cached, *(request(bytes([i]) * 65, max_tokens=1) for i in range(3)))
    [again] = served(cached, request(SYSTEM))
    assert again.cached_tokens == 0 and counts(cached).states_missed == 128
    assert again.tokens == served(plain, request(SYSTEM))[0].tokens


def test_a_fresh_row_does_not_begin_from_the_states_of_a_checkpoint(pair):
    cached, plain = pair
    requests = [request(SYSTEM), request(SYSTEM), request(b"\x07" * 66), request(SYSTEM)]
    assert texts(served(cached, *requests)) == texts(served(plain, *requests))


def test_a_checkpoint_is_never_a_live_slot(pair):
    """Rows that begin with one prefix at a time go on from copies."""
    cached, plain = pair
    served(cached, request(SYSTEM))
    requests = [request(SYSTEM + bytes([i]) * 3, max_tokens=30) for i in range(5)]
    done = cached.generate(requests)
    assert texts(done) == texts(plain.generate(requests))
    assert all(each.cached_tokens == 128 for each in done)


def test_the_last_token_of_a_prompt_is_always_read(pair):
    cached, plain = pair
    whole = request(SYSTEM[:128])
    first, again = served(cached, whole, whole)
    assert first.tokens == again.tokens == served(plain, whole)[0].tokens
    assert again.cached_tokens == 64


def test_a_partly_filled_page_is_not_shared(pair):
    cached, plain = pair
    short, long = request(SYSTEM[:100], max_tokens=20), request(SYSTEM[:101] + b"!" * 9)
    done = served(cached, short, long)
    assert texts(done) == texts(served(plain, short, long))
    assert done[1].cached_tokens == 64


def test_another_salt_shares_nothing(pair):
    cached, _ = pair
    first, other, same = served(
        cached, *(request(SYSTEM, cache_salt=salt) for salt in ("a", "b", "a"))
    )
    assert (other.cached_tokens, same.cached_tokens) == (0, 128)
    assert first.tokens == other.tokens == same.tokens


def test_salt_and_tokens_are_not_one_text():
    cache = PrefixCache(PagePool(4, 4), 4, range(0), PrefixCacheStats(), recurrent=False)
    assert cache.keys([0, 1, 2, 3, 4], "") != cache.keys([1, 2, 3, 4, 0], "0")
    assert cache.keys([1] * 9, "a")[0] != cache.keys([1] * 9, "a")[1]


def test_what_was_cached_before_an_error_is_not_used_after_it(pair):
    """The step may have written anything, and states that were lost are allocated again."""
    cached, plain = pair
    served(cached, request(SYSTEM))
    name = "round of 2 rows: greedy"
    real = cached.executables

    def fails(*args):
        raise RuntimeError("the device is lost")

    with_steps(cached, {**real, name: fails})
    with pytest.raises(RuntimeError, match="lost"):
        served(cached, request(b"x", max_tokens=9))
    with_steps(cached, real)
    nan = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cached.state.caches)
    cached._runner.state = dataclasses.replace(cached.state, caches=nan)
    cached.seal.hold((cached._runner.state, cached._runner.rows))
    [again] = served(cached, request(SYSTEM))
    assert again.cached_tokens == 0
    assert again.tokens == served(plain, request(SYSTEM))[0].tokens


@states_first
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 50.0}, {"presence_penalty": 2.0, "frequency_penalty": 1.0}]
)
def test_a_row_with_penalties_shares_prefixes_and_counts_the_tokens_of_its_whole_prompt(
    pair, penalty
):
    cached, plain = pair
    # The row's place has the history of another request.
    served(cached, request(bytes(range(250, 130, -1)), **penalty))
    penalized = request(SYSTEM, **penalty, max_tokens=9, logprobs=0)
    done = served(cached, penalized, penalized, request(SYSTEM))
    assert [each.cached_tokens for each in done] == [0, 128, 128]  # a row with penalties fills it
    [wanted] = served(plain, penalized)
    assert [each.tokens for each in done[:2]] == [wanted.tokens] * 2
    assert [each.logprobs for each in done[:2]] == [wanted.logprobs] * 2


@states_first
@pytest.mark.usefixtures("no_forecast")
def test_penalties_count_a_cached_prefix_in_the_place_of_a_preempted_row(pair):
    cached, plain = pair
    heads = [bytes([i]) + SYSTEM[:70] for i in (5, 6)]
    both = [request(head, repetition_penalty=50.0, max_tokens=150) for head in heads]
    cached.scheduler.pages.allocate(5 * 64)  # half of the pool, until no request is left
    done = cached.generate(both)
    cached.scheduler.drop_rows()
    assert cached.stats.preemptions and any(each.cached_tokens for each in done)
    assert texts(done) == texts(served(plain, *both))


def test_the_copy_of_states_copies_no_stack(pair):
    cached, _ = pair
    report = check_aliasing(cached.executables["copy of states"], slack=0, fraction=1 / 2)
    assert report.aliased_bytes == report.donated_bytes
    assert all(copy.nbytes * 5 <= copy.leaf_nbytes for copy in report.copies)  # of five slots, one


def test_the_plan_has_the_checkpoints(pair):
    cached, _ = pair
    if not has_states(cached):
        pytest.skip("it has no states")
    states = cached.state.array("ssm_state")
    assert cached.plan["ssm state"] == states.nbytes and states.shape[1] == 5  # 2 rows and 3 more
    why = {item.name: item.why for item in cached.plan.items}
    assert "3 of the slots are for states at prefix boundaries" in why["ssm state"]
    assert "checkpoint" not in why["kv cache"] and "3 checkpoints" in cached.plan.title


# --- the host's side alone


def test_without_checkpoints_states_cannot_be_cached_and_nothing_is():
    limits = dataclasses.replace(WITH, checkpoints=0)
    assert Scheduler(limits, 256, recurrent=True).prefixes is None
    assert Scheduler(limits, 256, recurrent=False).prefixes is not None
    assert Scheduler(dataclasses.replace(WITH, prefix_cache=False), 256).prefixes is None


def test_a_block_is_whole_chunks_and_whole_pages():
    for chunk, block in ((16, 64), (64, 64), (96, 192), (128, 128)):
        found = Scheduler(Limits(batch=1, max_model_len=512, prefill_chunk=chunk), 256)
        assert found.prefixes.block == block
    with pytest.raises(ValueError, match="block must be a multiple of the page size 64; got 65"):
        PrefixCache(PagePool(4, 64), 65, range(0), PrefixCacheStats(), recurrent=False)


@settings(max_examples=60, deadline=None)
@given(
    recurrent=st.booleans(),
    draws=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=60),
)
def test_no_page_is_lost_or_owned_twice_whatever_comes_and_goes(recurrent, draws):
    """Rows with prompts of few distinct tokens, so that most share something, in a small pool."""
    pool, rows = PagePool(12, 2), []
    cache = PrefixCache(pool, 4, range(10, 13), PrefixCacheStats(), recurrent=recurrent)
    for kind, number in draws:
        if kind < 4:
            prompt = [*[kind // 2] * (number % 11), *[kind] * (number % 7), 9]
            keys = cache.keys(prompt, "")
            hit = cache.find(keys)
            assert len(hit.entries) * 4 < len(prompt)
            if recurrent and hit.entries:
                assert hit.entries[-1].slot in range(10, 13)
            pool.share(hit.pages)
            pages = pool.allocate(len(prompt) - 4 * len(hit.entries))
            if pages is None:
                pool.free(hit.pages)
                continue
            own = [*hit.pages, *pages]
            assert len(set(own)) == len(own)
            # A page that a row writes to is no other row's.
            assert not set(pages) & {page for held, _ in rows for page in held}
            cache.used(hit, len(prompt))
            entering = PendingInsert(keys, hit)
            for end in range(4 * len(hit.entries) + 4, len(prompt) + 1, 4):
                cache.enter(entering, end, own)
            rows.append((own, entering))
        elif rows:
            pool.free(rows.pop(number % len(rows))[0])
        held = {page for own, _ in rows for page in own}
        assert pool.in_use == len(held) and pool.available == 12 - len(held)
        kept = [page for entry in cache._entries.values() for page in entry.pages]
        assert len(kept) == len(set(kept))
        states = [entry.slot for entry in cache._entries.values() if entry.slot is not None]
        assert len(states) == len(set(states)) == cache.states
        for entry in cache._entries.values():
            assert entry.parent is None or cache._entries[entry.parent.key] is entry.parent
    for own, _ in rows:
        pool.free(own)
    assert sorted(pool.allocate(24)) == list(range(12)) and cache.states == 0
    assert not cache._entries and np.array(pool.in_use) == 12
