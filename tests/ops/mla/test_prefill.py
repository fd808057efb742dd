"""MLA prefill in plain JAX against float64, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from tests.helpers.draws import normal
from tests.helpers.mla_cases import make_pool, prefill_numpy
from tests.ops.mla.test_decode import decode

HEADS, NOPE, RANK, ROPE, VALUES = 2, 6, 16, 8, 5


W_UK, W_UV = normal(HEADS, NOPE, RANK, seed=2), normal(HEADS, RANK, VALUES, seed=3)


def prefill(q, latent, pool, query_lens, lens=None, cache=None, **kwargs):
    return mla.mla_prefill(
        q,
        latent,
        W_UK,
        W_UV,
        pool.cache if cache is None else cache,
        pool.tables,
        pool.lens if lens is None else np.array(lens, np.int32),
        np.array(query_lens, np.int32),
        scale=0.2,
        **kwargs,
    )


def new_latents(latents, query_lens, tokens):
    """The last query_lens tokens of every row, with NaN as padding."""
    latent = np.full((len(latents), tokens, RANK + ROPE), np.nan, np.float32)
    for b, (row, new) in enumerate(zip(latents, query_lens, strict=True)):
        if new and len(row):
            latent[b, max(new - len(row), 0) : new] = row[-new:]
    return latent


@pytest.mark.sampled
@pytest.mark.parametrize("block, layer", [(1, None), (32, 1), (1024, None)])
def test_prefill_sees_the_cached_prefix_and_its_own_tokens(layer, block):
    lens, query_lens = [7, 16, 40, 0, 33, 70, 20], [7, 1, 5, 3, 8, 6, 0]
    pool = make_pool(lens, page=16, dim=RANK + ROPE, beyond=-1)
    # The new tokens come from `latent`: the cache may not hold them yet.
    cache = pool.cache.copy()
    for b, (n, new) in enumerate(zip(lens, query_lens, strict=True)):
        for t in range(n - min(n, new), n):
            cache[pool.tables[b, t // 16], t % 16] = np.nan
    q = normal(7, 8, HEADS, NOPE + ROPE)
    for b, new in enumerate(query_lens):
        q[b, new:] = np.nan
    if layer is not None:
        cache = np.stack([np.full_like(cache, np.nan), cache])
    latent = new_latents(pool.latents, query_lens, 8)
    out, lse = prefill(q, latent, pool, query_lens, cache=cache, layer=layer, block=block)
    expected_out, expected_lse = prefill_numpy(q, pool.latents, query_lens, W_UK, W_UV, 0.2)
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    for b, new in enumerate(query_lens):
        new = new if lens[b] else 0
        assert not np.asarray(out)[b, new:].any() and np.isneginf(lse[b, new:]).all()


def test_prefill_is_decode_of_the_same_tokens():
    lens, tokens = [4, 16, 37], 4
    pool = make_pool(lens, page=16, dim=RANK + ROPE)
    q = normal(3, tokens, HEADS, NOPE + ROPE)
    latent = new_latents(pool.latents, [tokens] * 3, tokens)
    out, lse = prefill(q, latent, pool, [tokens] * 3)
    absorbed = jnp.concatenate([mla.absorb_query(q[..., :NOPE], W_UK), q[..., NOPE:]], -1)
    decoded, decoded_lse = decode(
        absorbed, pool.cache, pool.tables, pool.lens, scale=0.2, kv_lora_rank=RANK
    )
    np.testing.assert_allclose(out, mla.absorb_output(decoded, W_UV), atol=2e-5)
    np.testing.assert_allclose(lse, decoded_lse, atol=2e-5)


def test_prefill_in_bfloat16_is_near():
    lens, query_lens = [20, 7], [6, 7]
    pool = make_pool(lens, page=16, dim=RANK + ROPE)
    pool = pool._replace(latents=[np.float32(jnp.bfloat16(x)) for x in pool.latents])
    q, w_uk, w_uv = (jnp.bfloat16(x) for x in (normal(2, 8, HEADS, NOPE + ROPE), W_UK, W_UV))
    latent = jnp.bfloat16(new_latents(pool.latents, query_lens, 8))
    args = (pool.tables, pool.lens, np.array(query_lens, np.int32))
    out, lse = mla.mla_prefill(q, latent, w_uk, w_uv, jnp.bfloat16(pool.cache), *args, scale=0.2)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    expected_out, expected_lse = prefill_numpy(
        *(np.float32(q), pool.latents, query_lens, np.float32(w_uk), np.float32(w_uv)), 0.2
    )
    np.testing.assert_allclose(np.float32(out), expected_out, atol=0.1)
    np.testing.assert_allclose(lse, expected_lse, atol=0.05)


def test_prefill_in_two_parts_is_prefill_in_one():
    lens = [30, 12, 17]
    pool = make_pool(lens, page=16, dim=RANK + ROPE)
    q = normal(3, 30, HEADS, NOPE + ROPE)
    whole_latent = new_latents(pool.latents, lens, 30)
    whole, whole_lse = prefill(q, whole_latent, pool, lens)

    cache = jnp.full_like(pool.cache, jnp.nan)
    first = [18, 12, 16]  # row 1 is finished by the first part
    outs, lses, done = [], [], np.zeros(3, int)
    for part in (first, [n - a for n, a in zip(lens, first, strict=True)]):
        seq_lens = np.where(np.array(part) > 0, done + part, 0).astype(np.int32)
        latent, queries = (np.full((3, 18, *x.shape[2:]), np.nan) for x in (whole_latent, q))
        for b, new in enumerate(part):
            latent[b, :new] = whole_latent[b, done[b] : done[b] + new]
            queries[b, :new] = q[b, done[b] : done[b] + new]
        cache = mla.mla_cache_write(
            cache, latent, pool.tables, seq_lens, query_lens=np.array(part, np.int32)
        )
        out, lse = prefill(queries, latent, pool, part, lens=seq_lens, cache=cache)
        outs.append(out)
        lses.append(lse)
        done += part
    for b, (a, n) in enumerate(zip(first, lens, strict=True)):
        joined = np.concatenate([outs[0][b, :a], outs[1][b, : n - a]])
        np.testing.assert_allclose(joined, whole[b, :n], atol=2e-5)
        joined = np.concatenate([lses[0][b, :a], lses[1][b, : n - a]])
        np.testing.assert_allclose(joined, whole_lse[b, :n], atol=2e-5)


def test_prefill_gradients_are_never_nan_and_are_those_of_one_causal_attention():
    lens, query_lens = [5, 3, 0], [5, 3, 0]
    pool = make_pool(lens, page=16, dim=RANK + ROPE)
    q, latent = normal(3, 5, HEADS, NOPE + ROPE), new_latents(pool.latents, query_lens, 5)
    q[1, 3:], q[2] = np.nan, np.nan
    real = np.arange(5) < np.array(lens)[:, None]
    weight = normal(3, 5, HEADS, VALUES, seed=6)

    def ours(q, latent, w_uk, w_uv, cache):
        args = (cache, pool.tables, pool.lens, np.array(query_lens, np.int32))
        out, _ = mla.mla_prefill(q, latent, w_uk, w_uv, *args, scale=0.2)
        return (out * weight).sum()

    def naive(q, latent, w_uk, w_uv):
        k = jnp.einsum("btr,hnr->bthn", latent[..., :RANK], w_uk)
        k_pe = jnp.broadcast_to(latent[:, :, None, RANK:], (3, 5, HEADS, ROPE))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.concatenate([k, k_pe], -1)) * 0.2
        scores = jnp.where(np.tril(np.ones((5, 5), bool)), scores, -1e9)
        v = jnp.einsum("btr,hrv->bthv", latent[..., :RANK], w_uv)
        out = jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(scores, -1), v)
        return (out * weight * real[:, :, None, None]).sum()

    got = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3, 4)))(q, latent, W_UK, W_UV, pool.cache)
    clean = (np.where(real[..., None, None], q, 0), np.where(real[..., None], latent, 0))
    expected = jax.jit(jax.grad(naive, argnums=(0, 1, 2, 3)))(*clean, W_UK, W_UV)
    for a, b in zip(got[:4], expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert not np.asarray(got[4]).any()


@pytest.mark.parametrize("block", [16, 1024])
def test_rows_in_lines_are_what_they_are_by_themselves(block):
    """Rows of several lines, of one, and of none, with prefixes of several pages and without."""
    lens, query_lens, tokens = [40, 5, 9, 0, 70], [11, 5, 1, 0, 8], 4
    pool = make_pool(lens, page=16, dim=RANK + ROPE, beyond=-1)
    q = normal(5, 12, HEADS, NOPE + ROPE)
    latent = new_latents(pool.latents, query_lens, 12)
    alone, alone_lse = prefill(q, latent, pool, query_lens)

    lines = [row for row, new in enumerate(query_lens) for _ in range(-(-new // tokens))] + [5, 5]
    places = {row: lines.index(row) for row in lines}
    packed = [np.full((len(lines), tokens, *x.shape[2:]), np.nan, x.dtype) for x in (q, latent)]
    for row, new in enumerate(query_lens):
        for whole, x in zip(packed, (q, latent), strict=True):
            flat = whole.reshape(-1, *whole.shape[2:])
            flat[places.get(row, 0) * tokens :][:new] = x[row, :new]
    out, lse = prefill(*packed, pool, query_lens, lines=np.array(lines), block=block)
    seen = np.zeros(len(lines) * tokens, bool)
    for row, new in enumerate(query_lens):
        first = places.get(row, 0) * tokens
        seen[first : first + new] = True
        for got, wanted in ((out, alone), (lse, alone_lse)):
            got = np.asarray(got).reshape(-1, *got.shape[2:])[first : first + new]
            np.testing.assert_allclose(got, wanted[row, :new], rtol=2e-5, atol=2e-5)
    assert not np.asarray(out).reshape(len(seen), -1)[~seen].any()
    assert np.isneginf(np.asarray(lse).reshape(len(seen), -1)[~seen]).all()
