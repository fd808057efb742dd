"""Causal attention in plain JAX, and parts of attention merged to a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from tests.helpers.draws import normal
from tests.helpers.mla_cases import assert_same_bits, attend


def causal_numpy(q, k, v, lengths, scale):
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(q.shape[:3]):
        if t < lengths[b]:
            seen = slice(0, t + 1)
            out[b, t, h], lse[b, t, h] = attend(q[b, t, h], k[b, seen, h], v[b, seen, h], scale)
    return out, lse


@pytest.mark.parametrize("tokens, lengths", [(9, None), (9, [9, 4, 0]), (600, [600, 513, 1])])
def test_causal_attention(tokens, lengths):
    q, k, v = (normal(3, tokens, 2, d, seed=d) for d in (12, 12, 7))
    k = normal(3, tokens, 2, 12, seed=5)
    counts = lengths or [tokens] * 3
    for b, n in enumerate(counts):
        q[b, n:], k[b, n:], v[b, n:] = np.nan, np.inf, np.nan
    given = None if lengths is None else np.array(lengths, np.int32)
    out, lse = mla.causal_attention(q, k, v, scale=0.3, lengths=given)
    expected_out, expected_lse = causal_numpy(q, k, v, counts, 0.3)
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    for b, n in enumerate(counts):
        assert not np.asarray(out)[b, n:].any() and np.isneginf(lse[b, n:]).all()


def test_causal_attention_gradients_are_finite_differences_and_never_nan():
    lengths = np.array([6, 3, 0], np.int32)
    arrays = [normal(3, 6, 2, d, seed=i) for i, d in enumerate((5, 5, 4))]
    real = np.arange(6) < lengths[:, None]
    for x in arrays:
        x[~real] = np.nan
    weight_out, weight_lse = normal(3, 6, 2, 4, seed=7), normal(3, 6, 2, seed=8)

    def loss(xp, attention, arrays):
        out, lse = attention(*arrays)
        return (out * weight_out).sum() + (xp.where(lse == -np.inf, 0, lse) * weight_lse).sum()

    ours = functools.partial(mla.causal_attention, scale=0.4, lengths=lengths)
    theirs = functools.partial(causal_numpy, lengths=lengths, scale=0.4)
    grads = jax.grad(lambda arrays: loss(jnp, ours, arrays))(arrays)
    along = [normal(*x.shape, seed=9 + i).astype(np.float64) for i, x in enumerate(arrays)]
    ahead, behind = (
        loss(np, theirs, [x + e * d for x, d in zip(arrays, along, strict=True)])
        for e in (1e-4, -1e-4)
    )
    got = sum((g * d).sum() for g, d in zip(map(np.asarray, grads), along, strict=True))
    np.testing.assert_allclose(got, (ahead - behind) / 2e-4, rtol=1e-3)
    for g in grads:
        assert np.isfinite(g).all() and not np.asarray(g)[~real].any()


def test_merging_parts_is_attention_to_all_keys():
    q, k, v = normal(4, 12), normal(30, 12, seed=2), normal(30, 7, seed=3)
    cuts = [(0, 11), (11, 11), (11, 12), (12, 30)]
    parts = [[attend(x, k[a:b], v[a:b], 0.5) for x in q] for a, b in cuts]
    outs = [np.float32([out for out, _ in part]) for part in parts]
    lses = [np.float32([lse for _, lse in part]) for part in parts]
    outs[1][:] = np.nan  # never written: its lse says that it saw nothing
    whole = [attend(x, k, v, 0.5) for x in q]
    for stacked in (False, True):
        given = (np.stack(outs), np.stack(lses)) if stacked else (outs, lses)
        out, lse = mla.merge_attention_states(*given)
        np.testing.assert_allclose(out, [out for out, _ in whole], atol=1e-6)
        np.testing.assert_allclose(lse, [lse for _, lse in whole], atol=1e-6)


def test_merging_is_associative_and_in_float32():
    rng = np.random.default_rng(0)
    outs = [jnp.bfloat16(rng.standard_normal((5, 3, 4))) for _ in range(4)]
    lses = [np.float32(rng.uniform(-20, 20, (5, 3))) for _ in range(4)]
    lses[1][0], lses[3][0], lses[2][1] = -np.inf, -np.inf, -np.inf
    merge = jax.jit(mla.merge_attention_states)
    wide = [np.float32(out) for out in outs]
    whole, whole_lse = merge(wide, lses)
    weight = np.exp(np.float64(lses) - whole_lse)[..., None]
    expected = np.sum(np.float64(wide) * weight, 0)
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    left = merge(*zip(merge(wide[:2], lses[:2]), merge(wide[2:], lses[2:]), strict=True))
    one_by_one = wide[0], lses[0]
    for part in zip(wide[1:], lses[1:], strict=True):
        one_by_one = merge(*zip(one_by_one, part, strict=True))
    for out, lse in (left, one_by_one):
        np.testing.assert_allclose(out, whole, atol=1e-6)
        np.testing.assert_allclose(lse, whole_lse, atol=1e-6)
    narrow, narrow_lse = merge(outs, lses)
    assert narrow.dtype == jnp.bfloat16 and narrow_lse.dtype == jnp.float32
    assert_same_bits(narrow, whole.astype(jnp.bfloat16))
    assert_same_bits(merge(outs[:1], lses[:1])[0][1], outs[0][1])


@pytest.mark.parametrize("dtype, eps", [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_merging_many_tokens_rounds_once(dtype, eps):
    rng = np.random.default_rng(1)
    outs = jnp.asarray(rng.standard_normal((3, 256, 4, 32)), dtype)
    lses = np.float32(rng.uniform(-20, 20, (3, 256, 4)))
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[:, 7] = -np.inf
    out, lse = jax.jit(mla.merge_attention_states)(outs, lses)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    seen = np.isfinite(lses).any(axis=0)
    weight = np.exp(np.float64(lses) - np.where(seen, lses.max(axis=0), 0))
    total = np.where(seen, weight.sum(axis=0), 1)
    expected = (np.float64(outs) * weight[..., None]).sum(axis=0) / total[..., None]
    np.testing.assert_allclose(np.float64(out), expected, rtol=1.01 * eps, atol=1e-6)
    expected_lse = np.where(seen, lses.max(axis=0) + np.log(total), -np.inf)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_part_with_lse_inf_saw_nothing(stacked):
    """As FlashAttention and FlashMLA mark it; vLLM's merge takes it so too."""
    rng = np.random.default_rng(2)
    outs, lses = np.float32(rng.standard_normal((3, 6, 4))), np.float32(rng.normal(size=(3, 6)) * 9)
    lses[0, 0] = lses[2, 1] = lses[1, 2] = lses[:, 3] = np.inf
    lses[0, 2] = lses[1, 3] = -np.inf  # row 2 has one of each, row 3 nothing but them
    nothing = np.isinf(lses)
    outs[nothing] = np.nan  # never written
    weight = np.where(nothing, 0, np.exp(np.float64(lses)))
    seen = np.where(nothing, 0, 1)[..., None] * np.nan_to_num(np.float64(outs))
    total = weight.sum(0)
    held = np.where(total > 0, total, 1)
    given = (outs, lses) if stacked else (list(outs), list(lses))
    out, lse = jax.jit(mla.merge_attention_states)(*given)
    wanted = (seen * weight[..., None]).sum(0) / held[:, None]
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, np.where(total > 0, np.log(held), -np.inf), rtol=1e-6)
    assert not np.asarray(out)[3].any() and np.isneginf(lse[3])

    def loss(outs, lses):
        out, lse = mla.merge_attention_states(outs, lses)
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    for gradient in jax.grad(loss, (0, 1))(outs, lses):
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[nothing].any()


