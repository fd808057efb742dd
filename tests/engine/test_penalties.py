"""Penalties, biases and log-probabilities: their arithmetic, and that they reach a row's tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.requests.outputs import Logprobs
from jaxattn.engine.sampling import penalties
from jaxattn.engine.sampling.logprobs import logprobs

VOCAB = 12
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)), jnp.float32)
HISTORY = np.array([[1, 2, 2, 5, 5, 5, 9], [3, 3, 3, 3, 0, 0, 0], [4, 4, 4, 4, 4, 4, 4]], np.int32)


def by_hand(row, at, prompt, length, repetition, presence, frequency):
    """The definitions of OpenAI's penalties and of CTRL's, one token at a time."""
    found = np.array(LOGITS[row], np.float32)
    for token in range(VOCAB):
        logit, tokens = found[token], HISTORY[at][:length]
        if token in tokens:
            logit = logit / repetition if logit > 0 else logit * repetition
        count = int((tokens[prompt:] == token).sum())
        found[token] = logit - (presence if count else 0) - frequency * count
    return found


@pytest.mark.parametrize("block", [1024, 3, 1])
def test_penalties_are_those_of_their_definitions(monkeypatch, block):
    monkeypatch.setattr(penalties, "BLOCK", block)
    at, prompts, lengths = [1, 0, 3], [2, 3, 0], [4, 6, 0]
    repetition, presence, frequency = [1.5, 1.0, 2.0], [0.0, 0.7, 0.0], [0.25, -0.5, 0.0]
    found = penalties.penalized(
        LOGITS,
        jnp.asarray(HISTORY),
        *(jnp.asarray(x, jnp.int32) for x in (at, prompts, lengths)),
        repetition=jnp.asarray(repetition),
        presence=jnp.asarray(presence),
        frequency=jnp.asarray(frequency),
    )
    for row in range(2):
        values = (x[row] for x in (at, prompts, lengths, repetition, presence, frequency))
        np.testing.assert_allclose(found[row], by_hand(row, *values), rtol=1e-6)
    # A place that is none has no tokens.
    np.testing.assert_array_equal(found[2], LOGITS[2])


def test_a_row_without_penalties_keeps_its_bits():
    one, zero = jnp.ones(3), jnp.zeros(3)
    damaged = LOGITS.at[0, 1].set(jnp.nan).at[1, 3].set(-jnp.inf)
    lengths = jnp.full(3, 7, jnp.int32)
    found = penalties.penalized(
        damaged,
        jnp.asarray(HISTORY),
        jnp.arange(3),
        lengths - 5,
        lengths,
        repetition=one,
        presence=zero,
        frequency=zero,
    )
    assert np.asarray(found).tobytes() == np.asarray(damaged).tobytes()


def test_a_bias_is_added_and_one_of_no_token_is_dropped():
    tokens = jnp.asarray([[3, 2**31 - 1], [0, 3], [2**31 - 1] * 2], jnp.int32)
    biases = jnp.asarray([[1.5, 9.0], [-100.0, 0.5], [7.0, 7.0]])
    wanted = np.array(LOGITS)
    wanted[0, 3] += 1.5
    wanted[1, 0] -= 100
    wanted[1, 3] += 0.5
    np.testing.assert_array_equal(penalties.biased(LOGITS, tokens, biases), wanted)


@pytest.mark.parametrize("count", [0, 3, 20])
def test_logprobs_are_those_of_the_softmax_with_the_likeliest_first(count):
    logits = LOGITS.at[1, 4].set(LOGITS[1].max()).at[2, 0].set(-jnp.inf)
    lines = np.asarray(logprobs(logits, jnp.asarray([2, 4, 7])))
    for row, token in enumerate([2, 4, 7]):
        exact = np.asarray(logits[row], np.float64)
        exact = exact - np.log(np.exp(exact).sum())
        found = Logprobs.of(lines[row], count)
        np.testing.assert_allclose(found.token, exact[token], rtol=1e-5)
        order = np.argsort(-exact, kind="stable")[:count]
        assert [token for token, _ in found.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in found.top], exact[order], rtol=1e-5)
