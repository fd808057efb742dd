"""`mla_cache_write` writes new tokens and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from tests.helpers.draws import normal
from tests.helpers.mla_cases import assert_same_bits, make_pool


def write_numpy(cache, latent, tables, lens, query_lens):
    cache = cache.copy()
    for b, (n, new) in enumerate(zip(lens, query_lens, strict=True)):
        for t in range(min(new, latent.shape[1])):
            position = n - new + t
            if n > 0 and position >= 0 and 0 <= tables[b, position // cache.shape[1]] < len(cache):
                at = tables[b, position // cache.shape[1]], position % cache.shape[1]
                cache[at] = latent[b, t]
    return cache


@pytest.mark.parametrize("layer", [None, 1, "traced"])
@pytest.mark.parametrize("query_lens", [None, [4, 4, 0, 1, 3, 4]])
def test_cache_write_writes_the_new_tokens_and_nothing_else(query_lens, layer):
    lens = [4, 18, 9, 33, 0, 2]  # row 4 is padding; row 5 has two tokens without a position
    pool = make_pool(lens, page=16, dim=24, beyond=-1)
    latent = normal(6, 4, 24)
    latent[4] = np.nan
    expected = write_numpy(pool.cache, latent, pool.tables, pool.lens, query_lens or [4] * 6)
    given = None if query_lens is None else np.array(query_lens, np.int32)
    args = (latent, pool.tables, pool.lens)
    if layer is None:
        got = mla.mla_cache_write(pool.cache, *args, query_lens=given)
        assert_same_bits(got, expected)
        return
    stack = np.stack([pool.cache] * 3)
    write = functools.partial(mla.mla_cache_write, stack, *args, query_lens=given)
    if layer == "traced":
        got = jax.jit(lambda layer: write(layer=layer))(1)
    else:
        got = write(layer=layer)
    assert_same_bits(got, np.stack([pool.cache, expected, pool.cache]))


def test_cache_write_drops_pages_that_do_not_exist_and_casts_to_the_caches_dtype():
    cache = jnp.ones((3, 16, 8), jnp.bfloat16)
    tables = np.array([[-1], [2147480000], [1]], np.int32)
    write = jax.jit(mla.mla_cache_write)  # traced, or the pages would be refused
    got = write(cache, normal(3, 1, 8), tables, np.array([1, 1, 1], np.int32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[1, 0], jnp.asarray(normal(3, 1, 8)[2, 0], jnp.bfloat16))
    assert np.all(np.float32(got[0]) == 1) and np.all(np.float32(got[2]) == 1)
    assert np.all(np.float32(got[1, 1:]) == 1)


def test_written_tokens_are_what_decode_reads():
    pool = make_pool([3, 17, 20], page=16, dim=24)
    empty = np.full_like(pool.cache, np.nan)
    latent = np.full((3, 20, 24), np.nan, np.float32)
    for b, row in enumerate(pool.latents):
        latent[b, : len(row)] = row
    cache = mla.mla_cache_write(empty, latent, pool.tables, pool.lens, query_lens=pool.lens)
    assert_same_bits(cache, pool.cache)
