"""MLA decode: padding, poison, and rows that leave each other alone."""

import functools

import jax
import numpy as np
import pytest

from tests.helpers.draws import normal
from tests.helpers.mla_cases import BEYOND, assert_same_bits, decode_numpy, make_pool
from tests.ops.mla.test_decode import POISONS, decode


def padded_run(q, pool, *, rows, fill, beyond, width):
    """`rows` says where the pool's rows stand among `fill`ed padding rows of the bucket."""
    batch = 128
    queries = np.full((batch, *q.shape[1:]), fill, np.float32)
    tables = np.full((batch, width), beyond, np.int32)
    lens = np.zeros(batch, np.int32)
    queries[rows], lens[rows] = q, pool.lens
    tables[rows, : pool.tables.shape[1]] = pool.tables
    cache = np.where(np.isnan(pool.cache), np.float32(fill), pool.cache)
    return decode(queries, cache, tables, lens, scale=0.3, kv_lora_rank=32)


@pytest.mark.sampled
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("real", [1, 64])
def test_padding_rows_are_zero_and_real_rows_keep_their_bits(real, q_len):
    rng = np.random.default_rng(0)
    pool = make_pool(rng.integers(4, 40, real).tolist(), page=16, dim=40)
    q = normal(real, q_len, 3, 40)
    run = functools.partial(padded_run, q, pool, width=pool.tables.shape[1] + 1)
    order = rng.permutation(128)
    rows, others = order[:real], order[real:]
    first = run(rows=rows, fill=0.0, beyond=0)
    for fill, beyond in zip((*POISONS, 1.0), (*BEYOND, *BEYOND, 3), strict=True):
        out, lse = run(rows=rows, fill=fill, beyond=beyond)
        assert_same_bits(out[others], np.zeros_like(out[others]))
        assert np.isneginf(lse[others]).all()
        assert_same_bits(out[rows], first[0][rows])
        assert_same_bits(lse[rows], first[1][rows])
    expected_out, _ = decode_numpy(q, pool.latents, 0.3, 32)
    np.testing.assert_allclose(first[0][rows], expected_out, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_row_does_not_own_changes_no_bit(seed):
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, 70, 6).tolist()
    q = normal(6, 2, 3, 24, seed=seed)
    results = []
    for poison in (0.0, POISONS[seed % 4]):
        pool = make_pool(lens, page=16, dim=24, seed=seed, poison=poison, width=5)
        cache, tables = np.pad(pool.cache, ((0, 33 - len(pool.cache)), (0, 0), (0, 0))), pool.tables
        if poison:
            tail = np.arange(5) >= -(-pool.lens // 16)[:, None]
            tables[tail] = rng.choice([-1, 0, 32, 33, 2**31 - 1, -(2**31)], tail.sum())
        results.append(decode(q, cache, tables, pool.lens, scale=0.3, kv_lora_rank=16))
    jax.tree.map(assert_same_bits, *results)
    expected_out, _ = decode_numpy(q, pool.latents, 0.3, 16)
    np.testing.assert_allclose(results[0][0], expected_out, atol=1e-5)


def test_a_batch_of_padding_alone_is_zero():
    out, lse = decode(
        np.full((3, 2, 4, 24), np.nan, np.float32),
        np.full((5, 16, 24), np.nan, np.float32),
        np.full((3, 70), -1, np.int32),
        np.zeros(3, np.int32),
        scale=1.0,
        kv_lora_rank=16,
    )
    assert_same_bits(out, np.zeros_like(out))
    assert np.isneginf(lse).all()


def test_a_longer_neighbor_does_not_change_a_rows_bits():
    """It makes the loop read more blocks, all masked for the short row."""
    pool = make_pool([70, 1000], page=64, dim=24)
    q = normal(2, 1, 3, 24)
    run = functools.partial(decode, q, pool.cache, pool.tables, scale=0.5, kv_lora_rank=16)
    beside, alone = run(pool.lens), run(np.array([70, 0], np.int32))
    assert_same_bits(beside[0][0], alone[0][0])
    assert_same_bits(beside[1][0], alone[1][0])


def test_a_nan_of_a_row_stays_in_it_and_is_not_hidden():
    pool = make_pool([20, 33, 17], page=16, dim=24)
    q = normal(3, 2, 2, 24)
    run = functools.partial(decode, scale=0.3, kv_lora_rank=16)
    clean, _ = run(q, pool.cache, pool.tables, pool.lens)
    cache = pool.cache.copy()
    cache[pool.tables[1, 0], 5, 3] = np.nan
    out, lse = run(q, cache, pool.tables, pool.lens)
    assert np.isnan(out[1]).all() and np.isnan(lse[1]).all()
    assert_same_bits(out[0], clean[0])
    assert_same_bits(out[2], clean[2])
    q[2, 1, 0, 7] = np.nan
    out, _ = run(q, pool.cache, pool.tables, pool.lens)
    expected = np.zeros((3, 2, 2), bool)
    expected[2, 1, 0] = True
    np.testing.assert_array_equal(np.isnan(out).all(-1), expected)
    np.testing.assert_array_equal(np.isnan(out).any(-1), expected)


@pytest.mark.parametrize("page_id", [-1, 10**6])
def test_a_page_that_does_not_exist_is_not_another_rows_page(page_id):
    pool = make_pool([20, 33], page=16, dim=24)
    pool.tables[0, 1] = page_id
    q = normal(2, 1, 2, 24)
    step = jax.jit(functools.partial(decode, scale=0.3, kv_lora_rank=16))
    out, _ = step(q, pool.cache, pool.tables, pool.lens)
    assert np.isnan(out[0]).all()
    np.testing.assert_allclose(out[1], decode_numpy(q, pool.latents, 0.3, 16)[0][1], atol=1e-5)
