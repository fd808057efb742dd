"""The benchmark of decode over TurboQuant caches: what it checks, and what it says of the bytes."""

import jax.numpy as jnp
import pytest

from jaxattn import gqa
from jaxattn.bench.attention import turboquant, turboquant_prefill
from jaxattn.bench.harness import timing

pytestmark = pytest.mark.filterwarnings("ignore:the cache format:UserWarning")


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    return lambda shape: turboquant.decode(shape, turboquant.inputs(shape), None, "xla")


@pytest.mark.sampled
@pytest.mark.parametrize("shape", turboquant.SMALL_SHAPES)
def test_results_are_checked_against_attention_over_the_dequantized_cache(shape, op):
    assert 1e-4 < turboquant.check(op(shape), shape) < 4e-3  # bfloat16 outputs


@pytest.mark.parametrize(
    "off, words",
    [
        (lambda out, lse: (1.02 * out, lse), "relative error 0.0"),
        (lambda out, lse: (out, lse + 0.04), "LSE 0.0"),
        (lambda out, lse: (out.at[-1].set(jnp.nan), lse), "relative error nan"),
    ],
)
def test_a_wrong_result_is_refused(off, words, op, monkeypatch):
    right = gqa.turbo_attention
    monkeypatch.setattr(gqa, "turbo_attention", lambda *a, **k: off(*right(*a, **k)))
    shape = turboquant.SMALL_SHAPES[1]
    with pytest.raises(AssertionError, match=words):
        turboquant.check(op(shape), shape)


def test_a_note_has_the_time_of_the_bytes_and_what_is_wanted():
    first = turboquant.label(turboquant.SHAPES[0])
    (note,) = turboquant.notes([{**first, "us": 300.0, "of copy": 0.7}])
    assert note == "64,32/8,128,8192 k8v4: 300 us (wanted: 245); 210 us at the copy's rate"


def test_shapes_count_the_bytes_of_their_format():
    assert turboquant.SHAPES[1].read == 64 * 8192 * 8 * 134


@pytest.mark.slow(
    reason="a chunk that is checked against another mask; found by results of single tokens "
    "there and by ops/turboquant/test_attention's chunk too"
)
def test_a_chunk_is_checked_against_attention_over_the_dequantized_cache(monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_BYTES", 1)
    (shape,) = turboquant_prefill.SMALL_SHAPES
    op = turboquant_prefill.prefill(shape, "xla")
    assert 1e-4 < turboquant_prefill.check(op, shape) < 4e-3
    right = gqa.turbo_attention
    monkeypatch.setattr(gqa, "turbo_attention", lambda *a, **k: [1.01 * x for x in right(*a, **k)])
    with pytest.raises(AssertionError, match="relative error 0.0"):
        turboquant_prefill.check(turboquant_prefill.prefill(shape, "xla"), shape)
