"""New weights in a running engine: whose buffers they take, and which tokens they give."""

import dataclasses
import gc
import threading
import tracemalloc

import jax
import numpy as np
import pytest
from flax import nnx

from jaxattn import Engine, Limits, Request
from jaxattn.engine.engine import EngineBusyError
from jaxattn.engine.requests.outputs import FinishEvent, FinishReason, TokenEvent
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import EXACT, SMALLEST, params_of

LIMITS = Limits(
    batch=3, max_model_len=192, num_pages=7, prefill_chunk=64, prefill_rows=2, checkpoints=2
)
PROMPT = bytes((7 * j + j * j) % 256 for j in range(70))


def copied(tree):
    return jax.tree.map(lambda x: x.copy(), tree)


@pytest.fixture(scope="module")
def params():
    return [params_of(EXACT, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(params):
    with Engine(Hybrid(EXACT), copied(params[0]), LIMITS, strict=True) as engine:
        engine.start()
        engine.update(params[0])
        yield engine


@pytest.fixture(scope="module")
def expected(engine, params):
    """What each of the weights says, of rows that are served alone."""
    found = []
    for own in params:
        engine.update(own)
        found.append([each.tokens for each in engine.generate(requests())])
    assert found[0] != found[1]
    return found


def requests(count=3, **more):
    return [Request(PROMPT[i:], max_tokens=30 + i, id=i, **more) for i in range(count)]


def pointers(engine):
    return [x.unsafe_buffer_pointer() for x in engine._runner.weights if x.size]


def events_of(engine):
    found = []
    while engine.busy:
        found += engine.step()
    return found


def test_new_weights_answer_as_an_engine_that_was_made_with_them(engine, params, expected):
    for own, answers in zip(params, expected, strict=True):
        with Engine(Hybrid(EXACT), own, LIMITS) as other:
            assert [each.tokens for each in other.generate(requests())] == answers
        packed = jax.tree.leaves(engine.model.pack(own))
        engine.update(own)
        for new, wanted in zip(engine._runner.weights, packed, strict=True):
            np.testing.assert_array_equal(new, wanted)


def test_a_thousand_updates_take_no_byte_and_compile_nothing(engine, params, caplog):
    engine.update(params[0])
    before = pointers(engine)

    def sizes():
        gc.collect()
        return len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())

    with jax.log_compiles(), caplog.at_level("WARNING"):
        for n in range(20):
            engine.update(params[n % 2])
        arrays = sizes()
        tracemalloc.start()
        for n in range(1000):
            version = engine.update(params[n % 2])
        assert version == engine.weights_version
        assert sizes() == arrays
        assert tracemalloc.get_traced_memory()[0] < 40_000  # a few bytes of each update remain
        tracemalloc.stop()
    assert "ompil" not in caplog.text and not engine.seal.what
    assert pointers(engine) == before
