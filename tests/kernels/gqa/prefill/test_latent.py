"""MLA's prefill with keys of 192 + 64 dims and values of 256, by the kernel of grouped-query
attention, against the plain JAX path.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from tests.helpers.kernel_cases import NO_SUCH_PAGE, both_devices, relative, slow, slow_interpreted

SCALE, RANK, PAGE = 256**-0.5, 128, 64


def draw(*shape, seed=0, over=1.0):
    values = np.random.default_rng(seed).normal(size=shape) / over
    return values.astype(np.float32).astype(jnp.bfloat16)


def prefill_arguments(lens, new, tokens, heads):
    """Of `mla_prefill`; NaN in what no row owns, and in the cache where the new tokens will be."""
    latents = [draw(n, RANK + 64, seed=i) for i, n in enumerate(lens)]
    width = max(-(-max(lens) // PAGE), 1) + 1
    tables = np.full((len(lens), width), NO_SUCH_PAGE, np.int32)
    order = iter(np.random.default_rng(9).permutation(len(lens) * width))
    cache = np.full((2, len(lens) * width, PAGE, RANK + 64), np.nan, jnp.bfloat16)
    fresh = np.full((len(lens), tokens, RANK + 64), np.nan, jnp.bfloat16)
    q = draw(len(lens), tokens, heads, 256, seed=5)
    for b, (latent, count) in enumerate(zip(latents, new, strict=True)):
        tables[b, : -(-len(latent) // PAGE)] = [next(order) for _ in range(0, len(latent), PAGE)]
        for t in range(len(latent) - count):
            cache[1, tables[b, t // PAGE], t % PAGE] = latent[t]
        fresh[b, :count] = latent[len(latent) - count :]
        q[b, count:] = np.nan
    w_uk, w_uv = (draw(heads, *s, seed=7, over=12) for s in ((192, RANK), (RANK, 256)))
    ints = (jnp.asarray(x, jnp.int32) for x in (tables, lens, new))
    return *(jnp.asarray(x) for x in (q, fresh, w_uk, w_uv, cache)), *ints


@pytest.mark.slow(
    reason="a prefix that is merged with other weights; found by rows with prefixes in "
    "kernels/mla/prefill/test_kernel and by the same test on a GPU too"
)
@both_devices
def test_prefill_merges_the_cached_prefix(implementation):
    # A prefix over several blocks, one that ends at a page's end, none, and padding.
    arguments = prefill_arguments([200, 70, 40, 0], [70, 6, 40, 0], tokens=72, heads=2)

    def step(implementation):
        op = functools.partial(
            mla.mla_prefill, scale=SCALE, block=64, implementation=implementation
        )
        return jax.jit(op)(*arguments, layer=jnp.int32(1))

    (out, lse), (expected, expected_lse) = step(implementation), step("xla")
    assert relative(out, np.asarray(expected, np.float64)) < 6e-3
    dead = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), dead)
    assert (np.asarray(out)[dead] == 0).all()
    # The paths round the expanded keys after sums of another order.
    np.testing.assert_allclose(lse, expected_lse, atol=3e-3, rtol=0)


@pytest.mark.slow_cases(reason="keys in two arrays that are read as one; found by joined keys too")
@slow_interpreted(
    "a gradient of another part of the keys; found by MLA prefill's causal attention, and values "
    "by the merge there, too"
)
@pytest.mark.parametrize("joined", [slow(False), True])
def test_causal_attention_and_its_gradient(joined, implementation):
    lengths = jnp.array([70, 3], jnp.int32)
    q, k, v = draw(2, 72, 2, 256), draw(2, 72, 2, 192, seed=1), draw(2, 72, 2, 256, seed=2)
    k_pe = draw(2, 72, 64, seed=3)
    for x in (q, k, v, k_pe):
        x[0, 70:], x[1, 3:] = np.nan, np.nan
    if joined:
        shared = np.broadcast_to(k_pe[:, :, None], (2, 72, 2, 64))
        k, k_pe = np.concatenate([k, shared], axis=-1), None
    real = (jnp.arange(72) < lengths[:, None])[..., None]

    def loss(arrays, implementation):
        q, k, v, k_pe = arrays
        out, lse = mla.causal_attention(
            q, k, v, k_pe=k_pe, scale=SCALE, lengths=lengths, implementation=implementation
        )
        return out.astype(jnp.float32).sum() + jnp.where(real, lse, 0).sum(), (out, lse)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    arrays = jax.tree.map(jnp.asarray, (q, k, v, k_pe))
    got, (out, lse) = grad(arrays, implementation)
    expected, (expected_out, expected_lse) = grad(arrays, "xla")
    assert relative(out, np.asarray(expected_out, np.float64)) < 4e-3
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=5e-7)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all() and relative(a, np.asarray(b, np.float64)) < 1e-2
