"""`gqa_decode` of XLA against float64 NumPy, over caches poisoned wherever a row may not look."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa
from jaxattn.arena import Arena
from jaxattn.core.layer_index import LayerIndex
from jaxattn.ops.gqa.decode import DECODE_BLOCK
from tests.helpers.at_once import at_once
from tests.helpers.draws import normal
from tests.helpers.gqa_reference import (
    BEYOND,
    assert_close,
    assert_same_bits,
    attend_numpy,
    make_pool,
)

decode = functools.partial(gqa.gqa_decode, implementation="xla", layer=1)
POISONS = (np.nan, np.inf, -np.inf, 3e38)


# values


@pytest.mark.sampled
@pytest.mark.parametrize(
    "heads, kv_heads, q_len, page",
    [
        *((1, 1, 1, 16), (2, 1, 2, 16), (6, 2, 8, 32), (4, 1, 3, 64), (10, 2, 1, 16)),
        *((6, 1, 7, 16), (28, 4, 4, 16), (16, 2, 4, 7), (12, 1, 5, 16), (16, 1, 4, 128)),
    ],
)
def test_decode_is_attention_of_each_group_to_its_own_head(heads, kv_heads, q_len, page):
    lens = [0, 1, page - 1, page, page + 1, 2 * page + 3]
    pool = make_pool(
        lens, page=page, kv_heads=kv_heads, dim=8,
        poison=POISONS[heads % 4], beyond=BEYOND[q_len % 2],
    )  # fmt: skip
    q = normal(len(lens), q_len, heads, 8, scale=2)
    found = decode(q, pool.cache, pool.tables, pool.lens)
    assert found[0].dtype == q.dtype and found[1].dtype == jnp.float32
    assert_close(found, attend_numpy(q, pool.keys, pool.values))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 0.01), ("float16", 2e-3)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_in_each_dtype(dtype, atol, dim):
    pool = make_pool([5, 64, 0, 97], page=32, kv_heads=2, dim=dim)
    keys, values = ([np.float32(jnp.asarray(x, dtype)) for x in of] for of in pool[3:])
    q = np.float32(jnp.asarray(normal(4, 2, 16, dim), dtype))
    cache = jnp.asarray(pool.cache, dtype)
    found = decode(jnp.asarray(q, dtype), cache, pool.tables, pool.lens)
    assert found[0].dtype == dtype and found[1].dtype == jnp.float32
    out, lse = attend_numpy(q, keys, values)
    np.testing.assert_allclose(np.float32(found[0]), out, atol=atol, rtol=atol)
    np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=1e-5)


def test_rows_longer_than_a_block_of_pages():
    block = DECODE_BLOCK
    lens = [block - 1, 0, block, block + 1, 3, 2 * block + 70]
    pool = make_pool(lens, page=64, kv_heads=2, dim=8)
    q = normal(6, 2, 4, 8, scale=3)
    for window in (None, 40, block + 1):
        found = decode(q, pool.cache, pool.tables, pool.lens, window=window)
        assert_close(found, attend_numpy(q, pool.keys, pool.values, window=window), atol=3e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 200])
def test_a_window_counts_the_token_itself_and_nothing_left_of_it_is_read(window, q_len):
    lens = [0, 1, window - 1, window, window + 1, 50, 97]
    unread = [max(n - q_len + 1 - window, 0) for n in lens]
    pool = make_pool(lens, page=16, kv_heads=2, dim=8, unread=unread, beyond=BEYOND[q_len % 2])
    q = normal(len(lens), q_len, 4, 8, scale=2)
    # A table is checked where it is known: pages left of a window are known to no one here.
    step = jax.jit(functools.partial(decode, window=window))
    found = step(q, pool.cache, pool.tables, pool.lens)
    assert_close(found, attend_numpy(q, pool.keys, pool.values, window=window))


def test_a_window_as_long_as_the_rows_changes_no_bit():
    pool = make_pool([30, 64, 7], page=16, kv_heads=2, dim=8)
    q = normal(3, 2, 4, 8)
    plain = decode(q, pool.cache, pool.tables, pool.lens)
    jax.tree.map(assert_same_bits, plain, decode(q, pool.cache, pool.tables, pool.lens, window=64))


@pytest.mark.slow_cases(
    reason="a sum that wraps in the kernel; found by the same in XLA and windows of the kernel too"
)
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu_interpret", marks=pytest.mark.slow)]
)
def test_positions_plus_the_largest_window_do_not_wrap(implementation):
    pool = make_pool([0, 30, 7], page=16, kv_heads=1, dim=64)
    q = normal(3, 4, 4, 64).astype(jnp.bfloat16)
    cache = jnp.asarray(pool.cache, jnp.bfloat16)
    given = q, cache, pool.tables, pool.lens
    plain = at_once(decode, *given, implementation=implementation)
    for window in (2**31 - 1, 2**40):
        wide = at_once(decode, *given, window=window, implementation=implementation)
        jax.tree.map(assert_same_bits, plain, wide)


@pytest.mark.parametrize("sink", [-np.inf, -30.0, 0.5, 30.0])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_sink_takes_part_once_and_is_neither_scaled_nor_capped(sink, soft_cap):
    lens = [0, 1, 33, DECODE_BLOCK + 70]
    pool = make_pool(lens, page=16, kv_heads=2, dim=8)
    q, sinks = normal(4, 4, 6, 8, scale=2), np.full(6, sink, np.float32)
    sinks[::2] += 1
    given = dict(window=DECODE_BLOCK, scale=0.7, soft_cap=soft_cap, sinks=sinks)
    found = decode(q, pool.cache, pool.tables, pool.lens, **given)
    assert_close(found, attend_numpy(q, pool.keys, pool.values, **given), atol=3e-5)


def test_a_gate_multiplies_by_its_sigmoid_and_is_not_read_at_padding():
    pool = make_pool([0, 20, 5, 1], page=16, kv_heads=2, dim=8)
    q, gate = normal(4, 2, 4, 8), normal(4, 2, 4, 8, seed=3, scale=3)
    gate[1, 0, 0, :4] = [0, np.inf, -np.inf, 100]
    gate[0], gate[3, 0] = np.nan, np.inf
    found = decode(q, pool.cache, pool.tables, pool.lens, gate=gate)
    with np.errstate(over="ignore"):
        assert_close(found, attend_numpy(q, pool.keys, pool.values, gate=gate))
    plain = decode(q, pool.cache, pool.tables, pool.lens)[0]
    half = decode(q, pool.cache, pool.tables, pool.lens, gate=np.zeros_like(gate))[0]
    np.testing.assert_array_equal(half, np.asarray(plain) / 2)


@pytest.mark.parametrize("offset", [-6e4, 3e4])
def test_no_score_is_taken_for_a_mask(offset):
    """Every score is near `offset`: what stands for a masked key must be below any."""
    pool = make_pool([40, 3], page=16, kv_heads=1, dim=8)
    pool.cache[..., 0, :, :, 0] = 1.0
    for keys in pool.keys:
        keys[..., 0] = 1.0
    q = normal(2, 2, 3, 8)
    q[..., 0] = offset
    found = decode(q, pool.cache, pool.tables, pool.lens, scale=1.0)
    out, lse = attend_numpy(q, pool.keys, pool.values, scale=1.0)
    np.testing.assert_allclose(found[0], out, atol=0.02)  # float32 has 4e-3 between such scores
    np.testing.assert_allclose(found[1], lse, rtol=1e-6)


# rows


def test_rows_with_fewer_new_tokens_give_them_first():
    lens, new = [30, 17, 9, 2, 0], np.array([4, 1, 0, 3, 2], np.int32)
    pool = make_pool(lens, page=16, kv_heads=2, dim=8)
    q = normal(5, 4, 4, 8)
    for b in range(5):
        q[b, new[b] :] = np.nan
    found = decode(q, pool.cache, pool.tables, pool.lens, query_lens=new, window=5)
    expected = attend_numpy(q, pool.keys, pool.values, query_lens=new, window=5)
    assert_close(found, expected)
    assert np.isneginf(np.asarray(found[1])[3, 0]).all()  # its position would be -1


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"sinks": np.ones(4, np.float32)}])
def test_a_nan_that_a_row_owns_stays_in_that_row_and_is_not_hidden(options):
    pool = make_pool([20, 20, 20], page=16, kv_heads=2, dim=8)
    q = normal(3, 1, 4, 8)
    clean = decode(q, pool.cache, pool.tables, pool.lens, **options)
    for part in (0, 1):
        cache = pool.cache.copy()
        cache[1, pool.tables[1, 1], part, 2, 0] = np.nan
        out, lse = decode(q, cache, pool.tables, pool.lens, **options)
        assert np.isnan(out[1, 0, :2]).all() and np.isfinite(out[1, 0, 2:]).all()
        for row in (0, 2):
            assert_same_bits(out[row], clean[0][row])
            assert_same_bits(lse[row], clean[1][row])


@pytest.mark.parametrize("options", [{}, {"sinks": np.ones(4, np.float32), "window": 20}])
def test_a_traced_row_that_does_not_fit_is_padding(options):
    pool = make_pool([20, 20, 20, 20], page=16, kv_heads=2, dim=8)
    q = normal(4, 2, 4, 8)
    step = jax.jit(functools.partial(decode, **options))
    lens = np.array([20, -7, 3 * 16 + 1, -(2**31)], np.int32)
    out, lse = step(q, pool.cache, pool.tables, lens)
    assert np.asarray(out)[0].any()
    assert not np.asarray(out)[1:].any() and np.isneginf(np.asarray(lse)[1:]).all()


def test_a_traced_page_that_is_not_there_reads_as_nan_in_its_row_alone():
    pool = make_pool([20, 20], page=16, kv_heads=2, dim=8)
    q, step = normal(2, 1, 4, 8), jax.jit(decode)
    whole = step(q, pool.cache, pool.tables, pool.lens)[0]
    for page in (-1, pool.cache.shape[1], 2**31 - 1):
        tables = pool.tables.copy()
        tables[1, 0] = page
        out = step(q, pool.cache, tables, pool.lens)[0]
        assert np.isnan(out[1]).all()
        assert_same_bits(out[0], whole[0])


def test_pages_in_two_rows_are_a_shared_prefix():
    pool = make_pool([40, 37], page=16, kv_heads=2, dim=8)
    tables = pool.tables.copy()
    tables[1, :2] = tables[0, :2]
    keys, values = (
        [of[0], np.concatenate([of[0][:32], of[1][32:]])] for of in (pool.keys, pool.values)
    )
    q = normal(2, 1, 4, 8)
    assert_close(decode(q, pool.cache, tables, pool.lens), attend_numpy(q, keys, values))


def test_every_form_of_layer_is_one_number():
    pool = make_pool([20, 5], page=16, kv_heads=2, dim=8)
    q = normal(2, 1, 4, 8)
    plain = decode(q, pool.cache, pool.tables, pool.lens)
    one = functools.partial(gqa.gqa_decode, q, block_tables=pool.tables, seq_lens=pool.lens)
    traced = jax.jit(lambda n: one(kv_cache=pool.cache, layer=n))(1)
    of = jax.jit(lambda n: one(kv_cache=pool.cache, layer=LayerIndex(n, 2, 1)))(0)
    for other in (traced, of, one(kv_cache=pool.cache[1], layer=None)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), plain, other)


def test_decode_is_differentiable_past_poison():
    pool = make_pool([20, 0, 5], page=16, kv_heads=2, dim=8)
    q, sinks, gate = normal(3, 2, 4, 8), np.zeros(4, np.float32), normal(3, 2, 4, 8, seed=4)

    def loss(q, cache, sinks, gate):
        out, lse = decode(
            q, cache, pool.tables, pool.lens, sinks=sinks, gate=gate, window=7, soft_cap=3.0
        )
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, pool.cache, sinks, gate)
    for grad in grads:
        assert np.isfinite(grad).all() and np.asarray(grad).any()
    step = 1e-2
    up, down = (loss(q, pool.cache, sinks + sign * step, gate) for sign in (1, -1))
    np.testing.assert_allclose(grads[2].sum(), (up - down) / (2 * step), rtol=2e-3)


# arguments


@pytest.mark.parametrize("head_dim, heads, kv_heads", [(128, 32, 8), (128, 64, 8), (64, 64, 8)])
@pytest.mark.parametrize("batch", [1, 16, 255, 256, 264, 2048])
def test_partial_results_grow_with_neither_rows_nor_context(batch, head_dim, heads, kv_heads):
    """SGLang kept 16.25 GiB of them for 2,048 rows, 32 heads over 8, and 131,072 tokens."""
    for tokens in (1024, 25_432, 131_072):
        spec = gqa.scratch(
            batch=batch, q_len=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            max_pages=-(-tokens // 64), page_size=64,
        )  # fmt: skip
        out = batch * heads * head_dim * 2
        assert spec.nbytes - out <= 2 * 2**20


def test_an_arena_comes_back():
    pool = make_pool([20, 5], page=16, kv_heads=2, dim=8)
    spec = gqa.scratch(
        batch=2, q_len=1, num_heads=4, num_kv_heads=2, head_dim=8, max_pages=3, page_size=16
    )
    q = normal(2, 1, 4, 8)
    out, lse, arena = decode(q, pool.cache, pool.tables, pool.lens, arena=Arena.allocate(spec))
    assert isinstance(arena, Arena)
    jax.tree.map(assert_same_bits, (out, lse), decode(q, pool.cache, pool.tables, pool.lens))
    with pytest.raises(ValueError, match="gqa.scratch: num_kv_heads must be a positive integer"):
        gqa.scratch(
            batch=2, q_len=1, num_heads=4, num_kv_heads=0, head_dim=8, max_pages=3, page_size=16
        )
    shape = dict(q_len=1, num_heads=5, num_kv_heads=2, head_dim=8, max_pages=3, page_size=16)
    for op in (
        functools.partial(gqa.scratch, batch=2),
        functools.partial(gqa.decode_schedule, [3]),
    ):
        with pytest.raises(ValueError, match="num_heads=5 must be a multiple of num_kv_heads=2"):
            op(**shape)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=normal(2, 1, 5, 8)), ValueError, "H must be a multiple of Hk, got H = 5 of q"),
        (dict(q=normal(2, 1, 4, 9)), ValueError, r"D = 8, but q \[B, S, H, D\] has D = 9"),
        (dict(layer=None), ValueError, r"kv_cache \(3, .* is a stack of layers; give layer="),
        (dict(layer=3), ValueError, "layer=3 is out of range: kv_cache"),
        (dict(layer=1.0), TypeError, "layer must be an integer"),
        (dict(kv_cache=normal(3, 5, 3, 16, 2, 8)), ValueError, r"must be \[L, N, 2, C, Hk, D\]"),
        (dict(kv_cache=np.zeros((3, 5, 2, 16, 2, 8), np.uint8)), TypeError, "kv_cache must be bfl"),
        (dict(seq_lens=[20, 99]), ValueError, "seq_lens .* holds 99"),
        (dict(block_tables=[[9, 9, 9]] * 2), ValueError, "holds page 9"),
        (dict(query_lens=[1, 2]), ValueError, "query_lens .* holds 2"),
        (dict(window=0), ValueError, "window counts the token itself and must be at least 1"),
        (dict(window=2.5), TypeError, "window must be a Python integer or None, got float"),
        (dict(soft_cap=0.0), ValueError, "soft_cap must be positive, got 0.0"),
        (dict(scale=-1.0), ValueError, "scale must be positive and finite"),
        (dict(scale=1e39), ValueError, "scale must be positive and finite"),
        (dict(scale=10**400), ValueError, "scale must be positive and finite"),
        (
            dict(soft_cap=1e-40),
            ValueError,
            "got 1e-40; use None for no cap, .* 1.2e-38",
        ),
        (dict(soft_cap=1e39), ValueError, r"soft_cap must be finite, got 1e\+39"),
        (dict(sinks=normal(3)), ValueError, r"sinks \[H\] has shape \(3,\)"),
        (dict(sinks=normal(4).astype(np.float16)), TypeError, "sinks must be float32"),
        (dict(gate=normal(2, 1, 4, 7)), ValueError, "gate .* has shape"),
        (dict(arena=7), TypeError, "arena must be an Arena"),
        (dict(schedule=7), TypeError, "schedule must be a result of gqa.decode_schedule, got int"),
        (
            dict(schedule=(5, 1, 4)),
            ValueError,
            "schedule is for window = 5, but this .* None",
        ),
        (
            dict(schedule=(None, 2, 4)),
            ValueError,
            "schedule is for S = 2, but this call has 1",
        ),
        (dict(schedule=(None, 1, 8)), ValueError, r"is for steps of 64 tokens = 2, .* has 1"),
        (dict(implementation="cuda"), ValueError, "unknown implementation='cuda'"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    pool = make_pool([20, 5], page=16, kv_heads=2, dim=8, beyond=0)
    given = dict(
        q=normal(2, 1, 4, 8), kv_cache=pool.cache, block_tables=pool.tables, seq_lens=pool.lens
    )
    if isinstance(change.get("schedule"), tuple):
        window, q_len, pages = change["schedule"]
        change = change | {
            "schedule": gqa.decode_schedule(
                pool.lens, q_len=q_len, num_heads=4, num_kv_heads=2, head_dim=8, window=window,
                max_pages=pages, page_size=16,
            )
        }  # fmt: skip
    with pytest.raises(error, match=f"gqa_decode: .*{message}|gqa_decode: {message}"):
        gqa.gqa_decode(**{**given, "layer": 1, **change})


@pytest.mark.slow(
    reason="a layer that is traced; found by the op's own schedule in "
    "kernels/gqa/decode/test_kernel, whose layer is traced, too"
)
def test_the_kernel_gives_what_xla_gives_of_a_traced_layer():
    """In the interpreter, by name; the layer is traced."""
    pool = make_pool([70, 0, 5], page=16, kv_heads=2, dim=64)
    cache = pool.cache.astype(jnp.bfloat16)
    q = normal(3, 1, 6, 64).astype(jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(layer, implementation):
        return gqa.gqa_decode(
            q, cache, pool.tables, pool.lens, layer=layer, implementation=implementation
        )

    (out, lse), (wanted, wanted_lse) = (run(1, name) for name in ("mosaic_gpu_interpret", "xla"))
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)
    np.testing.assert_allclose(
        out.astype(jnp.float32), wanted.astype(jnp.float32), atol=0.02, rtol=0.02
    )


def test_a_shape_without_a_kernel_is_refused_by_name():
    pool = make_pool([5], page=16, kv_heads=2, dim=8)
    with pytest.raises(NotImplementedError, match="gqa_decode: the kernel needs q in bfloat16"):
        gqa.gqa_decode(
            normal(1, 1, 4, 8), pool.cache, pool.tables, pool.lens, layer=1,
            implementation="mosaic_gpu_interpret",
        )  # fmt: skip
