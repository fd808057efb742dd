"""Sampling: what temperature and top_p promise, and what a row's draw may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.sampling import SamplingBatch, sample, sampling_key

draw = jax.jit(sample)


def controls(rows, temperature=1.0, top_p=1.0, seeds=0, request_ids=0):
    def filled(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    return SamplingBatch(
        temperature=filled(temperature, jnp.float32),
        top_p=filled(top_p, jnp.float32),
        seeds=filled(seeds, jnp.uint32),
        request_ids=filled(request_ids, jnp.int32),
    )


def random_logits(rows, vocab=256):
    return 3 * jax.random.normal(jax.random.key(1), (rows, vocab))


def test_temperature_zero_is_the_argmax_and_the_lowest_id_of_equals():
    logits = random_logits(5).at[3, 17].set(50.0).at[3, 90].set(50.0)
    tokens = draw(logits, controls(5, temperature=0.0, seeds=range(5)), jnp.arange(5))
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == jnp.argmax(logits, axis=-1).tolist()
    assert tokens[3] == 17


@pytest.mark.parametrize("options", [{"top_p": 1e-6}, {"temperature": 1e-30}])
def test_the_extremes_of_both_controls_take_the_most_likely_token(options):
    logits = random_logits(8)
    tokens = draw(logits, controls(8, seeds=range(8), **options), jnp.arange(8))
    assert tokens.tolist() == jnp.argmax(logits, axis=-1).tolist()


def test_the_draw_is_categorical_under_the_key_of_seed_request_and_position():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))  # sorted already, so ids are places
    token = draw(logits, controls(1, seeds=7, request_ids=5), jnp.array([11]))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 5), 11)
    assert key == sampling_key(jnp.uint32(7), jnp.int32(5), jnp.int32(11))
    assert token[0] == jax.random.categorical(key, logits[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax_at_the_temperature(temperature):
    rows, logits = 20_000, jnp.array([1.0, -1.0, 2.0, 0.0])
    tokens = draw(
        jnp.broadcast_to(logits, (rows, 4)), controls(rows, temperature), jnp.arange(rows)
    )
    counts = np.bincount(tokens, minlength=4) / rows
    np.testing.assert_allclose(counts, jax.nn.softmax(logits / temperature), atol=0.015)


@pytest.mark.parametrize(
    "top_p, kept",
    [(0.4, [2]), (0.6, [2, 0]), (0.79, [2, 0]), (0.81, [2, 0, 3]), (1.0, [2, 0, 3, 1])],
)
def test_top_p_keeps_the_fewest_likely_tokens_that_reach_it(top_p, kept):
    rows, probabilities = 4_000, np.array([0.3, 0.05, 0.5, 0.15])
    logits = jnp.broadcast_to(jnp.log(probabilities), (rows, 4))
    tokens = draw(logits, controls(rows, top_p=top_p), jnp.arange(rows))
    counts = np.bincount(tokens, minlength=4) / rows
    expected = np.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    np.testing.assert_allclose(counts, expected, atol=0.03)
    assert set(np.flatnonzero(counts)) == set(kept)


def test_a_rows_draw_depends_on_no_other_row_and_not_on_its_place():
    rows = 6
    logits, positions = random_logits(rows), jnp.arange(rows) * 7
    values = {
        "temperature": np.linspace(0.5, 1.5, rows),
        "top_p": np.linspace(0.7, 1.0, rows),
        "seeds": np.arange(rows) + 3,
        "request_ids": np.arange(rows)[::-1] + 10,
    }
    together = draw(logits, controls(rows, **values), positions)
    shuffled = np.random.default_rng(0).permutation(rows)
    moved = {name: value[shuffled] for name, value in values.items()}
    again = draw(logits[shuffled], controls(rows, **moved), positions[shuffled])
    assert together[shuffled].tolist() == again.tolist()
    for row in range(rows):
        own = {name: value[row] for name, value in values.items()}
        alone = draw(logits[row : row + 1], controls(1, **own), positions[row : row + 1])
        assert alone[0] == together[row]


@pytest.mark.parametrize("varied", ["seeds", "request_ids", "positions"])
def test_seed_request_and_position_each_change_the_draw(varied):
    rows = 64
    options = {"seeds": 1, "request_ids": 2, "positions": 3} | {varied: np.arange(rows)}
    positions = jnp.broadcast_to(jnp.asarray(options.pop("positions")), (rows,))
    tokens = draw(jnp.zeros((rows, 256)), controls(rows, **options), positions)
    assert len(set(tokens.tolist())) > rows // 2
