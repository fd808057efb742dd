"""Sampling: what each control promises, and what a row's draw may depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.requests.request import Request
from jaxattn.engine.sampling.sampler import (
    NOT_FINITE,
    SamplingBatch,
    SamplingMode,
    _filters,
    level_of,
    sample,
    sampling_key,
)

draw = jax.jit(sample)
# Tests share their shapes, and so three programs: logits of 256 tokens for these rows or for one,
# and of four tokens for many rows, of which frequencies are counted.
ROWS, MANY = 64, 20_000


def controls(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0):
    def filled(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    return SamplingBatch(
        temperature=filled(temperature, jnp.float32),
        top_k=filled(top_k, jnp.int32),
        top_p=filled(top_p, jnp.float32),
        min_p=filled(min_p, jnp.float32),
        seeds=filled(seeds, jnp.uint32),
    )


@functools.cache
def random_logits(rows=ROWS, vocab=256):
    return 3 * jax.random.normal(jax.random.key(1), (rows, vocab))


def of_many(logits):
    return jnp.asarray(np.broadcast_to(np.asarray(logits, np.float32), (MANY, 4)))


def test_temperature_zero_is_the_argmax_and_the_lowest_id_of_equals():
    logits = random_logits().at[3, 17].set(50.0).at[3, 90].set(50.0)
    tokens = draw(logits, controls(ROWS, temperature=0.0, seeds=range(ROWS)), jnp.arange(ROWS))
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == jnp.argmax(logits, axis=-1).tolist()
    assert tokens[3] == 17


@pytest.mark.parametrize(
    "options",
    [{"top_p": 1e-6}, {"top_p": 1e-40}, {"temperature": 1e-30}, {"top_k": 1}, {"min_p": 1.0}],
)
def test_the_extremes_of_each_control_take_the_most_likely_token(options):
    logits = random_logits()
    tokens = draw(logits, controls(ROWS, seeds=range(ROWS), **options), jnp.arange(ROWS))
    assert tokens.tolist() == jnp.argmax(logits, axis=-1).tolist()


def test_the_draw_is_categorical_under_the_key_of_seed_and_position():
    logits = random_logits()[:1]
    token = draw(logits, controls(1, seeds=7), jnp.array([11]))
    key = jax.random.fold_in(jax.random.key(7), 11)
    assert key == sampling_key(jnp.uint32(7), jnp.int32(11))
    assert token[0] == jax.random.categorical(key, logits[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax_at_the_temperature(temperature):
    logits = np.array([1.0, -1.0, 2.0, 0.0])
    tokens = draw(of_many(logits), controls(MANY, temperature), jnp.arange(MANY))
    counts, chances = np.bincount(tokens, minlength=4) / MANY, np.exp(logits / temperature)
    np.testing.assert_allclose(counts, chances / chances.sum(), atol=0.015)


@pytest.mark.parametrize(
    "top_p, kept",
    [(0.4, [2]), (0.6, [2, 0]), (0.79, [2, 0]), (0.81, [2, 0, 3]), (1.0, [2, 0, 3, 1])],
)
def test_top_p_keeps_the_fewest_likely_tokens_that_reach_it(top_p, kept):
    probabilities = np.array([0.3, 0.05, 0.5, 0.15])
    tokens = draw(of_many(np.log(probabilities)), controls(MANY, top_p=top_p), jnp.arange(MANY))
    counts = np.bincount(tokens, minlength=4) / MANY
    expected = np.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    np.testing.assert_allclose(counts, expected, atol=0.03)
    assert set(np.flatnonzero(counts)) == set(kept)


def test_a_rows_draw_depends_on_no_other_row_and_not_on_its_place():
    rows = ROWS
    logits, positions = random_logits(), jnp.arange(rows) * 7
    values = {
        "temperature": np.linspace(0.5, 1.5, rows),
        "top_p": np.linspace(0.7, 1.0, rows),
        "top_k": np.arange(rows)[::-1] * 5,
        "min_p": np.linspace(0.0, 0.1, rows),
        "seeds": np.arange(rows) + 3,
    }
    together = draw(logits, controls(rows, **values), positions)
    shuffled = np.random.default_rng(0).permutation(rows)
    moved = {name: value[shuffled] for name, value in values.items()}
    again = draw(logits[shuffled], controls(rows, **moved), positions[shuffled])
    assert together[shuffled].tolist() == again.tolist()
    for row in range(0, rows, 9):
        own = {name: value[row] for name, value in values.items()}
        alone = draw(logits[row : row + 1], controls(1, **own), positions[row : row + 1])
        assert alone[0] == together[row]


@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_seed_and_position_each_change_the_draw(varied):
    rows = ROWS
    options = {"seeds": 1, "positions": 3} | {varied: np.arange(rows)}
    positions = jnp.broadcast_to(jnp.asarray(options.pop("positions")), (rows,))
    tokens = draw(jnp.zeros((rows, 256)), controls(rows, **options), positions)
    assert len(set(tokens.tolist())) > rows // 2


@pytest.mark.parametrize("top_k, kept", [(1, [2]), (2, [2, 0]), (3, [2, 0, 3]), (0, [2, 0, 3, 1])])
def test_top_k_keeps_the_k_most_likely_tokens(top_k, kept):
    logits = of_many(np.log([0.3, 0.05, 0.5, 0.15]))
    tokens = draw(logits, controls(MANY, top_k=top_k), jnp.arange(MANY))
    assert set(tokens.tolist()) == set(kept)


def test_of_equally_likely_tokens_top_k_keeps_the_lowest_ids():
    tokens = draw(of_many(np.zeros(4)), controls(MANY, top_k=3), jnp.arange(MANY))
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("min_p, kept", [(0.05, [0, 1, 2, 3]), (0.2, [0, 2, 3]), (0.7, [2])])
def test_min_p_keeps_what_is_likely_beside_the_most_likely_token(min_p, kept):
    logits = of_many(np.log([0.3, 0.05, 0.5, 0.15]))
    tokens = draw(logits, controls(MANY, min_p=min_p), jnp.arange(MANY))
    assert set(tokens.tolist()) == set(kept)


def test_top_p_filters_what_top_k_leaves():
    """Of 0.5 and 0.3, the first is 62%: a top_p of 0.6 keeps it alone."""
    logits = of_many(np.log([0.3, 0.05, 0.5, 0.15]))
    tokens = draw(logits, controls(MANY, top_k=2, top_p=0.6), jnp.arange(MANY))
    assert set(tokens.tolist()) == {2}


@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (7, 1.0), (20, 0.5), (300, 0.999), (1, 0.01)])
def test_the_filters_keep_what_a_sort_keeps(top_k, top_p):
    rows, vocab = 5, 301
    logits = jnp.round(4 * random_logits(rows, vocab)) / 4  # many are equal
    scaled = logits - logits.max(1, keepdims=True)
    batch = controls(rows, top_k=top_k, top_p=top_p)
    found = np.asarray(_filters(scaled, batch, jnp.ones(rows, bool)) > -jnp.inf)
    for row in range(rows):
        values = np.asarray(scaled[row], np.float64)
        order = np.argsort(-values, kind="stable")[: top_k or vocab]
        chances = np.exp(values[order]) / np.exp(values[order]).sum()
        before = np.cumsum(chances) - chances
        kept = np.zeros(vocab, bool)
        kept[order[(before < top_p - 1e-6) | (np.arange(len(order)) == 0)]] = True
        at_the_edge = np.zeros(vocab, bool)
        at_the_edge[order[np.abs(before - top_p) < 1e-6]] = True
        np.testing.assert_array_equal(found[row] | at_the_edge, kept | at_the_edge)


def kept(scaled, **options):
    """Which tokens the filters keep in a compiled step, 1 row."""
    batch = controls(1, **options)
    found = jax.jit(_filters)(jnp.array([scaled]), batch, jnp.ones(1, bool))[0]
    return np.flatnonzero(found > -jnp.inf).tolist()


def test_of_tokens_that_share_the_maximum_the_filters_keep_the_lowest_ids():
    assert kept([0.0] * 4, top_p=0.2) == [0]
    assert kept([0.0] * 4, top_p=0.3) == [0, 1]
    assert kept([-1.0, 0.0, 0.0], top_p=1e-40) == [1]
    assert kept([0.0, -0.0, 0.0, -1.0], top_k=2) == [0, 1]


def test_a_step_searches_the_vocabulary_only_at_the_level_of_rows_that_filter():
    """48 passes over 150,000 logits take longer than the rest of sampling together."""
    names = {}
    for level in SamplingMode:
        step = functools.partial(sample, level=level)
        jaxpr = jax.make_jaxpr(step)(random_logits(2), controls(2), jnp.arange(2)).jaxpr
        names[level] = names_of(jaxpr)
    assert ["cumsum" in found for found in names.values()] == [False, False, True, True]
    assert ["random_bits" in found for found in names.values()] == [False, True, True, True]
    # XLA has the host wait for either.
    assert not any({"sort", "cond"} & found for found in names.values())


compiled = jax.jit(sample, static_argnums=3)


@pytest.mark.parametrize("level", list(SamplingMode))
def test_a_level_changes_no_row_that_needs_less(level):
    needs = {
        SamplingMode.GREEDY: {"temperature": 0.0},
        SamplingMode.DRAWS: {"temperature": 0.7, "min_p": 0.01},
        SamplingMode.CONTROLS: {"top_k": 9, "top_p": 0.8},
    }
    for least, options in needs.items():
        if least <= level:
            batch = controls(6, seeds=range(6), **options)
            wanted = compiled(random_logits(6), batch, jnp.arange(6), least)
            found = compiled(random_logits(6), batch, jnp.arange(6), level)
            assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "options, level",
    [
        ({}, SamplingMode.GREEDY),
        ({"top_k": 5}, SamplingMode.GREEDY),
        ({"temperature": 1.0, "min_p": 0.1}, SamplingMode.DRAWS),
        ({"temperature": 1.0, "top_k": 5}, SamplingMode.CONTROLS),
        ({"temperature": 1.0, "top_p": 0.5}, SamplingMode.CONTROLS),
        ({"repetition_penalty": 1.1}, SamplingMode.CONTROLS),
        ({"logit_bias": {1: 2.0}}, SamplingMode.CONTROLS),
        ({"logprobs": 0}, SamplingMode.LOGPROBS),
    ],
)
def test_a_row_asks_for_the_least_level_that_serves_it(options, level):
    assert level_of(Request(b"x", **options)) == level


def names_of(jaxpr):
    """The primitives of a jaxpr and of what it calls."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                found |= names_of(getattr(inner, "jaxpr", inner))
    return found


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(damage, temperature):
    logits = np.array(random_logits())
    logits[1, 5 if np.isnan(damage) else slice(None)] = damage
    tokens = draw(jnp.asarray(logits), controls(ROWS, temperature), jnp.arange(ROWS)).tolist()
    assert tokens.pop(1) == NOT_FINITE and min(tokens) >= 0


def test_a_single_token_ruled_out_is_not_damage():
    tokens = draw(random_logits()[:1].at[0, 4].set(-np.inf), controls(1), jnp.arange(1))
    assert tokens[0] >= 0
