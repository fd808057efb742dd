"""What rows and calls share: pages, one arena, and the numbers of decode and of prefill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa
from jaxattn.arena import Arena
from tests.helpers.gqa_cases import (
    GQACase,
    assert_gqa_close,
    expected_shape,
    gqa_case,
    with_sinks_at_their_ends,
)
from tests.helpers.gqa_prefill_cases import prefill_case
from tests.helpers.kernel_cases import relative, slow_interpreted

on_both = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)


# Compiled once for all tests of the same shapes.
op = jax.jit(gqa.gqa_decode, static_argnames=("implementation", "window", "soft_cap"))


def attend(case: GQACase, implementation: str, **more):
    options = {**case.options, **more}
    return op(*case.args, layer=case.layer, implementation=implementation, **options)


def rows_of(case: GQACase, rows: list[int]) -> GQACase:
    at = jnp.asarray(rows)
    given = {"q": case.q[at], "block_tables": case.block_tables[at], "seq_lens": case.seq_lens[at]}
    return dataclasses.replace(case, **given)


@slow_interpreted("a page read for one row only; found by the engine's prefix cache too")
def test_a_prefix_whose_pages_two_rows_share(implementation):
    """flashinfer#725: two rows name the same pages, one of them in a page of its own after it."""
    case = gqa_case([150, 100, 20], dim=64, group=4)
    tables = case.block_tables.at[1, 0].set(case.block_tables[0, 0])
    case = dataclasses.replace(case, block_tables=tables)
    assert_gqa_close(case, *attend(case, implementation))


@on_both
@pytest.mark.parametrize("poison", [np.inf, -np.inf, 3e38])
def test_keys_and_values_that_no_row_owns_are_not_met(poison, implementation):
    """Infinities in the tail of the last page: 0 times one is NaN (flash-attention#1974)."""
    case = gqa_case([70, 0, 129], dim=64, group=5, q_len=2, sinks=True)
    out, lse = attend(case, implementation)
    cache = jnp.where(jnp.isnan(case.kv_cache), jnp.asarray(poison, jnp.bfloat16), case.kv_cache)
    found = attend(dataclasses.replace(case, kv_cache=cache), implementation)
    for one, other in zip(found, (out, lse), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@slow_interpreted(
    "a sink of -inf or 30; found by the same sinks of pieces that are merged and of windows in "
    "test_kernel, and by the same test on a GPU, too"
)
def test_a_sink_at_its_ends(implementation):
    """The softmax without it, and one in which it has nearly all."""
    case = gqa_case([70, 200, 0], dim=64, group=4, sinks=True)
    with_sinks_at_their_ends(case)
    assert_gqa_close(case, *attend(case, implementation))


@slow_interpreted(
    "regions that depend on the batch; found by a poisoned arena and the engine's buckets too"
)
def test_one_arena_serves_batches_of_any_size_one_after_the_other(implementation):
    """Poisoned before, and full of a larger batch's results then."""
    large = gqa_case([130, 0, 70, 5, 64], dim=64, group=4)
    arena = Arena.allocate(gqa.scratch(batch=5, **expected_shape(large))).poison()
    for rows in ([0, 1, 2, 3, 4], [3, 0]):
        case = rows_of(large, rows)
        out, lse, arena = attend(case, implementation, arena=arena)
        assert_gqa_close(case, out, lse)
    arena.check(gqa.scratch(batch=5, **expected_shape(large)))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_repeated_is_a_prefill_of_the_same_tokens(dim):
    """A prompt of 130 tokens at once, by chunks of 1, 63 and 66, and its last 65 one by one."""
    count, page = 130, 64
    q, k, v = prefill_case([count], [count], dim=dim, kv_heads=2, group=4).new
    tables = jnp.asarray([[3, 1, 4]], jnp.int32)
    cache = jnp.full((1, 6, 2, page, 2, dim), jnp.nan, q.dtype)
    prefill = jax.jit(functools.partial(gqa.gqa_prefill, layer=0, implementation="mosaic_gpu"))
    decode = jax.jit(functools.partial(gqa.gqa_decode, layer=0, implementation="mosaic_gpu"))
    lens = lambda n: jnp.asarray([n], jnp.int32)  # noqa: E731
    whole, whole_lse = prefill(q, k, v, cache, tables, lens(count), lens(count))
    done = 0
    for size in (1, 63, 66):
        part = slice(done, done + size)
        done += size
        cache = gqa.gqa_cache_write(cache, k[:, part], v[:, part], tables, lens(done), layer=0)
        fresh = (x[:, part] for x in (q, k, v))
        out, lse = prefill(*fresh, cache, tables, lens(done), lens(size))
        assert relative(out, np.asarray(whole[:, part], np.float64)) < 4e-3
        np.testing.assert_allclose(lse, whole_lse[:, part], atol=2e-5)
    for token in range(65, count):
        out, lse = decode(q[:, token : token + 1], cache, tables, lens(token + 1))
        expected = np.asarray(whole[:, token : token + 1], np.float64)
        assert relative(out, expected) < 8e-3
        np.testing.assert_allclose(lse, whole_lse[:, token : token + 1], atol=2e-5)
