"""Kimi's delta rule against a float64 recurrence written from its definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn, kda
from tests.helpers.at_once import at_once
from tests.helpers.gdn_cases import GATES, Inputs, make_state, oracle, relative
from tests.helpers.gdn_cases import make as make_inputs

STATIC = ("scale", "output_final_state", "chunk_size", "use_qk_l2norm")
chunk = jax.jit(kda.chunk_kda, static_argnames=STATIC)
recurrent = jax.jit(kda.recurrent_kda, static_argnames=tuple(s for s in STATIC if "size" not in s))
OPS = pytest.mark.parametrize("op", [chunk, recurrent], ids=["chunk", "recurrent"])
make = partial(make_inputs, channels=True)
PACKED = np.array([0, 15, 15, 100, 230, 230], np.int32)


def assert_matches(found, expected, bound=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) < bound


@pytest.mark.sampled
@OPS
@pytest.mark.parametrize("length", [1, 63, 75])
def test_every_gate_gives_the_recurrence(op, length):
    state = make_state(2, 4, 32, 16)
    for gates in GATES:
        inputs = make(2, length, 2, 4, 32, 16, gates)
        found = op(*inputs, initial_state=state, output_final_state=True)
        assert found[0].dtype == found[1].dtype == jnp.float32
        assert_matches(found, oracle(*inputs, initial_state=state))


@pytest.mark.sampled
@pytest.mark.parametrize("chunk_size", [16, 32, 128])
def test_chunk_size_does_not_change_the_result(chunk_size):
    inputs = make(1, 150, 3, 3, 60, 20, "some_cleared")
    found = chunk(*inputs, chunk_size=chunk_size, output_final_state=True)
    assert_matches(found, oracle(*inputs))


def test_a_small_decay_behind_a_large_one_keeps_its_digits():
    """A difference of running sums would make exp(-0.25) of -1000.25 + 1000 in float32."""
    inputs = make(1, 64, 1, 1, 32, gates="slow")
    inputs.g[0, 5], inputs.g[0, 40, 0, :16] = -2e6, -1e30
    assert_matches(chunk(*inputs, output_final_state=True), oracle(*inputs))


@OPS
def test_decays_of_exactly_one_are_the_delta_rule_without_a_gate(op):
    inputs = make(1, 75, 2, 4, 32, 16, "none", beta=1)
    inputs = inputs._replace(k=np.broadcast_to(inputs.k[:, :1], inputs.k.shape).copy())
    found = op(*inputs, output_final_state=True)
    assert_matches(found, oracle(*inputs))
    shared = inputs._replace(g=inputs.g[..., 0])
    of_heads = at_once(gdn.chunk_gated_delta_rule, *shared, output_final_state=True)
    assert_matches(found, of_heads)


@OPS
def test_a_cleared_channel_forgets_and_its_neighbors_do_not(op):
    """A write into cleared channels: exactly what they held before is lost, to the bit."""
    inputs = make(1, 20, 1, 1, 32, 16, "none")
    inputs.g[0, 10, 0, ::2] = -1000.0
    inputs.beta[:, 10:] = 0.0
    _, final = op(*inputs, output_final_state=True)
    _, before = op(*(x[:, :10] for x in inputs), output_final_state=True)
    np.testing.assert_array_equal(final[..., ::2], 0)
    assert relative(final[..., 1::2], before[..., 1::2]) < 1e-6


@OPS
def test_scale_and_l2norm(op):
    inputs = make(1, 70, 1, 2, 32)
    inputs = inputs._replace(k=inputs.k * 37.0)
    inputs.k[0, 3] = 0.0
    out, final = op(*inputs, scale=0.3, use_qk_l2norm=True)
    assert final is None
    assert relative(out, oracle(*inputs, scale=0.3, l2norm=True)[0]) < 1e-5


@pytest.mark.sampled
@OPS
@pytest.mark.parametrize("gates", GATES)
def test_bfloat16(op, gates):
    inputs = make(1, 200, 4, 4, 128, gates=gates)
    inputs = Inputs(*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]), *inputs[3:])
    found = op(*inputs, output_final_state=True)
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    assert_matches(found, oracle(*inputs), 5e-3)


@OPS
def test_packed_sequences_with_poison_behind_them(op):
    inputs = make(1, 240, 1, 2, 32, 16, "some_cleared")
    clean = Inputs(*(x.copy() for x in inputs))
    for x in inputs:
        x[:, 230:] = np.nan
    state = make_state(5, 2, 32, 16)
    out, final = op(*inputs, initial_state=state, output_final_state=True, cu_seqlens=PACKED)
    real = (x[:, :230] for x in clean)
    expected, finals = oracle(*real, initial_state=state, cu_seqlens=PACKED)
    assert relative(out[:, :230], expected) < 1e-5 and relative(final, finals) < 1e-5
    np.testing.assert_array_equal(out[:, 230:], 0)
    np.testing.assert_array_equal(final[1], state[1])


@pytest.mark.sampled
@OPS
@pytest.mark.parametrize("gates", ["none", "some_cleared", "minus_infinity", "strong"])
def test_gradients_are_those_of_the_recurrence_and_finite(op, gates):
    inputs = make(1, 40, 1, 2, 16, 8, gates)
    state = make_state(3, 2, 16, 8)
    offsets = np.array([0, 7, 7, 33], np.int32)
    for x in inputs:
        x[:, 33:] = np.nan

    def loss(function, inputs, state):
        out, final = function(
            *inputs, initial_state=state, output_final_state=True, cu_seqlens=offsets
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

    ours, theirs = (
        jax.jit(jax.grad(partial(loss, each), argnums=(0, 1)))(inputs, state)
        for each in (op, recurrent)
    )
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.isfinite(found).all()
        assert relative(found, expected) < 1e-4


# --- gates --------------------------------------------------------------------------------------


def test_gates_are_those_of_kimi_and_of_ling():
    rng = np.random.default_rng(0)
    f, b = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 3, 4))
    A_log, dt_bias = rng.normal(size=4), rng.normal(size=(4, 8))
    rate = np.exp(A_log)[:, None]
    kimi, beta = at_once(kda.kda_gates, f, b, A_log, dt_bias)
    np.testing.assert_allclose(kimi, -rate * np.log1p(np.exp(f + dt_bias)), rtol=1e-5)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b)), rtol=1e-6)
    ling, _ = at_once(kda.kda_gates, f, b, A_log, dt_bias, lower_bound=-5.0)
    np.testing.assert_allclose(ling, -5 / (1 + np.exp(-rate * (f + dt_bias))), rtol=1e-5)
    extreme, _ = at_once(kda.kda_gates, f * 1e6, b, A_log, dt_bias, lower_bound=-5.0)
    assert extreme.min() >= -5 and extreme.max() <= 0 and np.isfinite(extreme).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"f": np.zeros((2, 8))}, r"b must be \[2\], got \[4\]"),
        ({"A_log": np.zeros(3)}, r"A_log must be \[4\], got \[3\]"),
        ({"dt_bias": np.zeros(4)}, r"dt_bias must be \[4, 8\], got \[4\]"),
        ({"lower_bound": 5.0}, "lower_bound must be below 0, got 5.0"),
    ],
)
def test_gates_that_do_not_fit_are_refused_by_name(change, message):
    given = dict(f=np.zeros((4, 8)), b=np.zeros(4), A_log=np.zeros(4), dt_bias=np.zeros((4, 8)))
    with pytest.raises(ValueError, match=message):
        kda.kda_gates(**given | change)


# --- decode and prefill on a pool ----------------------------------------------------------------


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decode_on_a_pool_gives_the_recurrence_and_leaves_other_slots(lower_bound):
    q, k, v, f, b = make(3, 4, 2, 2, 32, 16)
    rng = np.random.default_rng(1)
    A_log, dt_bias = rng.normal(size=2), rng.normal(size=(2, 32))
    pool = np.full((2, 6, 2, 16, 32), np.nan, np.float32)
    slots = np.array([4, -1, 0], np.int32)
    pool[1, [4, 0]] = state = make_state(2, 2, 32, 16)
    writes = np.array([[1, -1, 3, 4], [-1] * 4, [-1, -1, -1, 0]], np.int32)
    o, new = at_once(
        kda.kda_decode, q, k, v, f, b, pool, slots, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, write_indices=writes, layer=1, use_qk_l2norm=True,
    )  # fmt: skip
    o, new = np.asarray(o), np.asarray(new)
    g, beta = kda.kda_gates(f, b, A_log, dt_bias, lower_bound=lower_bound)
    rows = [0, 2]
    own = [np.asarray(x)[rows] for x in (q, k, v, g, beta)]
    expected, final = oracle(*own, initial_state=state, l2norm=True)
    assert relative(o[np.array(rows)], expected) < 1e-5
    np.testing.assert_array_equal(o[1], 0)
    assert relative(new[1, [4, 0]], final) < 1e-5
    _, first = oracle(*(x[:1, :1] for x in own), initial_state=state[:1], l2norm=True)
    assert relative(new[1, 1], first[0]) < 1e-5
    assert np.isnan(new[0]).all() and np.isnan(new[1, [2, 5]]).all()


def test_prefill_on_a_pool_keeps_checkpoints_and_norms_with_a_sigmoid():
    inputs = make(1, 240, 2, 2, 32, 16)
    rng = np.random.default_rng(2)
    gate, weight = rng.normal(size=(1, 240, 2 * 16)), rng.normal(size=16)
    pool = np.full((8, 2, 16, 32), np.nan, np.float32)
    state = make_state(3, 2, 32, 16)
    offsets = np.array([0, 15, 100, 230], np.int32)
    pool[:3] = state
    o, new = at_once(
        kda.kda_prefill, *inputs, pool, np.array([0, 1, -1], np.int32), cu_seqlens=offsets,
        chunk_size=32, has_initial_state=np.array([True, False, True]), use_qk_l2norm=True,
        checkpoints=kda.Checkpoints(slots=np.array([[-1], [5], [6]], np.int32), tokens=64),
        output_norm=kda.OutputNorm(gate=gate, weight=weight, eps=1e-5),
    )  # fmt: skip
    o, new = np.asarray(o), np.asarray(new)
    state[1] = 0
    expected, finals = oracle(
        *(x[:, :100] for x in inputs), initial_state=state[:2], cu_seqlens=offsets[:3], l2norm=True
    )
    rms = np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5)
    factor = weight / (1 + np.exp(-gate[:, :100].reshape(1, 100, 2, 16)))
    assert relative(o[:, :100], expected / rms * factor) < 1e-5
    np.testing.assert_array_equal(o[:, 100:], 0)
    assert relative(new[:2], finals) < 1e-5
    _, at_64 = oracle(*(x[:, 15:79] for x in inputs), l2norm=True)
    assert relative(new[5], at_64[0]) < 1e-5
    np.testing.assert_array_equal(new[2], state[2])
    assert np.isnan(new[np.array([3, 4, 6, 7])]).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda i: kda.chunk_kda(*i._replace(g=i.g[..., 0])), r"g must be \[B, T, Hv, Dk\]"),
        (lambda i: kda.chunk_kda(*i, chunk_size=48), "chunk_size must be 16, 32, 64 or 128"),
        (lambda i: kda.recurrent_kda(*i._replace(beta=i.beta[0])), r"beta must be \[B, T, Hv\]"),
    ],
)
def test_sequences_that_do_not_fit_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(make(1, 5, 2, 2, 16))


def test_log_decays_in_another_dtype_are_refused():
    inputs = make(1, 5, 2, 2, 16)
    with pytest.raises(TypeError, match="kda_gates returns float32"):
        kda.chunk_kda(*inputs._replace(g=inputs.g.astype(jnp.bfloat16)))
