"""MLA decode against float64 NumPy written token by token, over caches poisoned wherever a row may
not look: every page that no row owns, the tails of pages, and the tails of block tables.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxattn import mla
from jaxattn.arena import Arena, ArenaError
from jaxattn.ops.mla.decode import DECODE_BLOCK
from tests.helpers.draws import normal
from tests.helpers.mla_cases import (
    BEYOND,
    assert_same_bits,
    attend,
    decode_numpy,
    make_pool,
    prefill_numpy,
)

POISONS = (np.nan, np.inf, -np.inf, 3e38)
decode = functools.partial(mla.mla_decode, implementation="xla")


# mla_decode: values


@pytest.mark.sampled
@pytest.mark.parametrize(
    "heads, q_len, page",
    [
        *((1, 1, 64), (1, 2, 64), (3, 4, 64), (20, 2, 64), (64, 1, 64), (64, 4, 64)),
        *((1, 4, 16), (3, 1, 16), (20, 2, 7)),
    ],
)
def test_decode_is_attention_in_the_latent(heads, q_len, page):
    rank, rope = 32, 8
    poison = POISONS[(heads + q_len) % len(POISONS)]
    lens = [0, 1, page - 1, page, page + 1, 2 * page + 3]
    beyond = BEYOND[q_len % 2]
    pool = make_pool(lens, page=page, dim=rank + rope, poison=poison, beyond=beyond)
    q = normal(len(lens), q_len, heads, rank + rope)
    out, lse = decode(q, pool.cache, pool.tables, pool.lens, scale=0.3, kv_lora_rank=rank)
    expected_out, expected_lse = decode_numpy(q, pool.latents, 0.3, rank)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    unseen = np.isneginf(expected_lse)
    assert not np.asarray(out)[unseen].any()
    # Length 1 with more queries: only the last sees the key, and sees nothing else.
    assert unseen[1].all(axis=-1).tolist() == [True] * (q_len - 1) + [False]
    np.testing.assert_allclose(out[1, -1], np.tile(pool.latents[1][0, :rank], (heads, 1)))


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 0.01)])
def test_decode_at_deepseeks_dims(dtype, atol):
    pool = make_pool([5, 64, 0, 130], page=64, dim=576)
    pool = pool._replace(latents=[np.float32(jnp.asarray(x, dtype)) for x in pool.latents])
    q = np.float32(jnp.asarray(normal(4, 2, 16, 576), dtype))
    scale = 192**-0.5
    out, lse = decode(
        jnp.asarray(q, dtype), jnp.asarray(pool.cache, dtype), pool.tables, pool.lens, scale=scale
    )
    assert out.dtype == dtype and lse.dtype == jnp.float32
    expected_out, expected_lse = decode_numpy(q, pool.latents, scale, 512)
    np.testing.assert_allclose(np.float32(out), expected_out, atol=atol, rtol=atol)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_decode_over_many_blocks_of_pages():
    block = DECODE_BLOCK
    lens = [block - 1, 0, block, block + 1, 3, 2 * block + 70]
    pool = make_pool(lens, page=64, dim=24, width=2 * block // 64 + 3)
    q = normal(6, 2, 3, 24, scale=3)
    out, lse = decode(q, pool.cache, pool.tables, pool.lens, scale=0.5, kv_lora_rank=16)
    expected_out, expected_lse = decode_numpy(q, pool.latents, 0.5, 16)
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


@pytest.mark.parametrize("with_arena", [False, True])
def test_tokens_that_all_see_the_whole_row_are_heads_of_one(with_arena):
    """As the docstring says of queries that are not causal."""
    batch, q_len, heads, rank, dim = 4, 3, 5, 16, 24
    pool = make_pool([1, 0, 70, 33], page=16, dim=dim)
    q = normal(batch, q_len, heads, dim, scale=3)
    sizes = dict(batch=batch, q_len=1, num_heads=q_len * heads, max_pages=pool.tables.shape[1])
    spec = mla.scratch(**sizes, page_size=16, kv_lora_rank=rank, dtype=q.dtype)
    given = dict(arena=Arena.allocate(spec)) if with_arena else {}
    out, lse, *_ = decode(
        q.reshape(batch, 1, q_len * heads, dim), pool.cache, pool.tables, pool.lens,
        scale=0.3, kv_lora_rank=rank, **given,
    )  # fmt: skip
    out, lse = out.reshape(batch, q_len, heads, rank), lse.reshape(batch, q_len, heads)
    expected, expected_lse = np.zeros(out.shape), np.full(lse.shape, -np.inf)
    for b, s, h in np.ndindex(lse.shape):
        seen = pool.latents[b]
        expected[b, s, h], expected_lse[b, s, h] = attend(q[b, s, h], seen, seen[:, :rank], 0.3)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    assert np.isneginf(lse[1]).all() and not np.asarray(out)[1].any()


def test_absorbed_decode_is_unabsorbed_attention():
    heads, nope, rank, rope, values = 3, 12, 16, 8, 10
    pool = make_pool([7, 40, 0, 2], page=16, dim=rank + rope)
    w_uk, w_uv = normal(heads, nope, rank, seed=2), normal(heads, rank, values, seed=3)
    q = normal(4, 2, heads, nope + rope)
    absorbed = mla.absorb_query(q[..., :nope], w_uk)
    assert absorbed.shape == (4, 2, heads, rank)
    out, lse = decode(
        jnp.concatenate([absorbed, q[..., nope:]], -1),
        pool.cache,
        pool.tables,
        pool.lens,
        scale=0.1,
        kv_lora_rank=rank,
    )
    out = mla.absorb_output(out, w_uv)
    # Row 3 has two tokens and two queries; row 2 is padding.
    query_lens = np.minimum(pool.lens, 2)
    expected_out, expected_lse = prefill_numpy(q, pool.latents, query_lens, w_uk, w_uv, 0.1)
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


def test_absorption_keeps_bfloat16_and_accumulates_wider():
    w_uk, out = jnp.ones((2, 300, 4), jnp.bfloat16), jnp.ones((1, 1, 2, 300), jnp.bfloat16)
    # Summed in bfloat16, 300 ones stop at 256.
    absorbed = mla.absorb_query(jnp.ones((1, 1, 2, 300), jnp.bfloat16), w_uk)
    values = mla.absorb_output(out, jnp.ones((2, 300, 4), jnp.bfloat16))
    for x in (absorbed, values):
        assert x.dtype == jnp.bfloat16 and np.all(np.float32(x) == 300)


# mla_decode: ragged queries, page sizes, dims


@pytest.mark.parametrize("page", [1, 32, 128])
def test_ragged_queries_over_any_page_size_in_float16(page):
    rank, dim = 16, 24
    # Row 0 is padding, row 1 has fewer tokens than queries, and row 5 has no new ones.
    lens, new = [0, 1, page, page + 1, 2 * page + 3, page], [2, 3, 1, 2, 3, 0]
    pool = make_pool(lens, page=page, dim=dim, beyond=-1)
    latents = [np.float16(x) for x in pool.latents]
    given = np.full((6, max(lens), dim), np.nan, np.float16)
    for b, row in enumerate(latents):
        given[b, : len(row)] = row
    empty = np.full(pool.cache.shape, np.nan, np.float16)
    cache = mla.mla_cache_write(empty, given, pool.tables, pool.lens, query_lens=pool.lens)
    assert_same_bits(cache, np.float16(pool.cache))

    q = np.float16(normal(6, 3, 2, dim))
    q[np.arange(3) >= np.array(new)[:, None]] = np.nan
    out, lse = decode(
        q,
        cache,
        pool.tables,
        pool.lens,
        query_lens=np.array(new, np.int32),
        scale=0.3,
        kv_lora_rank=rank,
    )
    assert out.dtype == jnp.float16
    expected_out, expected_lse = decode_numpy(q, latents, 0.3, rank, new)
    np.testing.assert_allclose(np.float32(out), expected_out, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    nothing = np.asarray(out)[np.isneginf(expected_lse)]
    assert_same_bits(nothing, np.zeros_like(nothing))


def test_ragged_queries_see_what_they_see_without_the_padding():
    pool = make_pool([20, 33, 5, 7], page=16, dim=24)
    new = np.array([2, 2, 2, 0], np.int32)
    q = normal(4, 3, 2, 24)
    q[np.arange(3) >= new[:, None]] = np.nan

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def ragged(q, new):
        out, lse = decode(
            q, pool.cache, pool.tables, pool.lens, query_lens=new, scale=0.3, kv_lora_rank=16
        )
        return out.sum(), (out, lse)

    grad, (out, lse) = ragged(q, new)
    kwargs = dict(scale=0.3, kv_lora_rank=16)
    alone, alone_lse = decode(q[:3, :2], pool.cache, pool.tables[:3], pool.lens[:3], **kwargs)
    np.testing.assert_allclose(out[:3, :2], alone, atol=1e-6)
    np.testing.assert_allclose(lse[:3, :2], alone_lse, atol=1e-6)
    assert not np.asarray(out)[3].any() and np.isneginf(lse[3]).all()
    assert np.isfinite(grad).all() and not np.asarray(grad)[np.isnan(q)].any()
    # Rows that all have S new tokens are the case without `query_lens`.
    full = np.nan_to_num(q)
    same = ragged(full, np.full(4, 3, np.int32))[1]
    jax.tree.map(assert_same_bits, same, decode(full, pool.cache, pool.tables, pool.lens, **kwargs))


@pytest.mark.parametrize("rank, rope", [(256, 64), (512, 32)])
def test_dims_that_the_kernel_has_no_code_for_run_in_xla(rank, rope):
    pool = make_pool([70, 3], page=64, dim=rank + rope)
    q = normal(2, 1, 3, rank + rope)
    args = (jnp.bfloat16(q), jnp.bfloat16(pool.cache), pool.tables, pool.lens)
    run = functools.partial(mla.mla_decode, *args, scale=0.1, kv_lora_rank=rank)
    with pytest.raises(NotImplementedError, match=f"kv_lora_rank={rank} with D={rank + rope}"):
        run(implementation="mosaic_gpu_interpret")
    out, lse = run()
    rounded = [np.float32(jnp.bfloat16(x)) for x in pool.latents]
    expected = decode_numpy(np.float32(args[0]), rounded, 0.1, rank)
    np.testing.assert_allclose(np.float32(out), expected[0], atol=0.02)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5)


# mla_decode: stacks, aliasing, arena, dispatch


def test_a_stack_with_its_layer_is_that_layers_pages():
    pool = make_pool([20, 33, 0], page=16, dim=24)
    stack = np.full((3, *pool.cache.shape), np.nan, np.float32)
    stack[2] = pool.cache
    q = normal(3, 2, 2, 24)
    run = functools.partial(decode, scale=0.3, kv_lora_rank=16)
    plain = run(q, pool.cache, pool.tables, pool.lens)
    on_stack = functools.partial(run, q, stack, pool.tables, pool.lens)
    traced = jax.jit(lambda layer: on_stack(layer=layer))
    for layer in (2, np.int64(2), jnp.int32(2)):
        for got in (on_stack(layer=layer), traced(layer)):
            jax.tree.map(assert_same_bits, got, plain)
    # Nothing as large as a layer is taken out of the stack.
    one_layer = f"[{','.join(map(str, pool.cache.shape))}]"
    assert one_layer not in str(jax.make_jaxpr(lambda layer: on_stack(layer=layer))(2))


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_a_scanned_step_copies_no_cache_and_needs_no_more_for_more_layers(op):
    batch, q_len, heads, rank, rope = 3, 1 if op == "decode" else 8, 2, 32, 8
    pages, page, width = 400, 16, 80
    spec = mla.scratch(
        batch=batch,
        q_len=q_len,
        num_heads=heads,
        max_pages=1,
        kv_lora_rank=rank,
        dtype=jnp.float32,
    )

    def step(kv_cache, arena, x, tables, lens, layers):
        def one(carry, layer):
            kv_cache, arena, x = carry
            latent = x[:, :, 0]
            kv_cache = mla.mla_cache_write(kv_cache, latent, tables, lens, layer=layer)
            if op == "decode":
                out, _, arena = decode(
                    x,
                    kv_cache,
                    tables,
                    lens,
                    scale=1.0,
                    layer=layer,
                    kv_lora_rank=rank,
                    arena=arena,
                )
            else:
                w_uk, w_uv = jnp.ones((heads, rank, rank)), jnp.ones((heads, rank, rank))
                new = jnp.full_like(lens, q_len)
                out, _ = mla.mla_prefill(
                    x, latent, w_uk, w_uv, kv_cache, tables, lens, new, scale=1.0, layer=layer,
                    block=256,
                )  # fmt: skip
            return (kv_cache, arena, jnp.pad(out, ((0, 0),) * 3 + ((0, rope),))), None

        return lax.scan(one, (kv_cache, arena, x), layers)[0]

    temps = []
    for layers in (2, 11):
        cache = jax.ShapeDtypeStruct((layers, pages, page, rank + rope), jnp.float32)
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        arena = jax.eval_shape(lambda: Arena.allocate(spec))
        x = jax.ShapeDtypeStruct((batch, q_len, heads, rank + rope), jnp.float32)
        compiled = (
            jax.jit(step, donate_argnums=(0, 1))
            .lower(cache, arena, x, ints((batch, width)), ints((batch,)), ints((layers,)))
            .compile()
        )
        memory = compiled.memory_analysis()
        nbytes = cache.size * 4
        assert memory.alias_size_in_bytes >= nbytes + spec.nbytes
        stack = re.escape(f"f32[{','.join(map(str, cache.shape))}]")
        assert not re.search(rf"= {stack}\S* copy\(", compiled.as_text())
        temps.append(memory.temp_size_in_bytes)
        assert temps[-1] < nbytes // layers
    assert temps[1] - temps[0] < 64 * 1024


def test_the_output_lies_in_the_arena():
    pool = make_pool([20, 33, 0], page=16, dim=24)
    q = normal(3, 2, 33, 24)  # 66 rows of a batch row: two tiles
    spec = mla.scratch(
        batch=3, q_len=2, num_heads=33, max_pages=1, kv_lora_rank=16, dtype=jnp.float32
    )
    args = (q, pool.cache, pool.tables, pool.lens)
    kwargs = dict(scale=0.3, kv_lora_rank=16)
    plain = decode(*args, **kwargs)
    arena = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), Arena.allocate(spec))
    out, lse, arena = decode(*args, **kwargs, arena=arena)
    jax.tree.map(assert_same_bits, (out, lse), plain)
    region = arena.read(spec, "out")
    assert region.shape == (3, 128, 16)
    np.testing.assert_array_equal(region[:, :66].reshape(3, 2, 33, 16), out)
    small = mla.scratch(
        batch=1, q_len=2, num_heads=33, max_pages=1, kv_lora_rank=16, dtype=jnp.float32
    )
    with pytest.raises(ArenaError):
        decode(*args, **kwargs, arena=Arena.allocate(small))


def test_deepseek_r1_needs_256_mib_of_output_scratch():
    assert mla.scratch(batch=2048, q_len=1, num_heads=128, max_pages=2560).nbytes == 256 * 2**20


def test_dispatch_chooses_refuses_and_knows_its_names():
    pool = make_pool([20], page=16, dim=24)
    args = (normal(1, 1, 2, 24), pool.cache, pool.tables, pool.lens)
    kwargs = dict(scale=0.3, kv_lora_rank=16)
    # No kernel has these dims, on any device.
    chosen = mla.mla_decode(*args, **kwargs)
    jax.tree.map(assert_same_bits, chosen, decode(*args, **kwargs))
    with pytest.raises(NotImplementedError, match="mla_decode"):
        mla.mla_decode(*args, **kwargs, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation='triton'"):
        mla.mla_decode(*args, **kwargs, implementation="triton")


# mla_decode: gradients


@pytest.mark.parametrize("q_len, page, lens", [(3, 16, [0, 2, 20, 33]), (1, 64, [700, 0, 5])])
def test_decode_gradients_are_finite_differences_and_never_nan(q_len, page, lens):
    rank, dim, heads = 16, 24, 2
    pool = make_pool(lens, page=page, dim=dim)
    q = normal(len(lens), q_len, heads, dim)
    q[pool.lens[:, None] - q_len + np.arange(q_len) < 0] = np.nan  # these see no key
    weight_out, weight_lse = normal(*q.shape[:3], rank, seed=2), normal(*q.shape[:3], seed=3)

    def loss(q, cache):
        out, lse = decode(q, cache, pool.tables, pool.lens, scale=0.4, kv_lora_rank=rank)
        return (out * weight_out).sum() + jnp.where(lse == -jnp.inf, 0, lse * weight_lse).sum()

    grad_q, grad_cache = map(np.asarray, jax.grad(loss, argnums=(0, 1))(q, pool.cache))
    assert np.isfinite(grad_q).all() and np.isfinite(grad_cache).all()
    assert not grad_cache[np.isnan(pool.cache)].any() and not grad_q[np.isnan(q)].any()

    def loss_numpy(q, cache):
        latents = [
            cache[pool.tables[b, np.arange(n) // page], np.arange(n) % page]
            for b, n in enumerate(lens)
        ]
        out, lse = decode_numpy(q, latents, 0.4, rank)
        return (out * weight_out).sum() + lse[np.isfinite(lse)] @ weight_lse[np.isfinite(lse)]

    step = 1e-4
    for seed in range(3):
        along_q = normal(*q.shape, seed=10 + seed).astype(np.float64)
        along_cache = normal(*pool.cache.shape, seed=20 + seed).astype(np.float64)
        ahead = loss_numpy(q + step * along_q, pool.cache + step * along_cache)
        behind = loss_numpy(q - step * along_q, pool.cache - step * along_cache)
        expected = (ahead - behind) / (2 * step)
        got = (grad_q * along_q).sum() + (grad_cache * along_cache).sum()
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
