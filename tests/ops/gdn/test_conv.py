"""The causal convolution against loops over tokens and taps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn

STATIC = ("activation", "output_final_state")
conv = jax.jit(gdn.causal_conv1d, static_argnames=STATIC)
update = jax.jit(gdn.causal_conv1d_update, static_argnames="activation")

CHANNELS = 6


def make(batch, length, width=4, seed=0):
    rng = np.random.default_rng([batch, length, width, seed])
    shapes = ((batch, length, CHANNELS), (CHANNELS, width), (CHANNELS,))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def make_state(count, width=4, seed=1):
    shape = (count, width - 1, CHANNELS)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def oracle(tokens, weight, state=None, bias=None, activation="silu"):
    """One sequence `[T, Dc]`: output and the last W - 1 inputs, in float64."""
    width = weight.shape[1]
    tokens, weight = np.asarray(tokens, np.float64), np.asarray(weight, np.float64)
    before = np.zeros((width - 1, tokens.shape[1])) if state is None else state.astype(np.float64)
    inputs = [*before, *tokens]
    out = np.zeros_like(tokens)
    for t in range(len(tokens)):
        for j in range(width):
            out[t] += weight[:, j] * inputs[t + j]
    if bias is not None:
        out = out + bias
    if activation == "silu":
        out = out / (1 + np.exp(-out))
    return out, np.stack(inputs[len(tokens) :])


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 17])
@pytest.mark.parametrize("width", [2, 4])
def test_rows_of_every_length(length, width):
    x, weight, bias = make(2, length, width)
    state = make_state(2, width)
    y, final = conv(x, weight, bias=bias, initial_state=state, output_final_state=True)
    for row in range(2):
        expected, expected_final = oracle(x[row], weight, state[row], bias)
        assert_close(y[row], expected)
        np.testing.assert_array_equal(final[row], expected_final)


def test_without_state_bias_or_activation():
    x, weight, _ = make(2, 9)
    y, final = conv(x, weight, activation=None)
    assert final is None
    for row in range(2):
        assert_close(y[row], oracle(x[row], weight, activation=None)[0])


def test_bfloat16_is_summed_and_activated_in_float32():
    x, weight, _ = make(1, 17)
    x = jnp.asarray(x, jnp.bfloat16)
    y, final = conv(x, weight, output_final_state=True)
    assert y.dtype == final.dtype == jnp.bfloat16
    expected = oracle(x[0], weight)[0]
    np.testing.assert_array_equal(y[0], conv(x.astype(jnp.float32), weight)[0][0].astype(y.dtype))
    np.testing.assert_allclose(np.asarray(y[0]).astype(np.float64), expected, rtol=2**-8, atol=1e-5)


def test_two_parts_equal_one():
    x, weight, bias = make(2, 12)
    whole, end = conv(x, weight, bias=bias, output_final_state=True)
    head, state = conv(x[:, :2], weight, bias=bias, output_final_state=True)
    tail, final = conv(x[:, 2:], weight, bias=bias, initial_state=state, output_final_state=True)
    np.testing.assert_array_equal(np.concatenate([head, tail], axis=1), whole)
    np.testing.assert_array_equal(final, end)


@pytest.mark.parametrize(
    "ends", [[0, 1, 1, 3, 6, 15, 15], [0, 0, 0, 0, 0, 0, 0], [0, 2, 4, 6, 8, 10, 18]]
)
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_sequences(ends, with_state):
    x, weight, bias = make(1, 18)
    x[:, ends[-1] :] = np.nan
    state = make_state(6) if with_state else None
    y, final = conv(
        x,
        weight,
        bias=bias,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=np.array(ends, np.int32),
    )
    for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        before = state[i] if with_state else None
        expected, expected_final = oracle(x[0, start:end], weight, before, bias)
        assert_close(y[0, start:end], expected)
        np.testing.assert_array_equal(final[i], expected_final)
    np.testing.assert_array_equal(y[:, ends[-1] :], 0)


def test_packed_sequences_without_a_token():
    x, weight, _ = make(1, 0)
    state = make_state(2)
    ends = np.zeros(3, np.int32)
    y, final = conv(x, weight, initial_state=state, output_final_state=True, cu_seqlens=ends)
    assert y.shape == x.shape
    np.testing.assert_array_equal(final, state)


def test_packed_gradients_equal_those_of_separate_rows():
    x, weight, bias = make(1, 12)
    x[:, 10:] = np.nan
    ends, state = np.array([0, 2, 2, 10], np.int32), make_state(3)
    target, target_state = make(1, 12, seed=5)[0], make_state(3, seed=6)

    def packed(x, weight, bias, state):
        y, final = gdn.causal_conv1d(
            x, weight, bias=bias, initial_state=state, output_final_state=True, cu_seqlens=ends
        )
        return jnp.sum(y * target) + jnp.sum(final * target_state)

    def separate(x, weight, bias, state):
        total = 0.0
        for i, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            y, final = gdn.causal_conv1d(
                x[:, start:end],
                weight,
                bias=bias,
                initial_state=state[i : i + 1],
                output_final_state=True,
            )
            total += jnp.sum(y * target[:, start:end]) + jnp.sum(final * target_state[i])
        return total

    arguments = (x, weight, bias, state)
    actual = jax.jit(jax.grad(packed, argnums=(0, 1, 2, 3)))(*arguments)
    expected = jax.jit(jax.grad(separate, argnums=(0, 1, 2, 3)))(*arguments)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("layer", [None, "traced"])
def test_update_on_a_pool_with_padding_rows(tokens, layer):
    slots = np.array([4, -1, 0, 2, -1], np.int32)
    x, weight, bias = make(5, tokens)
    x[slots < 0] = np.nan
    pool = make_state(5)
    pool[1] = np.nan
    stack = pool if layer is None else np.stack([make_state(5, seed=3), pool])
    index = None if layer is None else jnp.int32(1)
    y, new = update(x, weight, stack, slots, bias=bias, layer=index)
    want = stack.copy()
    changed = want if layer is None else want[1]
    for row, slot in enumerate(slots):
        if slot < 0:
            np.testing.assert_array_equal(y[row], 0)
        else:
            expected, changed[slot] = oracle(x[row], weight, pool[slot], bias)
            assert_close(y[row], expected)
    np.testing.assert_array_equal(np.asarray(new).view(np.int32), want.view(np.int32))


def test_prefill_then_update_equals_a_longer_prefill():
    x, weight, _ = make(2, 7)
    expected, end = conv(x, weight, output_final_state=True)
    _, state = conv(x[:, :5], weight, output_final_state=True)
    slots = np.array([1, 0], np.int32)
    pool = gdn.state_write(jnp.zeros((3, *state.shape[1:])), state, slots)
    y, pool = update(x[:, 5:], weight, pool, slots)
    np.testing.assert_array_equal(y, expected[:, 5:])
    np.testing.assert_array_equal(gdn.state_read(pool, slots), end)


def test_update_writes_a_donated_stack_in_place():
    pool = jax.ShapeDtypeStruct((8, 256, 3, CHANNELS), jnp.bfloat16)
    x, weight, _ = make(2, 1)

    def step(pool, slots, layer):
        return gdn.causal_conv1d_update(x, weight, pool, slots, layer=layer)

    slots, layer = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, slots, layer).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * np.prod(pool.shape)
    assert memory.temp_size_in_bytes < 2 * 256 * 3 * CHANNELS


def test_errors_name_the_argument_and_the_shape():
    x, weight, _ = make(2, 5)

    def refused(message, x=x, weight=weight, **kwargs):
        with pytest.raises(ValueError, match=message):
            gdn.causal_conv1d(x, weight, **kwargs)

    refused(r"x must be \[B, T, Dc\].*\(5, 6\)", x=x[0])
    refused(r"weight must be \[Dc=6, W\].*\(4, 6\)", weight=weight.T)
    refused(r"bias must be \[Dc=6\].*\(5,\)", bias=np.zeros(5))
    refused(r"activation .*'gelu'", activation="gelu")
    refused(r"initial_state must be \[2, 3, 6\], got \[2, 4, 6\]", initial_state=make_state(2, 5))
    refused(r"cu_seqlens needs batch 1.*got 2", cu_seqlens=np.array([0, 5]))
    refused(r"cu_seqlens .*\[0, 4, 3\]", x=x[:1], cu_seqlens=np.array([0, 4, 3]))
    refused(r"cu_seqlens .*\[0, 6\]", x=x[:1], cu_seqlens=np.array([0, 6]))


def test_update_errors_name_the_argument_and_the_shape():
    x, weight, _ = make(2, 1)
    pool, slots = make_state(3), np.array([0, 1], np.int32)

    def refused(message, error=ValueError, pool=pool, slots=slots, **kwargs):
        with pytest.raises(error, match=message):
            gdn.causal_conv1d_update(x, weight, pool, slots, **kwargs)

    refused(r"conv_state must be .*3, 6.*\(3, 4, 6\)", pool=make_state(3, 5))
    refused(r"layer .*\(1, 3, 3, 6\)", pool=pool[None])
    refused(r"layer=2 .*\(1, 3, 3, 6\)", pool=pool[None], layer=2)
    refused(r"state_indices .*\[0\] more than once", slots=np.array([0, 0]))
    refused(r"state_indices .*\[-1, 3\)", slots=np.array([0, 3]))
    refused(r"state_indices must be integers", TypeError, slots=np.array([0.0, 1.0]))
