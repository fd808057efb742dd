"""The convolution of packed sequences and its kernels, against loops in float64 and XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gdn
from jaxattn.kernels.gdn import conv_forward as kernel_module
from jaxattn.kernels.gdn.conv_forward import conv_forward
from jaxattn.kernels.gdn.conv_gradient import conv_gradient
from jaxattn.ops.gdn.packed_conv1d import (
    _gradient_of_taps,
    causal_conv1d_of_pieces,
    causal_conv1d_of_segments,
)
from tests.helpers.at_once import at_once
from tests.helpers.kernel_cases import no_races, relative, slow
from tests.ops.gdn.test_conv import make, oracle

IN_BOTH = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
LENS = (2, 60, 2, 66, 20)  # sequences that end within a block, with it and behind it
MANY = (4096, 3, 1, 4000, 92)


def positions(lens):
    return jnp.asarray(np.concatenate([np.arange(n, dtype=np.int32) for n in lens]))


@pytest.mark.slow_cases(
    reason="tokens before a sequence with another width; found by the other case of these widths, "
    "with or without a history, and by one token there too"
)
@IN_BOTH
@pytest.mark.parametrize(
    ("lens", "widths", "dtype", "with_history"),
    [
        (LENS, (128, 256), jnp.bfloat16, False),
        slow(LENS, (128, 256), jnp.bfloat16, True),
        slow((1, 70), (512, 1024), jnp.float16, False),
        ((1, 70), (512, 1024), jnp.float16, True),
        ((1,), (256,), jnp.bfloat16, False),
        ((1,), (256,), jnp.bfloat16, True),
        pytest.param(MANY, (2048, 2048, 4096), jnp.bfloat16, False, marks=pytest.mark.gpu),
        pytest.param(MANY, (2048, 2048, 4096), jnp.bfloat16, True, marks=pytest.mark.gpu),
    ],
)
def test_the_kernel_convolves_each_sequence_from_its_history(
    lens, widths, dtype, with_history, interpret
):
    if interpret and lens is MANY:
        pytest.skip("only on a GPU")
    rng, channels = np.random.default_rng(0), sum(widths)
    x = jnp.asarray(rng.standard_normal((sum(lens), channels + 64)), dtype)
    taps = jnp.asarray(rng.standard_normal((4, channels)), dtype)
    before = jnp.asarray(rng.standard_normal((len(lens), 3, channels)), dtype)
    sequence = jnp.asarray(np.repeat(np.arange(len(lens)), lens), jnp.int32)
    history = (before, sequence) if with_history else None
    kernel = jax.jit(functools.partial(conv_forward, widths=widths, interpret=interpret))
    with no_races(when=interpret):
        found = jax.block_until_ready(kernel(x, taps, positions(lens), history=history))
    assert [each.shape for each in found] == [(sum(lens), width) for width in widths]
    begin, columns = 0, np.asarray(x)[:, :channels].astype(np.float64)
    weight = np.asarray(taps).astype(np.float64).T
    for i, n in enumerate(lens):
        state = np.asarray(before[i]).astype(np.float64) if with_history else None
        expected, _ = oracle_of(columns[begin : begin + n], weight, state)
        got = np.concatenate([each[begin : begin + n] for each in found], axis=1)
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2**-7, atol=2e-3)
        begin += n


def oracle_of(tokens, weight, state):
    """`oracle` by sums over whole columns, for many tokens."""
    if len(tokens) < 100:
        return oracle(tokens, weight, state)
    before = np.zeros((3, tokens.shape[1])) if state is None else state
    inputs = np.concatenate([before, tokens])
    total = sum(weight[:, j] * inputs[j : j + len(tokens)] for j in range(4))
    return total / (1 + np.exp(-total)), inputs[len(tokens) :]


@IN_BOTH
def test_the_kernel_reads_no_other_sequence(interpret):
    """NaN in one sequence and in its history, and in columns that are not convolved."""
    rng, n = np.random.default_rng(0), sum(LENS)
    x = jnp.asarray(rng.standard_normal((n, 384)), jnp.bfloat16)
    taps = jnp.asarray(rng.standard_normal((4, 256)), jnp.bfloat16)
    before = jnp.asarray(rng.standard_normal((len(LENS), 3, 256)), jnp.bfloat16)
    sequence = jnp.asarray(np.repeat(np.arange(len(LENS)), LENS), jnp.int32)
    kernel = jax.jit(functools.partial(conv_forward, widths=(256,), interpret=interpret))
    (found,) = kernel(x, taps, positions(LENS), history=(before, sequence))
    found = np.asarray(found)
    for i in (1, 2, 3):
        own, spoiled, history = np.asarray(sequence) == i, np.array(x), np.array(before)
        spoiled[:, 256:] = spoiled[own] = history[i] = np.nan
        given = jnp.asarray(spoiled), taps, positions(LENS)
        (y,) = map(np.asarray, kernel(*given, history=(jnp.asarray(history), sequence)))
        np.testing.assert_array_equal(y[~own], found[~own])
        assert np.isnan(y[own]).all()


def test_rows_of_an_odd_width_are_read_by_single_columns(monkeypatch):
    """Two or four columns of later rows would be misaligned."""
    vectors, body = set(), kernel_module.convolve_tokens

    def convolve_tokens(vector, own, **refs):
        vectors.add(vector)
        body(vector, own, **refs)

    monkeypatch.setattr(kernel_module, "convolve_tokens", convolve_tokens)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 515)), jnp.bfloat16)
    taps = jnp.ones((4, 512), jnp.bfloat16)
    (found,) = conv_forward(x, taps, positions((20,)), (512,), interpret=True)
    expected, _ = oracle(x[:, :512], np.ones((512, 4)))
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-7, atol=2e-3)
    assert vectors == {1}


@pytest.mark.gpu
def test_pieces_on_a_gpu_are_those_of_xla():
    """A chunk of each row of a delta layer, in rows and in lines."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 200, 640)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((512, 4)), jnp.bfloat16)
    state = jnp.asarray(rng.standard_normal((3, 3, 512)), jnp.bfloat16)
    rows, tokens = np.indices((3, 200))

    def reference():
        y, _ = gdn.causal_conv1d(x[..., :512], weight, initial_state=state)
        return y[..., :128], y[..., 128:]

    def pieces(implementation):
        return causal_conv1d_of_pieces(
            x, weight, state, tokens, rows, (128, 384), reference, implementation=implementation
        )

    found, expected = jax.jit(pieces, static_argnums=0)("mosaic_gpu"), jax.jit(reference)()
    for got, wanted in zip(found, expected, strict=True):
        assert relative(got, wanted) < 2e-3


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs there")
def test_pieces_have_a_gradient_where_the_kernel_does_not_run():
    x, weight = jnp.ones((1, 4, 256), jnp.bfloat16), jnp.ones((256, 4), jnp.bfloat16)
    before, place = jnp.zeros((1, 3, 256), jnp.bfloat16), jnp.arange(4, dtype=jnp.int32)[None]

    def total(x, implementation=None):
        (y,) = causal_conv1d_of_pieces(
            x, weight, before, place, 0 * place, (256,), lambda: (3 * x,),
            implementation=implementation,
        )  # fmt: skip
        return y.sum(dtype=jnp.float32)

    np.testing.assert_array_equal(jax.grad(total)(x), np.full(x.shape, 3))
    said = "causal_conv1d: the kernel has no gradient of x; train with the layer's __call__"
    with pytest.raises(NotImplementedError, match=said):
        jax.grad(total)(x, "mosaic_gpu_interpret")


