"""Rows with grammars: no other token comes, and no other row is touched."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import Engine, Request
from jaxattn.engine.sampling.grammar_bitmask import EVERY, fill_bitmask, masked, words_of
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import LIMITS, SMALLEST, kept_steps, params_of

pytestmark = pytest.mark.lazy_steps


class Sorted:
    """Texts of at most `most` tokens, each larger than the one before; 255 may end one early."""

    def __init__(self, most: int, ends: bool = False):
        self.most, self.ends, self.tokens = most, ends, []

    def mask(self, words):
        assert words.dtype == np.int32 and not words.any()
        first = self.tokens[-1] + 1 if self.tokens else 100
        behind = self.most - len(self.tokens) - 1  # so many have to find room behind this one
        for token in [*range(first, 255 - behind), *[255] * self.ends]:
            words[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))

    def accept(self, token):
        self.tokens.append(token)
        return len(self.tokens) < self.most


@pytest.fixture(scope="module")
def engine():
    kept_steps(LIMITS)
    return Engine(Hybrid(SMALLEST), params_of(SMALLEST), LIMITS, strict=True)


@pytest.fixture(autouse=True)
def sealed(engine):
    yield
    assert not engine.seal.counts and not engine.busy
    assert engine.scheduler.pages.in_use == 0


def request(most=8, **options):
    return Request(b"sorted", **{"max_tokens": 30, "grammar": Sorted(most)} | options)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "seed": 4}, {"logprobs": 3}])
def test_only_tokens_that_the_grammar_allows_come(engine, options):
    [done] = engine.generate([request(**options)])
    assert len(done.tokens) == 8 and list(done.tokens) == sorted(set(done.tokens))
    assert done.tokens[0] >= 100 and max(done.tokens) < 255
    assert (done.finish_reason, done.detail) == ("stop", "grammar")
    assert done.request.grammar.tokens == list(done.tokens)


def test_each_row_has_its_own_grammar_and_others_none(engine):
    plain = [Request(bytes([65 + i]) * 9, max_tokens=12) for i in range(2)]
    wanted = [engine.generate([each])[0].tokens for each in plain]
    [alone] = engine.generate([request()])
    mixed = engine.generate([plain[0], request(), request(5), plain[1], request(3)])
    assert [mixed[0].tokens, mixed[3].tokens] == wanted
    assert [mixed[i].tokens for i in (1, 2, 4)] == [alone.tokens[:n] for n in (8, 5, 3)]


def test_a_stop_token_ends_a_text_where_the_grammar_allows_it(engine):
    """Biased towards it: it comes at once, and is no part of the text."""
    ending = request(grammar=Sorted(8, ends=True), stop_tokens=[255], logit_bias={255: 100})
    [done] = engine.generate([ending])
    assert (done.tokens, done.detail, ending.grammar.tokens) == ((), 255, [])
    [never] = engine.generate([dataclasses.replace(ending, grammar=Sorted(8))])
    assert len(never.tokens) == 8


def test_a_length_ends_a_text_that_the_grammar_would_go_on_with(engine):
    [done] = engine.generate([request(most=99, max_tokens=4)])
    assert len(done.tokens) == 4 and done.detail == "max_tokens"


def test_a_grammar_that_allows_nothing_ends_its_row_and_says_so(engine):
    class Nothing(Sorted):
        def mask(self, words):
            pass

    plain = Request(b"plain", max_tokens=5)
    wanted = engine.generate([plain])[0].tokens
    stuck, other = engine.generate([request(grammar=Nothing(3)), plain])
    assert (stuck.tokens, stuck.finish_reason) == ((), "not finite")
    assert "the request's grammar allowed no token" in stuck.detail and other.tokens == wanted


def test_a_batch_without_grammars_waits_for_nothing(engine, monkeypatch):
    called = []
    monkeypatch.setattr(engine._loop, "_masks_after_all", lambda *a: called.append(a))
    engine.generate([Request(b"plain", max_tokens=5)])
    assert not called


def test_a_mask_leaves_out_what_it_does_not_name_and_keeps_a_row_of_ones():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 70)), jnp.float32)
    logits = logits.at[1, 3].set(jnp.nan)
    words = np.array([[0, 1 << 30 | -(2**31), 0b100001], [EVERY] * 3], np.int32)
    found = np.asarray(masked(logits, words))
    assert np.flatnonzero(found[0] > -np.inf).tolist() == [62, 63, 64, 69]
    assert found[1].tobytes() == np.asarray(logits[1]).tobytes()
    assert words_of(70) == 3 and fill_bitmask((), 2, 70).tolist() == [[-1] * 3] * 2