def test_merging_nothing_is_nothing_and_a_nan_is_not_hidden():
    outs = [np.full((3, 2), np.nan, np.float32), np.ones((3, 2), np.float32)]
    lses = [
        np.array([-np.inf, -np.inf, np.nan], np.float32),
        np.array([-np.inf, 2, 2], np.float32),
    ]
    out, lse = mla.merge_attention_states(outs, lses)
    np.testing.assert_array_equal(out, [[0, 0], [1, 1], [np.nan, np.nan]])
    np.testing.assert_array_equal(lse, [-np.inf, 2, np.nan])
    grad = jax.grad(lambda *x: mla.merge_attention_states(x[:1] * 2, x[1:] * 2)[0].sum())
    assert np.isfinite(grad(outs[1], lses[1])).all()
    absent = np.array([np.full(3, -np.inf, np.float32), lses[1]])
    merged = jax.jit(jax.grad(lambda *x: mla.merge_attention_states(*x)[0][1:].sum(), (0, 1)))
    grads = merged(np.array(outs), absent)
    np.testing.assert_array_equal(grads[0], [np.zeros((3, 2)), [[0, 0], [1, 1], [1, 1]]])
    assert not np.asarray(grads[1]).any()
    with pytest.raises(ValueError, match="at least one, got 0 and 0"):
        mla.merge_attention_states([], [])
    with pytest.raises(ValueError, match="got 2 and 1"):
        mla.merge_attention_states(np.stack(outs), lses[:1])
    with pytest.raises(TypeError, match=r"outs\[1\] must be an array of .*got int32 \(3, 2\)"):
        mla.merge_attention_states([outs[0], np.zeros((3, 2), np.int32)], lses)
    with pytest.raises(TypeError, match=r"lses must be an array of .*got int32 \(2, 3\)"):
        mla.merge_attention_states(outs, np.zeros((2, 3), np.int32))
    with pytest.raises(TypeError, match=r"lses\[0\] must be an array of .*got list"):
        mla.merge_attention_states(outs, [[0.0], lses[1]])
    with pytest.raises(ValueError, match=r"\(3, 2\), \(2,\)"):
        mla.merge_attention_states(outs, [lses[0], lses[1][:2]])
    with pytest.raises(
        TypeError, match="outs must be a sequence of arrays or one stack of them, got NoneType"
    ):
        mla.merge_attention_states(None, lses)
    with pytest.raises(
        TypeError, match="lses must be a sequence of arrays or one stack of them, got generator"
    ):
        mla.merge_attention_states(outs, (lse for lse in lses))