@pytest.mark.parametrize("ends", [None, [0, 1, 6, 11]])
@pytest.mark.parametrize("dtype, most", [(np.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_the_gradient_written_by_hand_is_that_of_the_op(ends, dtype, most):
    x, weight, _ = (jnp.asarray(each) for each in make(1, 11))
    given = x.astype(dtype), weight.astype(dtype)
    first = None if ends is None else jnp.repeat(jnp.array(ends[:-1]), jnp.diff(jnp.array(ends)))
    offsets = None if ends is None else jnp.array(ends, jnp.int32)
    of_y = jnp.asarray(np.random.default_rng(7).standard_normal(x.shape), dtype)

    def gradients(op, operands):
        y, pull = jax.vjp(op, *operands)
        return y, *pull(of_y.astype(y.dtype))

    def by_hand(x, w):
        starts = None if first is None else first[None]
        return jnp.concatenate(causal_conv1d_of_segments(x, w[:4], starts, (3, 1, 2)), axis=-1)

    def op(x, w):
        y, _ = gdn.causal_conv1d(x[..., :4], w[:4], cu_seqlens=offsets)
        return jnp.concatenate([y, x[..., 4:]], axis=-1)

    wide = tuple(each.astype(jnp.float32) for each in given)
    found, expected = (at_once(gradients, *each) for each in ((by_hand, given), (op, wide)))
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype and relative(got, wanted) < most


@pytest.mark.slow_cases(
    reason="one part beside the columns that are passed on; found by two parts there, and by the "
    "same test on a GPU, too"
)
@IN_BOTH
@pytest.mark.parametrize("widths", [(128, 256, 128), slow((256, 256))])
def test_the_kernel_of_the_gradient_computes_what_xla_does(widths, interpret):
    rng, lens = np.random.default_rng(0), LENS
    columns, channels = sum(widths), sum(widths[:-1])
    x, of_y = (rng.standard_normal((sum(lens), columns)) for _ in range(2))
    taps = jnp.asarray(rng.standard_normal((channels, 4)), jnp.bfloat16)
    position = positions(lens)
    x, of_y = (jnp.asarray(each, jnp.bfloat16) for each in (x, of_y))
    of_parts = jnp.split(of_y, np.cumsum(widths)[:-1], axis=1)
    kernel = jax.jit(functools.partial(conv_gradient, interpret=interpret))
    with no_races(when=interpret):
        of_x, of_taps = jax.block_until_ready(kernel(x, of_parts, taps.T, position))
    wide = (each.astype(jnp.float32) for each in (x[None], taps))
    wanted = jax.jit(_gradient_of_taps)(*wide, position[None], (of_y[None].astype(jnp.float32),))
    assert relative(of_x, wanted[0][0]) < 2e-3 and relative(of_taps, wanted[1]) < 1e-5
    np.testing.assert_array_equal(of_x[:, channels:], of_parts[-1])
    spoiled, _ = kernel(x.at[61:64].set(jnp.nan), of_parts, taps.T, position)
    np.testing.assert_array_equal(spoiled[64:], of_x[64:])
    np.testing.assert_array_equal(spoiled[:58], of_x[:58])
