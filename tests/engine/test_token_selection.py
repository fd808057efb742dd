"""The step between two forward passes, of more rows than are chosen for at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.requests.request import MOST_BIASES
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps import device_batch, token_selection

BATCH, VOCAB, LONGEST = 11, 40, 12


def random_rows(rng):
    """Rows that sample with every control, with tokens behind and before their prompts."""

    def bits(low, high):
        return rng.uniform(low, high, BATCH).astype(np.float32).view(np.int32)

    integers = np.tile(np.array([[0, LONGEST - 1, 3, 0, 5, 0]], np.int32), (BATCH, 1))
    integers[:, -1] = rng.integers(0, 1000, BATCH)
    numbers = [bits(*of) for of in ((0, 2), (0.3, 1), (0, 0.1), (1, 2), (0, 1), (0, 1))]
    stops = np.full((BATCH, device_batch.STOPS), -1, np.int32)
    cursor = np.ones((BATCH, 3), np.int32)
    cursor[:, 1] = rng.integers(4, 8, BATCH)
    biases = np.full((BATCH, 2, MOST_BIASES), 2**31 - 1, np.int32)
    biases[:, 0, 0], biases[:, 1, 0] = 7, bits(-1, 1)
    history = rng.integers(0, VOCAB, (BATCH, LONGEST)).astype(np.int32)
    controls = np.concatenate([integers, np.stack(numbers, axis=1), stops], axis=1)
    tables = np.zeros((BATCH, 1), np.int32)
    return device_batch.DeviceBatch(*map(jnp.asarray, (cursor, controls, biases, tables, history)))


CONTROLS = pytest.param(
    SamplingMode.CONTROLS,
    marks=pytest.mark.slow(
        reason="a control of another row's block; found by engine/test_token_selection.py with "
        "logprobs, which come with every control, too"
    ),
)


@pytest.mark.parametrize(
    "level", [CONTROLS if each is SamplingMode.CONTROLS else each for each in SamplingMode]
)
def test_blocks_of_rows_change_no_bit(level, monkeypatch):
    """Blocks of four: the last one overlaps the one before it; one place is padding."""
    rng = np.random.default_rng(0)
    held = random_rows(rng)
    logits = jnp.asarray(rng.normal(size=(BATCH, VOCAB)), jnp.float32).at[3].set(jnp.nan)
    places = jnp.asarray(rng.permutation(BATCH), jnp.int32).at[5].set(-1)
    found = []
    for block in (256, 4):
        monkeypatch.setattr(token_selection, "BLOCK", block)
        found.append(
            jax.jit(lambda *of: token_selection.advance(*of, level=level))(held, logits, places)
        )
    (whole, told), (blocks, same) = found
    for field in dataclasses.fields(device_batch.DeviceBatch):
        np.testing.assert_array_equal(getattr(whole, field.name), getattr(blocks, field.name))
    np.testing.assert_array_equal(told, same)
    assert len(set(np.asarray(told[:, 0]).tolist())) > 3  # tokens differ from row to row
