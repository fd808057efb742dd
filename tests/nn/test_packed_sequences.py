"""Rows that hold several sequences give what each sequence alone gives, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import nn
from jaxattn.core.numerics.rope import QueryScaling, RopeConfig
from tests.helpers.at_once import at_once
from tests.helpers.kernel_cases import slow

HIDDEN, TOKENS = 16, 20
OPTIONS = {"dtype": jnp.float32}
ATTENTION = {
    "GroupedQueryAttention": lambda rngs: nn.GroupedQueryAttention(
        HIDDEN, 2, 1, 8, rope=RopeConfig(dim=4), gated=True, window=6, sinks=True,
        query_scaling=QueryScaling(beta=0.5, original_max_position_embeddings=4),
        rngs=rngs, **OPTIONS,
    ),
    "MultiHeadLatentAttention": lambda rngs: nn.MultiHeadLatentAttention(
        HIDDEN, 2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        rope=RopeConfig(dim=4), rngs=rngs, **OPTIONS,
    ),
    "SparseMultiHeadLatentAttention": lambda rngs: nn.SparseMultiHeadLatentAttention(
        HIDDEN, 2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6, top_k=4, index_heads=2, index_head_dim=6, sinks=True, rngs=rngs, **OPTIONS,
    ),
}  # fmt: skip
DELTA = {
    "GatedDeltaNet": lambda rngs: nn.GatedDeltaNet(
        HIDDEN, 1, 2, head_k_dim=8, head_v_dim=6, rngs=rngs, **OPTIONS
    ),
    "KimiDeltaAttention": lambda rngs: nn.KimiDeltaAttention(
        HIDDEN, 1, head_dim=8, rngs=rngs, **OPTIONS
    ),
}
MODULES = ATTENTION | DELTA
# Of each row the lengths of its sequences; offsets are of one row.
ROWS = ((7, 1, 9), (2, 11, 7))


@functools.cache
def module(name):
    return nnx.split(MODULES[name](nnx.Rngs(0)))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(definition, params, x, target, packed):
    def loss(params, x):
        out = nnx.merge(definition, params)(x, **packed)
        return (out * target).sum(), out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)


def alone(x, rows):
    """Sequences of x [B, T, hidden], a row each, with zeros behind them."""
    pieces = [
        piece
        for tokens, lengths in zip(np.asarray(x), rows, strict=True)
        for piece in np.split(tokens, np.cumsum(lengths))[: len(lengths)]
    ]
    return np.stack([np.pad(x, ((0, TOKENS - len(x)), (0, 0))) for x in pieces])


@pytest.mark.slow_cases(
    reason="another rule or attention in the same layer; found by the other layers there, and by "
    "packed rows of its op in ops/attention/test_segments, ops/gdn/test_gdn and ops/kda/test_kda, "
    "too"
)
@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("GroupedQueryAttention", "segment_ids"),
        slow("MultiHeadLatentAttention", "segment_ids"),
        ("SparseMultiHeadLatentAttention", "segment_ids"),
        slow("GatedDeltaNet", "segment_ids"),  # a whole model's packed rows find it too
        ("GatedDeltaNet", "cu_seqlens"),
        slow("KimiDeltaAttention", "segment_ids"),
        slow("KimiDeltaAttention", "cu_seqlens"),
    ],
)
def test_a_packed_sequence_is_what_it_is_alone(name, keyword):
    rows = ROWS if keyword == "segment_ids" else ROWS[:1]
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(2, len(rows), TOKENS, HIDDEN)).astype(np.float32)
    rest = [TOKENS - sum(lengths) for lengths in rows]  # padding
    for row, count in zip(target, rest, strict=True):
        row[len(row) - count :] = 0
    if keyword == "segment_ids":
        ids = [
            np.repeat([0, 3, 4, 7], [*lengths, count])
            for lengths, count in zip(rows, rest, strict=True)
        ]
        packed = {"segment_ids": np.stack(ids)}
    else:
        packed = {"cu_seqlens": np.cumsum([0, *rows[0]])}
    (_, out), grads = value_and_gradients(*module(name), x, target, packed)
    x, target = alone(x, rows), alone(target, rows)
    (_, out_alone), grads_alone = value_and_gradients(*module(name), x, target, {})
    # Behind a sequence of its own a row has outputs of padding.
    of_tokens = np.arange(TOKENS) < np.concatenate(rows)[:, None]
    out_alone = np.where(of_tokens[..., None], out_alone, 0)
    found = alone(out, rows), grads[0], alone(grads[1], rows)
    wanted = out_alone, *grads_alone
    atol = 3e-5 if name == "KimiDeltaAttention" else 1e-5
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=atol)
    jax.tree.map(close, found, wanted)
    assert np.abs(out_alone[:, 0]).min() > 0
    # A choice has no gradient.
    without = {path[0] for path, leaf in nnx.to_flat_state(grads[0]) if not np.any(leaf)}
    assert without == ({"indexer"} if name.startswith("Sparse") else set())


@pytest.mark.slow_cases(reason="another rule in the same layer, which zeroes the tokens")
@pytest.mark.parametrize("name", [*ATTENTION, "GatedDeltaNet", slow("KimiDeltaAttention")])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_nan_of_a_sequence_or_of_padding_reaches_no_other_sequence(name, value):
    x, target = np.random.default_rng(0).normal(size=(2, 2, TOKENS, HIDDEN)).astype(np.float32)
    ids = np.stack([np.repeat([1, 2, 3, 0], [7, 1, 9, 3]), np.repeat([1, 2, 3], ROWS[1])])
    packed, others = {"segment_ids": ids}, (ids > 0) & ~((ids == 1) & np.array([[True], [False]]))
    target *= others[..., None]
    (_, wanted), gradients = value_and_gradients(*module(name), x, target, packed)
    broken = x.copy()
    broken[0, 3, 5] = broken[0, 17:] = value
    (_, found), found_gradients = value_and_gradients(*module(name), broken, target, packed)
    np.testing.assert_array_equal(found[others], wanted[others])
    np.testing.assert_array_equal(found[0, :3], wanted[0, :3])
    assert np.isnan(found[0, 3:7]).all() and not found[0, 17:].any()
    jax.tree.map(np.testing.assert_array_equal, found_gradients, gradients)


@pytest.mark.parametrize("name", ["GroupedQueryAttention", "GatedDeltaNet"])
def test_a_number_that_rounds_to_infinity_reaches_no_other_sequence(name):
    x = np.random.default_rng(0).normal(size=(1, TOKENS, HIDDEN)).astype(np.float32)
    x[0, 3, 5] = 1e5
    layer = nnx.merge(*module(name))
    for part in [layer, *(each for _, each in nnx.iter_modules(layer))]:
        if getattr(part, "dtype", None) == jnp.float32:
            part.dtype = jnp.dtype(jnp.float16)
    out = at_once(layer, x, segment_ids=np.repeat([[1, 2]], (7, 13), axis=1))
    spoiled = np.isnan(out).any(axis=-1)[0]
    np.testing.assert_array_equal(np.flatnonzero(spoiled), [3, 4, 5, 6])


@pytest.mark.parametrize("name", ATTENTION)
def test_offsets_are_segments_too(name):
    x = np.random.default_rng(0).normal(size=(1, TOKENS, HIDDEN)).astype(np.float32)
    layer = nnx.merge(*module(name))
    ids = np.repeat([[0, 1, 2]], (7, 9, 4), axis=1)
    x[0, 16:] = np.nan
    found, wanted = at_once(layer, x, cu_seqlens=[0, 7, 7, 16]), at_once(layer, x, segment_ids=ids)
    np.testing.assert_array_equal(found[:, :16], wanted[:, :16])
    assert not found[:, 16:].any()


@pytest.mark.parametrize("name", MODULES)
def test_what_does_not_fit_is_named(name):
    x = np.zeros((2, TOKENS, HIDDEN), np.float32)
    layer = nnx.merge(*module(name))
    with pytest.raises(ValueError, match=f"^{name}: cu_seqlens needs batch 1.*got 2"):
        layer(x, cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match=f"^{name}: cu_seqlens must .*20 tokens, got .*0, 30"):
        layer(x[:1], cu_seqlens=[0, 30])
    ids = np.zeros((2, TOKENS), np.int32)
    with pytest.raises(ValueError, match=rf"^{name}: segment_ids .* \(2, 19\).* x .* T = 20"):
        layer(x, segment_ids=ids[:, 1:])
    if name in ATTENTION:
        with pytest.raises(ValueError, match=rf"^{name}: positions .* \(2, 19\).* x .* T = 20"):
            layer(x, positions=ids[:, 1:])
    ids[1, 4] = 3
    with pytest.raises(ValueError, match=f"^{name}: segment_ids must not decrease.* row 1 has 3"):
        layer(x, segment_ids=ids)
    with pytest.raises(ValueError, match=f"^{name}: .*drop segment_ids"):
        layer(x[:1], segment_ids=ids[:1], cu_seqlens=[0, 5])
    with pytest.raises(TypeError, match=f"^{name}: segment_ids must be integers"):
        layer(x, segment_ids=x[..., 0])


def test_ids_that_turn_out_unsorted_give_zeros():
    layer, x = nnx.merge(*module("GatedDeltaNet")), np.ones((2, TOKENS, HIDDEN), np.float32)
    ids = np.zeros((2, TOKENS), np.int32)
    ids[1, 4] = 3
    out = jax.jit(lambda ids: layer(x, segment_ids=ids))(ids)
    assert out[0].all() and not out[1].any()
