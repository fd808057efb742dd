"""Float16 operands of the chunked delta rules, and states that float16 has no room for."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.numerics.matmul import STATE_TO, float16_scale
from tests.helpers.gdn_prefill_cases import assert_matches, make_case, oracle, run
from tests.helpers.kernel_cases import relative

everywhere = pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param(
            "mosaic_gpu_interpret",
            marks=pytest.mark.slow(
                reason="a NaN of a float16 state in the kernels; found by a GPU, and by XLA's cases"
            ),
        ),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
rules = pytest.mark.parametrize("channels", [False, True])


def large_case(channels: bool, *, log_decay: float, at: int, lens=(70,), large=3e5):
    """States of 1e5 and more in each third channel of the values, and a decay at a token; the
    others decay by a hundredth."""
    case = make_case(
        list(lens), dtype=jnp.float16, gates=0.01, padding=0, channels=channels, seed=3
    )
    gate = case.g.at[:, at].set(log_decay)
    state = case.initial_state.at[:, :, ::3].multiply(large)
    return dataclasses.replace(case, g=gate, initial_state=state)


@pytest.mark.sampled
@everywhere
@rules
@pytest.mark.parametrize("at", [0, 5, 66])
def test_a_decay_clears_a_state_above_float16(at, channels, implementation):
    """The state is infinite in float16, and 0 times it was NaN. Channels are compared one by one:
    the large ones are read by the tokens before the decay, whose outputs float16 may not hold."""
    case = large_case(channels, log_decay=-200.0, at=at)
    out, states = (np.asarray(x, np.float64) for x in run(case, implementation))
    expected, finals = oracle(case)
    assert not np.isnan(out).any() and np.isfinite(states).all()
    assert relative(states, finals) < 5e-3
    assert relative(out[:, at:], expected[:, at:]) < 5e-3
    small = np.arange(128) % 3 > 0
    assert relative(out[..., small], expected[..., small]) < 5e-3


@everywhere
@rules
def test_a_state_above_float16_is_read_as_it_is(channels, implementation):
    """Where float16 holds the outputs, over two sequences and several chunks."""
    case = large_case(channels, log_decay=-1.0, at=9, lens=(70, 130), large=2.0**17)
    out, states = run(case, implementation, split_tokens=64)
    assert_matches(case, out, states)


def test_no_power_of_two_is_taken_off_below_float16s_largest():
    """Results of usual sizes keep their bits; what is larger comes below 2**15 by its exponent."""
    largest = jnp.asarray([0.0, 1e-30, 1.0, 32767.9, 32768.0, 65520.0, 3e38, jnp.inf, jnp.nan])
    by, back = (np.asarray(x) for x in float16_scale(largest, STATE_TO))
    assert (by[:4] == 1).all() and (back[:4] == 1).all()
    assert ((largest * by)[4:7] >= 2.0**14).all() and ((largest * by)[4:7] < 2.0**15).all()
    np.testing.assert_array_equal(by * back, 1)
    assert not np.isfinite(np.asarray(largest * by)[7:]).any()


@rules
def test_an_infinite_state_is_not_hidden(channels):
    case = large_case(channels, log_decay=-0.5, at=3, large=1.0)
    case.initial_state = case.initial_state.at[0, 0, 7, 5].set(jnp.inf)
    out, states = run(case, "xla")
    assert not np.isfinite(np.asarray(states)[0, 0, 7]).any()
    others = np.arange(128) != 7
    assert np.isfinite(np.asarray(out, np.float64)[:, :, 0, others]).all()
