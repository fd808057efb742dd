"""MLA ops against float64 NumPy written token by token, over caches poisoned wherever a row may
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
from jaxattn.core.rope import RopeConfig, rotation
from jaxattn.ops.mla.decode import DECODE_BLOCK
from tests.helpers.mla_cases import (
    BEYOND,
    assert_same_bits,
    attend,
    decode_numpy,
    make_pool,
    normal,
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


# mla_decode: padding, poison, isolation


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


def test_a_longer_neighbour_does_not_change_a_rows_bits():
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


# mla_cache_write


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


# causal_attention and merge_attention_states


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
    with pytest.raises(TypeError, match="outs must be arrays or one stack of them, got NoneType"):
        mla.merge_attention_states(None, lses)
    with pytest.raises(TypeError, match="lses must be arrays or one stack of them, got generator"):
        mla.merge_attention_states(outs, (lse for lse in lses))


# mla_prefill

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


# Validation

GOOD = dict(
    q=np.zeros((2, 1, 3, 24), np.float32),
    kv_cache=np.zeros((5, 16, 24), np.float32),
    block_tables=np.zeros((2, 4), np.int32),
    seq_lens=np.zeros(2, np.int32),
    scale=1.0,
    kv_lora_rank=16,
)


STACK = np.zeros((7, 5, 16, 24), np.float32)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (dict(q=np.zeros((2, 3, 24), np.float32)), ValueError, r"q \[B, S, H, D\].*\(2, 3, 24\)"),
        (dict(q=np.zeros((2, 0, 3, 24), np.float32)), ValueError, r"none.*\(2, 0, 3, 24\)"),
        (dict(q=np.zeros((2, 1, 3, 20), np.float32)), ValueError, r"kv_cache .*D = 24.*D = 20"),
        (
            dict(q=np.zeros((2, 1, 3, 24), np.int32)),
            TypeError,
            r"q must be .*int32 \(2, 1, 3, 24\)",
        ),
        (dict(q=[1.0]), TypeError, "q must be an array, got list"),
        (dict(q=(GOOD["q"],)), ValueError, r"a pair, got 1 arrays, \[\(2, 1, 3, 24\)\]"),
        (dict(q=(GOOD["q"], jnp.ones(3))), ValueError, r"q\[1\] \[B, S, H, P\].*shape \(3,\)"),
        (
            dict(q=(GOOD["q"], jnp.ones((2, 1, 3, 8), jnp.bfloat16))),
            TypeError,
            r"q\[1\] must be float32, got bfloat16 \(2, 1, 3, 8\)",
        ),
        (dict(kv_cache=np.zeros((5, 24), np.float32)), ValueError, r"kv_cache \[N, C, D\].*5, 24"),
        (dict(kv_cache=np.zeros((5, 0, 24))), ValueError, r"kv_cache .*none.*\(5, 0, 24\)"),
        (dict(kv_cache=STACK), ValueError, r"kv_cache \(7, 5, 16, 24\) is a stack.*give layer="),
        (dict(layer=0), ValueError, r"kv_cache \(5, 16, 24\) has no axis for layer=0"),
        (dict(kv_cache=STACK, layer=7), ValueError, r"layer=7 is not in .*has 7"),
        (dict(kv_cache=STACK, layer=-1), ValueError, "layer=-1 is not in"),
        (dict(kv_cache=STACK, layer=True), TypeError, "layer must be an integer, got bool"),
        (dict(kv_cache=STACK, layer=1.0), TypeError, "layer must be an integer, got float"),
        (dict(kv_cache=STACK, layer=np.zeros(1, int)), TypeError, r"scalar, got int64 \(1,\)"),
        (dict(block_tables=np.zeros((2, 4))), TypeError, r"_tables must .*float64 \(2, 4\)"),
        (dict(block_tables=np.full((2, 4), 2**31)), ValueError, r"_tables .* holds 2147483648, wh"),
        (dict(block_tables=np.zeros((3, 4), np.int32)), ValueError, "block_tables.*B = 3.*B = 2"),
        (
            dict(seq_lens=np.zeros(2, np.float32)),
            TypeError,
            r"seq_lens must be integers, got float32 \(2,\)",
        ),
        (dict(seq_lens=np.zeros((2, 1), np.int32)), ValueError, r"seq_lens \[B\].*\(2, 1\)"),
        (
            dict(seq_lens=np.array([65, 0], np.int32)),
            ValueError,
            r"\(2,\) .*65.*\(2, 4\).*16.*reach 64",
        ),
        (dict(scale=None), TypeError, "scale must be a Python number.*softmax_scale"),
        (dict(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
        (dict(scale=float("nan")), ValueError, "scale must be positive and finite, got nan"),
        (dict(query_lens=np.zeros(3, np.int32)), ValueError, r"query_lens \[B\].*\(3,\).*B = 2"),
        (dict(query_lens=np.zeros(2, bool)), TypeError, r"query_lens must .*bool \(2,\)"),
        (
            dict(query_lens=np.array([2, 0], np.int32)),
            ValueError,
            r"query_lens \(2,\) holds 2, but q \(2, 1, 3, 24\) has 1 tokens a row",
        ),
        (
            dict(kv_cache=np.zeros((5, 16, 24), jnp.float8_e5m2)),
            TypeError,
            r"got .*e5m2 \(5, 16, 24\)",
        ),
        (
            dict(kv_cache=np.zeros((5, 16, 24), np.int8)),
            TypeError,
            r"kv_cache .*int8 \(5, 16, 24\)",
        ),
        (dict(kv_lora_rank=25), ValueError, r"kv_lora_rank .*D = 24.*25"),
        (dict(kv_lora_rank=16.0), ValueError, "kv_lora_rank must be an integer .*got 16.0"),
        (dict(block_tables=[[0]]), ValueError, r"block_tables .*B = 1, but q .*B = 2"),
        (
            dict(block_tables=[[0], []]),
            TypeError,
            r"in rows of one length, got list \[\[0\], \[\]\]",
        ),
        (dict(block_tables=[]), ValueError, r"block_tables \[B, M\] needs 2 axes.*\(0,\)"),
        (dict(seq_lens=["1", "2"]), TypeError, r"seq_lens \[B\] must be integers"),
        (dict(block_tables=np.zeros(4, np.int32)), ValueError, r"block_tables \[B, M\].*\(4,\)"),
        (
            dict(schedule=mla.Schedule(np.zeros((2, 5), np.int32), np.zeros((3, 3), np.int32))),
            ValueError,
            r"schedule is of 3 rows, q \(2, 1, 3, 24\) has 2",
        ),
        (dict(kv_lora_rank=0), ValueError, "kv_lora_rank .* got 0"),
        (dict(kv_lora_rank=True), ValueError, "kv_lora_rank must be an integer .*got True"),
        (dict(schedule=[0]), TypeError, "schedule must be what decode_schedule returns, got list"),
        (dict(arena={}), TypeError, r"arena must be an Arena, .* got dict"),
    ],
)
def test_decode_names_the_argument_that_does_not_fit(changed, error, words):
    # Before an implementation is asked, so before anything is launched or refused.
    for implementation in (None, "mosaic_gpu", "xla"):
        with pytest.raises(error, match=f"mla_decode: .*{words}"):
            mla.mla_decode(**(GOOD | changed), implementation=implementation)


SIZES = dict(q_len=1, num_heads=3, max_pages=4)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (
            dict(seq_lens=np.zeros(2, np.float32)),
            TypeError,
            r"seq_lens must be integers, got float32 \(2,\)",
        ),
        (dict(seq_lens=np.zeros((2, 1), np.int32)), ValueError, r"seq_lens \[B\].*\(2, 1\)"),
        (dict(seq_lens=np.zeros(0, np.int32)), ValueError, r"seq_lens \[B\].*none.*\(0,\)"),
        (dict(seq_lens=[3.0, 4]), TypeError, r"seq_lens must be integers, got float64 \(2,\)"),
        (dict(seq_lens=[3, -4]), ValueError, r"seq_lens \(2,\) holds -4, but no length is below 0"),
        (
            dict(seq_lens=np.array([65, 0], np.int32), page_size=16),
            ValueError,
            r"seq_lens \(2,\) holds 65, but max_pages=4 of page_size=16 tokens reach 64; give",
        ),
        (dict(page_size=0), ValueError, "page_size must be a positive integer, got 0"),
        (dict(page_size=64.0), ValueError, "page_size must be a positive integer, got 64.0"),
        (dict(max_pages=0), ValueError, "max_pages must be a positive integer, got 0"),
        (dict(num_heads=0), ValueError, "num_heads must be a positive integer, got 0"),
        (dict(num_heads=True), ValueError, "num_heads must be a positive integer, got True"),
        (dict(q_len=-1), ValueError, "q_len must be a positive integer, got -1"),
        (dict(batch=0), ValueError, "batch must be a positive integer, got 0"),
    ],
)
def test_schedule_and_scratch_name_the_argument_that_does_not_fit(changed, error, words):
    if "batch" not in changed:
        with pytest.raises(error, match=rf"mla\.decode_schedule: {words}"):
            mla.decode_schedule(**(SIZES | dict(seq_lens=GOOD["seq_lens"]) | changed))
    if "seq_lens" not in changed:
        with pytest.raises(error, match=rf"mla\.scratch: {words}"):
            mla.scratch(**(SIZES | dict(batch=2) | changed))


def test_scale_has_no_default():
    with pytest.raises(TypeError, match="scale"):
        mla.mla_decode(**{k: v for k, v in GOOD.items() if k != "scale"})


def test_lengths_are_checked_only_where_they_are_known():
    traced = jax.jit(lambda lens: decode(**(GOOD | dict(seq_lens=lens)))[0])
    traced(np.array([65, 0], np.int32))
    lens = jnp.array([65, 0])
    constant = jax.jit(lambda: decode(**(GOOD | dict(seq_lens=lens))))
    with pytest.raises(ValueError, match="reach 64"):
        constant()
    jax.jit(lambda lens: mla.decode_schedule(lens, **SIZES, page_size=16))(lens)
    q = np.zeros((2, 1, 3, 24), np.float32)
    out, _ = jax.jit(lambda lens: mla.causal_attention(q, q, q, scale=1.0, lengths=lens))(lens)
    assert np.isfinite(out).all()


NUMBERS = "must be (an array|integers)"


def test_the_other_ops_name_the_argument_that_does_not_fit():
    cache, tables, lens = (GOOD[name] for name in ("kv_cache", "block_tables", "seq_lens"))
    latent = np.zeros((2, 3, 24), np.float32)
    with pytest.raises(ValueError, match=r"mla_cache_write: kv_cache .*D = 24.*latent .*D = 23"):
        mla.mla_cache_write(cache, latent[..., 1:], tables, lens)
    with pytest.raises(ValueError, match="mla_cache_write: kv_cache .* is a stack"):
        mla.mla_cache_write(STACK, latent, tables, lens)
    with pytest.raises(
        ValueError, match=r"mla_cache_write: seq_lens \(2,\) holds 65.*\(2, 4\).*reach 64"
    ):
        mla.mla_cache_write(cache, latent, tables, np.array([65, 0], np.int32))
    with pytest.raises(
        ValueError, match=r"query_lens \(2,\) holds 4, but latent \(2, 3, 24\) has 3 tokens"
    ):
        mla.mla_cache_write(cache, latent, tables, lens, query_lens=np.array([4, 0], np.int32))
    with pytest.raises(ValueError, match=r"mla_cache_write: latent \[B, S, D\].*\(3, 24\)"):
        mla.mla_cache_write(cache, latent[0], tables, lens)
    with pytest.raises(TypeError, match=r"_write: query_lens must be integers, got float64"):
        mla.mla_cache_write(cache, latent, tables, lens, query_lens=np.zeros(2))
    with pytest.raises(ValueError, match=r"absorb_query: w_uk \[H, nope, R\].*H = 4.*H = 3"):
        mla.absorb_query(np.zeros((2, 1, 3, 5), np.float32), np.zeros((4, 5, 16), np.float32))
    with pytest.raises(ValueError, match=r"absorb_output: w_uv \[H, R, Dv\].*R = 8.*R = 16"):
        mla.absorb_output(np.zeros((2, 1, 3, 16), np.float32), np.zeros((3, 8, 5), np.float32))
    words = (
        r"causal_attention: .*one dtype, got q float32 \(2, 1, 3, 24\), k bfloat16 \(2, 1, 3, 24\)"
    )
    with pytest.raises(TypeError, match=words):
        mla.causal_attention(GOOD["q"], jnp.bfloat16(GOOD["q"]), GOOD["q"], scale=1.0)
    with pytest.raises(
        ValueError,
        match=r"causal_attention: lengths \(2,\) holds 2, but q \(2, 1, 3, 24\) has 1 tokens a row",
    ):
        mla.causal_attention(*[GOOD["q"]] * 3, scale=1.0, lengths=np.array([2, 0], np.int32))
    q = np.zeros((2, 3, HEADS, NOPE + ROPE), np.float32)
    ok = dict(
        q=q, latent=latent, w_uk=W_UK, w_uv=W_UV, kv_cache=cache, block_tables=tables,
        seq_lens=lens, query_lens=np.zeros(2, np.int32), scale=1.0,
    )  # fmt: skip
    mla.mla_prefill(**ok)
    for changed, words in (
        (dict(q=q[..., 1:]), r"q's last axis.*\(2, 3, 2, 13\).*\(2, 6, 16\)"),
        (
            dict(query_lens=np.array([4, 0], np.int32)),
            r"query_lens \(2,\) holds 4, but q .*3 tokens a row",
        ),
        (
            dict(seq_lens=np.array([0, 70], np.int32)),
            r"seq_lens \(2,\) holds 70.*\(2, 4\).*reach 64",
        ),
        (dict(kv_cache=STACK), r"kv_cache \(7, 5, 16, 24\) is a stack"),
        (dict(w_uk=W_UK[:1]), r"w_uk \[H, nope, R\].*H = 1.*H = 2"),
        (dict(w_uv=W_UV[:, 1:]), r"w_uv \[H, R, Dv\].*R = 15.*R = 16"),
        (dict(latent=latent[:, 1:]), r"latent \[B, T, D\].*T = 2.*T = 3"),
        (dict(block=0), "block must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"mla_prefill: .*{words}"):
            mla.mla_prefill(**(ok | changed))
    for block in (5.5, True, jnp.int32(4), "4"):
        with pytest.raises(TypeError, match="mla_prefill: block must be a Python integer, got"):
            mla.mla_prefill(**ok, block=block)
    mla.mla_prefill(**ok, block=np.int64(4))
    with pytest.raises(TypeError, match=r"_write: config must be a .*RopeConfig, got dict"):
        mla.mla_cache_write(
            cache, latent, tables, lens, config={}, rotation=rotation(lens, RopeConfig(dim=8))
        )
    for given in (None, [1.0]):
        for name in ("q", "latent", "w_uk", "w_uv", "kv_cache", "block_tables", "seq_lens"):
            with pytest.raises(TypeError, match=f"mla_prefill: {name} {NUMBERS}, got "):
                mla.mla_prefill(**(ok | {name: given}))
        for name in ("q", "kv_cache", "block_tables", "seq_lens"):
            with pytest.raises(TypeError, match=f"mla_decode: {name} {NUMBERS}, got "):
                mla.mla_decode(**(GOOD | {name: given}))
        write = dict(kv_cache=cache, latent=latent, block_tables=tables, seq_lens=lens)
        for name in write:
            with pytest.raises(TypeError, match=f"mla_cache_write: {name} {NUMBERS}, got "):
                mla.mla_cache_write(**(write | {name: given}))
