"""Sequences packed in a row: `segment_ids` and `cu_seqlens` of causal attention in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa, mla

OPS = {
    "gqa": functools.partial(gqa.gqa_attention, window=9),
    "mla": functools.partial(mla.causal_attention, scale=0.3),
}
TOKENS, LENS = 20, (6, 0, 13)


def operands(batch=1):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(batch, TOKENS, 2, 4)).astype(np.float32) for _ in range(3)]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(name, arrays, **options):
    def loss(arrays):
        out, lse = OPS[name](*arrays, **options)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum(), (out, lse)

    grads, outs = jax.grad(loss, has_aux=True)(arrays)
    return *outs, *grads


@pytest.mark.parametrize("name", OPS)
def test_a_packed_sequence_is_what_it_is_alone(name):
    arrays = operands()
    ends = np.cumsum((0, *LENS))
    for x in arrays:
        x[:, ends[-1] :] = np.nan
    packed = value_and_gradients(name, arrays, cu_seqlens=ends)
    ids = np.array([[3] * LENS[0] + [7] * LENS[2] + [9] * (TOKENS - ends[-1])])
    by_ids = value_and_gradients(name, arrays, segment_ids=ids, lengths=ends[-1:])
    for one, other in zip(packed, by_ids, strict=True):
        np.testing.assert_array_equal(one, other)
    for begin, count in zip(ends, LENS, strict=False):
        alone = [np.full_like(x, np.nan) for x in arrays]
        for x, all_tokens in zip(alone, arrays, strict=True):
            x[:, :count] = all_tokens[:, begin : begin + count]
        alone = value_and_gradients(name, alone, lengths=np.array([count]))
        for one, other in zip(packed, alone, strict=True):
            one, other = one[:, begin : begin + count], other[:, :count]
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert not any(np.nan_to_num(np.asarray(x[:, ends[-1] :]), neginf=0).any() for x in packed)


@pytest.mark.parametrize("pad", [0, -1])
def test_low_ids_at_the_end_of_a_row_are_padding(pad):
    """As MaxText packs rows: ids from 1, and 0 for padding."""
    arrays = operands(2)
    ids = np.array([[1] * 6 + [2] * 7 + [pad] * 7, [4] * TOKENS], np.int32)
    for x in arrays:
        x[0, 13:] = np.nan
    padded = value_and_gradients("mla", arrays, segment_ids=ids)
    lengths = np.array([13, TOKENS])
    for one, other in zip(
        padded, value_and_gradients("mla", arrays, segment_ids=ids, lengths=lengths), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    out, lse, *grads = padded
    assert np.isneginf(lse[0, 13:]).all() and np.isfinite(lse[0, :13]).all()
    for x in (out, *grads):
        assert not np.asarray(x)[0, 13:].any() and np.isfinite(x).all()
    OPS["mla"](*arrays, segment_ids=ids)  # known ids are checked, and these are right
    # What lies beyond a row's length is not looked at.
    OPS["mla"](*arrays, segment_ids=ids[:, ::-1], lengths=np.array([0, 9]))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "options, words",
    [
        ({"segment_ids": [[0] * 8 + [2, 1] + [2] * 10]}, "segment_ids must not decrease.* token 8"),
        ({"segment_ids": [[0] * 8 + [1] * 6 + [0] * 6]}, "row 0 has 1 at token 13 and 0 after"),
        ({"segment_ids": [[1] * 8 + [0] + [2] * 11]}, "row 0 has 0 at token 8 and 2 after it"),
        ({"segment_ids": np.zeros((1, 19), np.int32)}, r"segment_ids \[B, T\] has shape \(1, 19\)"),
        ({"segment_ids": np.zeros((2, 20), np.int32)}, "segment_ids"),
        ({"cu_seqlens": [0, 30]}, "cu_seqlens must start at 0"),
        ({"cu_seqlens": [0, 5], "lengths": [5]}, "drop lengths"),
        ({"cu_seqlens": [0, 5], "segment_ids": [[0] * 20]}, "drop segment_ids"),
    ],
)
def test_what_does_not_fit_is_named(name, options, words):
    options = {key: np.asarray(x, np.int32) for key, x in options.items()}
    with pytest.raises(ValueError, match=words):
        OPS[name](*operands(), **options)


def test_a_traced_row_that_is_not_sorted_has_no_tokens():
    ids = np.zeros((2, TOKENS), np.int32)
    ids[1, 3] = 1
    out, lse, *grads = value_and_gradients("gqa", operands(2), segment_ids=ids)
    assert np.isneginf(lse[1]).all() and np.isfinite(lse[0]).all()
    for x in (out, *grads):
        assert not np.asarray(x)[1].any() and np.asarray(x)[0].any()


@pytest.mark.parametrize("name", OPS)
def test_a_kernel_in_forward_mode_says_what_to_use(name):
    shape = (1, 8, 1, 64) if name == "gqa" else (1, 8, 1, 192)
    q = jnp.ones(shape, jnp.bfloat16)
    v = q[..., :128]

    def op(q):
        return OPS[name](q, q, v, implementation="mosaic_gpu_interpret")

    with pytest.raises(TypeError, match="jax.grad or jax.vjp, or pass implementation='xla'"):
        jax.jvp(op, (q,), (q,))
