"""The gated delta rule against a float64 recurrence written from its definition."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from tests.helpers.gdn_cases import GATES, Inputs, make, make_state, oracle, relative
from tests.helpers.kernel_cases import slow

STATIC = ("scale", "output_final_state", "chunk_size", "use_qk_l2norm", "implementation")
chunk = jax.jit(gdn.chunk_gated_delta_rule, static_argnames=STATIC)
recurrent = jax.jit(
    gdn.recurrent_gated_delta_rule, static_argnames=tuple(s for s in STATIC if s != "chunk_size")
)
OPS = pytest.mark.parametrize("op", [chunk, recurrent], ids=["chunk", "recurrent"])


# --- values -------------------------------------------------------------------------------------


@pytest.mark.slow_cases(
    reason="an end in another place of a chunk; found by 63, 64 and 75 tokens of the chunked rule, "
    "and by a sequence of one token behind two chunks there, too"
)
@pytest.mark.parametrize(
    "op, length",
    [
        *((chunk, length) for length in (1, 63, 64, 75)),
        *((recurrent, length) for length in (1, 75)),
        slow(chunk, 65),
        *(slow(recurrent, length) for length in (63, 64, 65)),
    ],
    ids=lambda given: {chunk: "chunk", recurrent: "recurrent"}.get(given, str(given)),
)
def test_matches_the_recurrence_for_every_gate(op, length):
    state = make_state(2, 4, 32, 16)
    for gates in GATES:
        inputs = make(2, length, 2, 4, 32, 16, gates)
        out, final = op(*inputs, initial_state=state, output_final_state=True)
        expected, expected_final = oracle(*inputs, initial_state=state)
        assert out.dtype == final.dtype == jnp.float32
        assert relative(out, expected) < 1e-5, gates
        assert relative(final, expected_final) < 1e-5, gates


@OPS
@pytest.mark.parametrize("beta", [0, 1])
def test_beta_at_its_bounds(op, beta):
    inputs = make(2, 75, 2, 4, 32, 16, "slow", beta)
    state = make_state(2, 4, 32, 16)
    out, final = op(*inputs, initial_state=state, output_final_state=True)
    expected, expected_final = oracle(*inputs, initial_state=state)
    assert relative(out, expected) < 1e-5
    assert relative(final, expected_final) < 1e-5


@OPS
def test_equal_keys_do_not_lose_precision(op):
    # (I + A)^-1 by powers of A would pass through 1e18 here.
    inputs = make(2, 75, 2, 4, 32, 16, "none", beta=1)
    inputs = inputs._replace(k=np.broadcast_to(inputs.k[:, :1], inputs.k.shape).copy())
    state = make_state(2, 4, 32, 16)
    out, final = op(*inputs, initial_state=state, output_final_state=True)
    expected, expected_final = oracle(*inputs, initial_state=state)
    assert relative(out, expected) < 1e-5
    assert relative(final, expected_final) < 1e-5


def test_head_dim_128_with_four_value_heads_a_key_head():
    inputs = make(1, 130, 2, 8, 128)
    out, final = chunk(*inputs, output_final_state=True)
    expected, expected_final = oracle(*inputs)
    assert relative(out, expected) < 1e-5
    assert relative(final, expected_final) < 1e-5


@pytest.mark.slow_cases(reason="tokens of another chunk; found by chunks of 16, 64 and 128 too")
@pytest.mark.parametrize("chunk_size", [16, slow(32), 128])
def test_chunk_size_does_not_change_the_result(chunk_size):
    # Heads and their dimensions need not be powers of two either.
    inputs = make(1, 150, 3, 3, 60, 20, "some_cleared")
    out, final = chunk(*inputs, chunk_size=chunk_size, output_final_state=True)
    expected, expected_final = oracle(*inputs)
    assert relative(out, expected) < 1e-5
    assert relative(final, expected_final) < 1e-5


@OPS
def test_scale_and_l2norm(op):
    inputs = make(1, 70, 1, 2, 32)
    inputs = inputs._replace(k=inputs.k * 37.0)
    inputs.k[0, 3] = 0.0
    out, final = op(*inputs, scale=0.3, use_qk_l2norm=True)
    expected, _ = oracle(*inputs, scale=0.3, l2norm=True)
    assert final is None
    assert relative(out, expected) < 1e-5


@pytest.mark.sampled
@OPS
@pytest.mark.parametrize("gates", ["logsigmoid", "slow", "some_cleared"])
def test_bfloat16(op, gates):
    inputs = make(1, 200, 2, 8, 64, gates=gates)
    inputs = Inputs(*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]), *inputs[3:])
    out, final = op(*inputs, output_final_state=True)
    expected, expected_final = oracle(*inputs)
    assert out.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    assert relative(out, expected) < 5e-3
    assert relative(final, expected_final) < 5e-3


@OPS
def test_two_parts_equal_one(op):
    inputs = make(2, 75, 2, 4, 32, 16)
    state = make_state(2, 4, 32, 16)
    out, final = op(*inputs, initial_state=state, output_final_state=True)
    head, middle = op(*(x[:, :63] for x in inputs), initial_state=state, output_final_state=True)
    tail, end = op(*(x[:, 63:] for x in inputs), initial_state=middle, output_final_state=True)
    assert relative(np.concatenate([head, tail], axis=1), out) < 1e-5
    assert relative(end, final) < 1e-5


def test_tokens_of_zeros_leave_the_state_as_it_is():
    inputs = make(1, 64, 1, 2, 32, 16)
    short = Inputs(*(x[:, :50] for x in inputs))
    padded = Inputs(*(np.pad(x, ((0, 0), (0, 14)) + ((0, 0),) * (x.ndim - 2)) for x in short))
    _, expected = chunk(*short, output_final_state=True)
    _, final = chunk(*padded, output_final_state=True)
    np.testing.assert_array_equal(final, expected)


@OPS
def test_a_nan_stays_in_its_row(op):
    inputs = make(2, 75, 2, 4, 32, 16)
    state = make_state(2, 4, 32, 16)
    clean, _ = op(*inputs, initial_state=state, output_final_state=True)
    inputs.v[0, 5] = np.nan
    out, final = op(*inputs, initial_state=state, output_final_state=True)
    assert np.isnan(out[0, 5:]).all() and np.isnan(final[0]).all()
    np.testing.assert_array_equal(out[1], clean[1])


# --- packed sequences ---------------------------------------------------------------------------

PACKED = [0, 15, 15, 100, 300, 300]


def packed_inputs(length=310, real=300, gates="logsigmoid"):
    inputs = make(1, length, 1, 2, 32, 16, gates)
    for x in inputs:
        x[:, real:] = np.nan
    return inputs


@OPS
@pytest.mark.parametrize("gates", ["logsigmoid", "some_cleared"])
def test_packed_sequences(op, gates):
    inputs = packed_inputs(gates=gates)
    ends = np.array(PACKED, np.int32)
    state = make_state(5, 2, 32, 16)
    out, final = op(*inputs, initial_state=state, output_final_state=True, cu_seqlens=ends)
    expected, expected_final = oracle(*inputs, initial_state=state, cu_seqlens=ends)
    assert relative(out[:, :300], expected[:, :300]) < 1e-5
    np.testing.assert_array_equal(out[:, 300:], 0)
    assert relative(final, expected_final) < 1e-5
    np.testing.assert_array_equal(final[1].view(np.int32), state[1].view(np.int32))
    np.testing.assert_array_equal(final[4].view(np.int32), state[4].view(np.int32))


@OPS
def test_packed_boundaries_are_data_not_shapes(op):
    inputs = packed_inputs()
    state = make_state(5, 2, 32, 16)
    for ends in ([0, 64, 128, 192, 256, 300], [0, 0, 0, 0, 0, 0], [0, 0, 1, 2, 299, 299]):
        real = ends[-1]
        out, final = op(
            *inputs,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=np.array(ends, np.int32),
        )
        expected, expected_final = oracle(*inputs, initial_state=state, cu_seqlens=ends)
        assert relative(out[:, :real], expected[:, :real]) < 1e-5
        np.testing.assert_array_equal(out[:, real:], 0)
        assert relative(final, expected_final) < 1e-5


@OPS
def test_packed_without_initial_state(op):
    inputs = packed_inputs()
    out, final = op(*inputs, output_final_state=True, cu_seqlens=np.array(PACKED, np.int32))
    expected, expected_final = oracle(*inputs, cu_seqlens=PACKED)
    assert relative(out[:, :300], expected[:, :300]) < 1e-5
    assert relative(final, expected_final) < 1e-5
    np.testing.assert_array_equal(final[1], 0)


@OPS
def test_no_token_leaves_the_states_as_they_are(op):
    inputs, state = make(1, 0, 1, 2, 32, 16), make_state(2, 2, 32, 16)
    out, final = op(*inputs, initial_state=state[:1], output_final_state=True)
    assert out.shape == (1, 0, 2, 16)
    np.testing.assert_array_equal(final, state[:1])
    ends = np.zeros(3, np.int32)
    out, final = op(*inputs, initial_state=state, output_final_state=True, cu_seqlens=ends)
    assert out.shape == (1, 0, 2, 16)
    np.testing.assert_array_equal(final, state)


@OPS
def test_a_nan_stays_in_its_packed_sequence(op):
    inputs = packed_inputs()
    ends = np.array(PACKED, np.int32)
    state = make_state(5, 2, 32, 16)
    clean, clean_final = op(*inputs, initial_state=state, output_final_state=True, cu_seqlens=ends)
    inputs.k[0, 20] = np.nan
    out, final = op(*inputs, initial_state=state, output_final_state=True, cu_seqlens=ends)
    assert np.isnan(out[0, 20:100]).all() and np.isnan(final[2]).all()
    np.testing.assert_array_equal(out[0, :15], clean[0, :15])
    np.testing.assert_array_equal(out[0, 100:], clean[0, 100:])
    others = np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(final[others], clean_final[others])


# --- gradients ----------------------------------------------------------------------------------


def loss(op, cu_seqlens, l2norm, weights, inputs, state):
    out, final = op(
        *inputs,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=l2norm,
    )
    return jnp.sum(out * weights[0]) + jnp.sum(final * weights[1])


chunk_grad = jax.jit(
    jax.grad(partial(loss, gdn.chunk_gated_delta_rule), argnums=(3, 4)), static_argnums=1
)
recurrent_grad = jax.jit(
    jax.grad(partial(loss, gdn.recurrent_gated_delta_rule), argnums=(3, 4)), static_argnums=1
)


def gradient_case(batch, length, count, gates):
    inputs = make(batch, length, 1, 2, 16, 8, gates)
    state = make_state(count, 2, 16, 8)
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal(inputs.v.shape), rng.standard_normal(state.shape))
    return tuple(w.astype(np.float32) for w in weights), inputs, state


def assert_gradients_close(actual, expected, bound):
    names = [*Inputs._fields, "initial_state"]
    for name, x, y in zip(names, (*actual[0], actual[1]), (*expected[0], expected[1]), strict=True):
        assert np.isfinite(x).all(), name
        assert relative(x, y) < bound, name


@pytest.mark.sampled
@pytest.mark.parametrize("gates", ["none", "logsigmoid", "strong", "all_cleared", "some_cleared"])
def test_chunk_gradients_equal_recurrent_gradients(gates):
    weights, inputs, state = gradient_case(2, 75, 2, gates)
    actual = chunk_grad(None, True, weights, inputs, state)
    expected = recurrent_grad(None, True, weights, inputs, state)
    assert_gradients_close(actual, expected, 2e-5)


def test_gradients_of_gates_of_minus_infinity_are_finite():
    weights, inputs, state = gradient_case(2, 75, 2, "minus_infinity")
    for leaf in jax.tree.leaves(chunk_grad(None, True, weights, inputs, state)):
        assert np.isfinite(leaf).all()


def test_packed_gradients():
    weights, inputs, state = gradient_case(1, 80, 4, "logsigmoid")
    ends = np.array([0, 15, 15, 40, 70], np.int32)
    weights[0][:, 70:] = 0
    for x in inputs:
        x[:, 70:] = np.nan
    actual = chunk_grad(ends, True, weights, inputs, state)
    expected = recurrent_grad(ends, True, weights, inputs, state)
    for x in (*actual[0], *expected[0]):
        np.testing.assert_array_equal(x[:, 70:], 0)
    assert_gradients_close(actual, expected, 2e-5)


def test_gradients_equal_differences_of_the_recurrence():
    weights, inputs, state = gradient_case(1, 20, 1, "logsigmoid")
    dinputs, dstate = chunk_grad(None, False, weights, inputs, state)
    rng = np.random.default_rng(5)
    for i, name in enumerate(Inputs._fields):
        direction = rng.standard_normal(inputs[i].shape)

        def value(step, i=i, direction=direction):
            moved = list(x.astype(np.float64) for x in inputs)
            moved[i] = moved[i] + step * direction
            out, final = oracle(*moved, initial_state=state)
            return np.sum(out * weights[0]) + np.sum(final * weights[1])

        expected = (value(1e-5) - value(-1e-5)) / 2e-5
        assert np.sum(np.asarray(dinputs[i], np.float64) * direction) == pytest.approx(
            expected, rel=1e-4, abs=1e-4
        ), name
    direction = rng.standard_normal(state.shape)
    moved = [oracle(*inputs, initial_state=state + s * direction) for s in (1e-5, -1e-5)]
    sums = [np.sum(out * weights[0]) + np.sum(final * weights[1]) for out, final in moved]
    assert np.sum(np.asarray(dstate, np.float64) * direction) == pytest.approx(
        (sums[0] - sums[1]) / 2e-5, rel=1e-4
    )


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_backward_pass_keeps_no_state_a_token(dtype):
    """One a chunk: of the token recurrence, which keeps one a token, the same measure says so."""
    heads, dim = 2, 128

    def temporaries(op, length):
        shape = lambda *dims: jax.ShapeDtypeStruct((1, length, *dims), dtype)  # noqa: E731
        gate = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)
        inputs = shape(1, dim), shape(1, dim), shape(heads, dim), gate, gate
        total = lambda *x: op(*x, implementation="xla")[0].astype(jnp.float32).sum()  # noqa: E731
        step = jax.jit(jax.value_and_grad(total, argnums=range(5)))
        return step.lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    def growth(op, length):
        """Bytes a token and head, in states of float32."""
        more = temporaries(op, 2 * length) - temporaries(op, length)
        return more / (length * heads * dim * dim * 4)

    assert growth(gdn.recurrent_gated_delta_rule, 128) > 1
    # 1 / 64 is the states; the rest is arrays of T x D and T x 64, as the inputs themselves are.
    assert growth(gdn.chunk_gated_delta_rule, 2048) < 1 / 4


# --- decode on a pool ---------------------------------------------------------------------------

A_LOG = np.log(np.linspace(0.5, 8, 4)).astype(np.float32)
DT_BIAS = np.linspace(-2, 1, 4).astype(np.float32)
decode = jax.jit(
    gdn.gated_delta_rule_decode, static_argnames=("scale", "use_qk_l2norm", "implementation")
)


class DecodeInputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray
    b: np.ndarray


def decode_inputs(batch, tokens, seed=11):
    rng = np.random.default_rng(seed)
    shapes = ((2, 32), (2, 32), (4, 16), (4,), (4,))
    return DecodeInputs(
        *(rng.standard_normal((batch, tokens, *s)).astype(np.float32) for s in shapes)
    )


def gates_in_float64(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    g = -np.exp(A_LOG.astype(np.float64)) * np.log1p(np.exp(a + DT_BIAS))
    return g, 1 / (1 + np.exp(-b))


def test_gates():
    inputs = decode_inputs(3, 2)
    g, beta = gdn.gdn_gates(
        jnp.asarray(inputs.a, jnp.bfloat16), jnp.asarray(inputs.b, jnp.bfloat16), A_LOG, DT_BIAS
    )
    assert g.dtype == beta.dtype == jnp.float32
    g, beta = gdn.gdn_gates(inputs.a, inputs.b, A_LOG, DT_BIAS)
    expected_g, expected_beta = gates_in_float64(inputs.a, inputs.b)
    assert relative(g, expected_g) < 1e-6
    assert relative(beta, expected_beta) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("layer", [None, 1, "traced"])
def test_decode_on_a_pool_with_padding_rows(tokens, layer):
    slots = np.array([5, -1, 0, 3, -1], np.int32)
    inputs = decode_inputs(5, tokens)
    for x in inputs:
        x[slots < 0] = np.nan
    pool = make_state(6, 4, 32, 16)
    stack = pool if layer is None else np.stack([make_state(6, 4, 32, 16, 8), pool])
    stack[..., 1, :, :, :] = np.nan
    if layer == "traced":
        out, new = decode(
            *inputs,
            stack,
            slots,
            A_log=A_LOG,
            dt_bias=DT_BIAS,
            layer=jnp.int32(1),
            implementation="xla",
        )
    else:
        out, new = gdn.gated_delta_rule_decode(
            *inputs, stack, slots, A_log=A_LOG, dt_bias=DT_BIAS, layer=layer, implementation="xla"
        )
    used = slots >= 0
    g, beta = gates_in_float64(inputs.a, inputs.b)
    expected, expected_state = oracle(
        *(x[used] for x in (*inputs[:3], g, beta)), initial_state=pool[slots[used]], l2norm=True
    )
    assert out.dtype == inputs.v.dtype
    assert relative(out[used], expected) < 1e-5
    np.testing.assert_array_equal(out[~used], 0)
    want = stack.copy()
    changed = (slice(None) if layer is None else 1, slots[used]) if layer else (slots[used],)
    assert relative(new[changed], expected_state) < 1e-5
    want[changed] = new[changed]
    np.testing.assert_array_equal(np.asarray(new).view(np.int32), want.view(np.int32))


def test_decode_rows_do_not_depend_on_padding_beside_them():
    pool = make_state(6, 4, 32, 16)
    inputs = decode_inputs(3, 1)
    kwargs = dict(A_log=A_LOG, dt_bias=DT_BIAS, implementation="xla")
    out, new = decode(*inputs, pool, np.array([4, 2, 0], np.int32), **kwargs)
    padded = DecodeInputs(*(np.concatenate([x, np.full_like(x[:2], np.nan)]) for x in inputs))
    slots = np.array([4, 2, 0, -1, -1], np.int32)
    padded_out, padded_new = decode(*padded, pool, slots, **kwargs)
    np.testing.assert_array_equal(padded_out[:3], out)
    np.testing.assert_array_equal(padded_new, new)


def test_a_batch_of_padding_changes_nothing():
    pool = make_state(6, 4, 32, 16)
    slots = np.full(5, -1, np.int32)
    kwargs = dict(A_log=A_LOG, dt_bias=DT_BIAS, implementation="xla")
    out, new = decode(*decode_inputs(5, 1), pool, slots, **kwargs)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(new, pool)


def test_decode_updates_a_donated_stack_in_place():
    pool = jax.ShapeDtypeStruct((8, 64, 4, 16, 32), jnp.float32)
    slots = jax.ShapeDtypeStruct((2,), jnp.int32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)

    def step(pool, inputs, slots, layer):
        return gdn.gated_delta_rule_decode(
            *inputs, pool, slots, A_log=A_LOG, dt_bias=DT_BIAS, layer=layer, implementation="xla"
        )

    compiled = jax.jit(step, donate_argnums=0).lower(pool, decode_inputs(2, 1), slots, layer)
    memory = compiled.compile().memory_analysis()
    layer_bytes = 64 * 4 * 16 * 32 * 4
    assert memory.alias_size_in_bytes == 8 * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes / 4


def test_decode_into_an_arena():
    from jaxattn.arena import Arena

    spec = gdn.scratch(batch=2, q_len=1, num_v_heads=4, head_v_dim=16, dtype=jnp.float32)
    assert {name: region.shape for name, region in spec.regions} == {"out": (2, 1, 4, 16)}
    assert spec.sizes == {"float32": 1024} and spec.nbytes == 4096  # 128 numbers, rounded up
    inputs, slots = decode_inputs(2, 1), np.array([1, 0], np.int32)
    pool = make_state(2, 4, 32, 16)
    kwargs = dict(A_log=A_LOG, dt_bias=DT_BIAS, implementation="xla")
    out, new = decode(*inputs, pool, slots, **kwargs)
    arena_out, arena_new, arena = decode(*inputs, pool, slots, arena=Arena.allocate(spec), **kwargs)
    np.testing.assert_array_equal(arena_out, out)
    np.testing.assert_array_equal(arena_new, new)
    np.testing.assert_array_equal(arena.read(spec, "out"), out)


# --- state pools --------------------------------------------------------------------------------


def test_state_read_and_write_never_wrap():
    pool = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    slots = np.array([-1, 3, -1, 0], np.int32)
    rows = gdn.state_read(pool := jnp.asarray(pool), slots, layer=1)
    np.testing.assert_array_equal(rows, [[0, 0, 0], pool[1, 3], [0, 0, 0], pool[1, 0]])
    new = gdn.state_write(pool, -jnp.ones((4, 3)), slots, layer=1)
    np.testing.assert_array_equal(new, pool.at[1, jnp.array([0, 3])].set(-1))


# --- errors -------------------------------------------------------------------------------------


def refused(op, message, error=ValueError, **changes):
    arguments = dict(zip(Inputs._fields, make(2, 4, 2, 4, 16, 8), strict=True)) | changes
    with pytest.raises(error, match=message):
        op(**arguments)


@pytest.mark.parametrize("op", [gdn.chunk_gated_delta_rule, gdn.recurrent_gated_delta_rule])
def test_errors_name_the_argument_and_the_shape(op):
    zeros = partial(np.zeros, dtype=np.float32)
    one = dict(zip(Inputs._fields, make(1, 4, 2, 4, 16, 8), strict=True))
    refused(op, r"q must be \[B, T, Hk, Dk\].*\(4, 2, 16\)", q=zeros((4, 2, 16)))
    refused(op, r"q and k .*\(2, 4, 1, 16\)", q=zeros((2, 4, 1, 16)))
    refused(op, r"\[B, T\].*\(2, 5, 4, 8\)", v=zeros((2, 5, 4, 8)))
    refused(op, r"Hv=3 .* multiple of the Hk=2", v=zeros((2, 4, 3, 8)))
    refused(op, r"g must be .*\[2, 4, 4\], got \[2, 4, 2\]", g=zeros((2, 4, 2)))
    refused(op, "g must be float32, got bf", TypeError, g=jnp.zeros((2, 4, 4), jnp.bfloat16))
    refused(op, r"beta must be", beta=zeros((2, 4)))
    values = jnp.zeros((2, 4, 4, 8), jnp.bfloat16)
    refused(op, r"q, k and v must have the same dtype, .* bfloat16", TypeError, v=values)
    state = zeros((2, 4, 16, 8))
    refused(op, r"initial_state .*\[2, 4, 8, 16\].*\[2, 4, 16, 8\]", initial_state=state)
    halves = state.astype(np.float16)
    refused(op, "initial_state must be float32, got float16", TypeError, initial_state=halves)
    ends = np.array([0, 4])
    refused(op, r"cu_seqlens needs batch 1.*got 2", cu_seqlens=ends)
    refused(op, r"cu_seqlens .*\[0, 5\]", **one, cu_seqlens=np.array([0, 5]))
    refused(op, r"cu_seqlens .*\[0, 3, 2\]", **one, cu_seqlens=np.array([0, 3, 2]))
    refused(op, r"cu_seqlens .*\[1, 3\]", **one, cu_seqlens=np.array([1, 3]))
    floats = np.array([0.0, 3.0])
    refused(op, r"cu_seqlens must be integers", TypeError, **one, cu_seqlens=floats)


def test_chunk_size_is_checked():
    refused(gdn.chunk_gated_delta_rule, "chunk_size .* got 48", chunk_size=48)
    with pytest.raises(TypeError, match="chunk_size must be an integer, got None"):
        gdn.chunk_gated_delta_rule(*make(1, 8, 1, 1, 8, 8), chunk_size=None)


def test_decode_errors_name_the_argument_and_the_shape():
    inputs, pool = decode_inputs(2, 1), make_state(3, 4, 32, 16)
    slots = np.array([0, 2], np.int32)

    def refused(message, error=ValueError, pool=pool, slots=slots, a_log=A_LOG, **kwargs):
        with pytest.raises(error, match=message):
            gdn.gated_delta_rule_decode(
                *inputs, pool, slots, A_log=a_log, dt_bias=DT_BIAS, **kwargs
            )

    refused(r"state must be .*4, 16, 32.*got \(3, 4, 32, 16\)", pool=pool.swapaxes(-1, -2))
    halves = pool.astype(np.float16)
    refused(r"state must be float32 or bfloat16, got float16", TypeError, pool=halves)
    refused(r"layer .*\(1, 3, 4, 16, 32\)", pool=pool[None])
    refused(r"layer .*\(3, 4, 16, 32\)", layer=0)
    refused(r"layer=1 .*\(1, 3, 4, 16, 32\)", pool=pool[None], layer=1)
    refused(r"state_indices .*\[2\].*\[3\]", slots=np.array([0, 1, 2]))
    refused(r"state_indices .* \[2\] more than once", slots=np.array([2, 2]))
    refused(r"state_indices .*\[-1, 3\).*\[0, 3\]", slots=np.array([0, 3]))
    refused(r"A_log must be \[4\], got \[3\]", a_log=A_LOG[:3])
    refused(r"implementation", implementation="cuda")
