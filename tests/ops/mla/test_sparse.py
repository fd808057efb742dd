"""The indexer's top-k and MLA over chosen tokens, against float64 NumPy written token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.arena import Arena
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.ops.mla.sparse import attend, index
from tests.helpers.draws import normal
from tests.helpers.mla_cases import attend as attend_numpy
from tests.helpers.mla_cases import make_pool

HEADS, RANK, ROPE, DIM, PAGE = 3, 16, 8, 24, 16
INDEX_HEADS, INDEX_DIM, TOP_K = 5, 8, 20
# One long row among short ones, a padding row, rows of fewer tokens than `TOP_K` and than S.
LENS, NEW, TOKENS = [150, 0, 7, 2, 33, 21], [3, 3, 2, 3, 0, 1], 3


def seen(row, token):
    """How many positions a token sees."""
    return max(LENS[row] - NEW[row] + token + 1, 0) if token < NEW[row] else 0


def top_k_numpy(q, weights, keys, count):
    """The positions of one token's best scores, ascending; of equal ones the lower first."""
    keys = keys[:count].astype(np.float64)
    scores = np.maximum(keys @ q.T.astype(np.float64), 0) @ weights.astype(np.float64)
    best = np.sort(np.argsort(-scores, kind="stable")[:TOP_K])
    return np.pad(best, (0, TOP_K - len(best)), constant_values=-1)


@pytest.fixture(scope="module")
def pool():
    return make_pool(LENS, page=PAGE, dim=INDEX_DIM)


def queries(seed=1):
    return normal(len(LENS), TOKENS, INDEX_HEADS, INDEX_DIM, seed=seed), normal(
        len(LENS), TOKENS, INDEX_HEADS, seed=seed + 1
    )


def indices_of(pool, q, weights, **given):
    rows = pool.tables, pool.lens
    given = dict(query_lens=np.int32(NEW), top_k=TOP_K, **given)
    return np.asarray(mla.mla_index(q, weights, pool.cache, *rows, **given))


def expected_indices(q, weights, keys):
    return np.stack(
        [
            [top_k_numpy(q[b, s], weights[b, s], keys[b], seen(b, s)) for s in range(TOKENS)]
            for b in range(len(LENS))
        ]
    )


@pytest.mark.parametrize("block, most", [(16, 1), (64, 2**24)])
def test_the_top_k_are_numpys_in_any_blocks(pool, monkeypatch, block, most):
    """Pages hold NaN where no row owns them, and tables numbers of no page."""
    monkeypatch.setattr(index, "KEY_BLOCK", block)
    monkeypatch.setattr(index, "MOST_SCORES", most)
    index.index_xla.clear_cache()
    q, weights = queries()
    found = indices_of(pool, q, weights)
    np.testing.assert_array_equal(found, expected_indices(q, weights, pool.latents))
    index.index_xla.clear_cache()


def test_one_row_of_131072_tokens_is_chosen_of_and_attended_to_among_short_ones():
    """Keys and latents are the same numbers here."""
    lens = [3, 131072, 0, 40]
    pool = make_pool(lens, page=64, dim=DIM)
    rows, q = (pool.cache, pool.tables, pool.lens), normal(4, 1, HEADS, DIM)
    asked, weights = normal(4, 1, INDEX_HEADS, DIM), normal(4, 1, INDEX_HEADS, seed=1)
    picked = np.asarray(mla.mla_index(asked, weights, *rows, top_k=TOP_K))
    out, _ = mla.mla_sparse_decode(q, *rows, picked, scale=0.3, kv_lora_rank=RANK)
    for row, n in enumerate(lens):
        best = top_k_numpy(asked[row, 0], weights[row, 0], pool.latents[row], n)
        np.testing.assert_array_equal(picked[row, 0], best)
        held = pool.latents[row][best[best >= 0]]
        for head in range(HEADS if n else 0):
            found, _ = attend_numpy(q[row, 0, head], held, held[:, :RANK], 0.3)
            np.testing.assert_allclose(out[row, 0, head], found, atol=2e-6)
    assert picked[1].max() > 2**16 and not np.asarray(out[2]).any()


def test_of_equal_scores_the_lower_position_wins():
    """Most scores are 0, some of which are sums of -0; keys of three tokens in four are equal."""
    pool = make_pool(LENS, page=PAGE, dim=INDEX_DIM, poison=np.inf)
    keys = [np.sign(x[: len(x)] * (np.arange(len(x)) % 4 == 1)[:, None]) for x in pool.latents]
    cache = np.array(pool.cache)
    for row, of_row in enumerate(keys):
        for t, key in enumerate(of_row):
            cache[pool.tables[row, t // PAGE], t % PAGE] = key
    q, weights = queries()
    q, weights = np.abs(np.round(q)), -np.abs(np.round(weights))
    found = indices_of(pool._replace(cache=cache), q, weights)
    np.testing.assert_array_equal(found, expected_indices(q, weights, keys))
    assert (found[0, 0, 5:] > 5).all()


def test_keys_in_fp8_are_written_with_a_scale_for_each_token(pool):
    """In a stack of layers, of which the others keep their bits."""
    q, weights = queries(seed=5)
    grown = np.float32(2) ** (np.arange(max(LENS)) % 9 - 4)
    keys = [grown[: len(x), None] * x for x in pool.latents]
    cache = jnp.full((2, *pool.cache.shape), 5, jnp.float8_e4m3fn)
    scales = jnp.full(cache.shape[:-1], 5, jnp.float32)
    given = np.zeros((len(LENS), max(LENS), INDEX_DIM), np.float32)
    for row, x in enumerate(keys):
        given[row, : len(x)] = x
    written, k_scale = mla.mla_index_write(
        cache, given, pool.tables, pool.lens, query_lens=pool.lens, layer=1, k_scale=scales
    )
    assert (np.asarray(written[0], np.float32) == 5).all() and (np.asarray(k_scale[0]) == 5).all()
    stored = np.asarray(written[1], np.float32) * np.asarray(k_scale[1])[..., None]
    rounded = [np.zeros_like(x) for x in keys]
    for row, x in enumerate(rounded):
        for t in range(len(x)):
            x[t] = stored[pool.tables[row, t // PAGE], t % PAGE]
            # Half a step of e4m3, or of its subnormal numbers.
            off, largest = np.abs(x[t] - keys[row][t]), np.abs(keys[row][t]).max()
            assert (off <= np.maximum(2**-4 * np.abs(keys[row][t]), largest * 2**-16)).all()
    found = indices_of(pool._replace(cache=written), q, weights, layer=1, k_scale=k_scale)
    np.testing.assert_array_equal(found, expected_indices(q, weights, rounded))


def test_nan_is_the_highest_score_and_minus_inf_is_a_score():
    """NaN of both signs, too: Inf - Inf has one of them, which processors choose. Written in FP8,
    a key's NaN is its scale's as well."""
    keys = np.ones((1, 64, INDEX_DIM), np.float32)
    keys[0, 40], keys[0, 50], keys[0, 51] = np.inf, np.nan, -np.float32(np.nan)
    tables, lens = np.arange(4, dtype=np.int32)[None], np.int32([64])
    empty = np.zeros((4, 16, INDEX_DIM), np.float32)
    cache = mla.mla_index_write(empty, keys, tables, lens)
    q, weights = np.ones((1, 1, 1, INDEX_DIM), np.float32), -np.ones((1, 1, 1), np.float32)
    q_inf = q * np.where(np.arange(INDEX_DIM) % 2, 1, -1)  # Inf - Inf of key 40
    found = [
        mla.mla_index(some, weights, cache, tables, lens, top_k=count)[0, 0].tolist()
        for some, count in ((q, 3), (q, 63), (q, 62), (q_inf, 3), (q_inf * 0, 3))
    ]
    others = [t for t in range(64) if t != 40]
    assert found[0] == [0, 50, 51] and found[1] == others
    assert found[2] == others[:-1] and found[3] == found[4] == [40, 50, 51]
    everything_lowest = mla.mla_index(q * np.inf, weights, cache, tables, lens, top_k=60)
    assert (everything_lowest >= 0).all()
    written, scales = mla.mla_index_write(
        jnp.zeros(empty.shape, jnp.float8_e4m3fn), keys, tables, lens,
        k_scale=jnp.zeros(empty.shape[:2], jnp.float32),
    )  # fmt: skip
    bad = np.isnan(np.asarray(scales).reshape(-1))
    assert np.flatnonzero(bad).tolist() == [40, 50, 51]
    assert np.isnan(np.asarray(written, np.float32).reshape(64, -1)[bad]).any(axis=1).all()


def test_a_write_leaves_out_padding_and_is_read_back(pool):
    keys = normal(len(LENS), TOKENS, INDEX_DIM)
    before = jnp.zeros(pool.cache.shape, jnp.bfloat16)
    after = np.asarray(
        mla.mla_index_write(before, keys, pool.tables, pool.lens, query_lens=np.int32(NEW)),
        np.float32,
    )
    count = 0
    for b, n in enumerate(LENS):
        for s in range(NEW[b] if n else 0):
            if (t := n - NEW[b] + s) >= 0:
                place = after[pool.tables[b, t // PAGE], t % PAGE]
                np.testing.assert_allclose(place, keys[b, s], rtol=2**-8)
                count += 1
    assert np.count_nonzero(after.any(-1)) == count == 8


def chosen(seed=0):
    """Positions in any order, among them ones that no token may read and some twice."""
    rng = np.random.default_rng(seed)
    found = rng.integers(-3, max(LENS) + 9, (len(LENS), TOKENS, 12)).astype(np.int32)
    found[2:] %= 40
    found[:, :, 3] = -1
    found[:, :, 4] = -(2**31)
    found[:, :, 5] = 2**31 - 1
    found[:, :, 7] = found[:, :, 6]
    found[5, 0] = 300  # nothing is left
    return found


def sparse_numpy(q, latents, indices, scale, sinks):
    out, lse = np.zeros((*q.shape[:3], RANK)), np.full(q.shape[:3], -np.inf)
    for b, s, h in np.ndindex(q.shape[:3]):
        left = [t for t in indices[b, s] if 0 <= t < seen(b, s)]
        if not left:
            continue
        keys = latents[b][left]
        out[b, s, h], lse[b, s, h] = attend_numpy(q[b, s, h], keys, keys[:, :RANK], scale)
        if sinks is not None:
            total = np.logaddexp(lse[b, s, h], sinks[h])
            out[b, s, h] *= np.exp(lse[b, s, h] - total)
            lse[b, s, h] = total
    return out, lse


@pytest.fixture(scope="module")
def latents():
    return make_pool(LENS, page=PAGE, dim=DIM)


@pytest.mark.parametrize("op", [mla.mla_sparse_decode, mla.mla_sparse_prefill])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_numpys(latents, monkeypatch, op, with_sinks):
    """With NaN where no row owns a page, and nothing left of one token's choice."""
    if with_sinks:
        monkeypatch.setattr(attend, "MOST_BYTES", 1)  # one token at a time
        attend.attend_xla.clear_cache()
    q, picked = normal(len(LENS), TOKENS, HEADS, DIM), chosen()
    sinks = normal(HEADS, seed=9) if with_sinks else None
    out, lse = op(
        q, latents.cache, latents.tables, latents.lens, picked,
        scale=0.3, query_lens=np.int32(NEW), kv_lora_rank=RANK, sinks=sinks,
    )  # fmt: skip
    expected = sparse_numpy(q, latents.latents, picked, 0.3, sinks)
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], atol=2e-6)
    empty = np.isneginf(expected[1])
    assert empty[5].all() and empty[1].all() and not np.asarray(out)[empty].any()
    attend.attend_xla.clear_cache()


def test_the_output_lies_in_the_arena(latents):
    q, picked = normal(len(LENS), TOKENS, HEADS, DIM), chosen()
    sizes = dict(q_len=TOKENS, num_heads=HEADS, top_k=12, kv_lora_rank=RANK, dtype="float32")
    rows = latents.tables, latents.lens, picked
    given = dict(scale=0.3, query_lens=np.int32(NEW), kv_lora_rank=RANK)
    plain = mla.mla_sparse_decode(q, latents.cache, *rows, **given)
    arena = Arena.allocate(mla.sparse_scratch(batch=len(LENS), **sizes))
    arena = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), arena)
    out, lse, arena = mla.mla_sparse_decode(q, latents.cache, *rows, arena=arena, **given)
    np.testing.assert_array_equal(out, plain[0])
    np.testing.assert_array_equal(lse, plain[1])
    del sizes["top_k"]
    region = arena.read(mla.scratch(batch=len(LENS), max_pages=1, **sizes), "out")
    np.testing.assert_array_equal(region[:, : TOKENS * HEADS].reshape(out.shape), out)


def test_all_positions_are_dense_attention(latents):
    """Also of queries in a pair, of a layer in a stack, and of the block-scaled format."""
    format = LatentFormat("uint8", 128, ROPE)
    pool = make_pool(LENS, page=PAGE, dim=128 + ROPE, poison=0)
    cache = jnp.stack([jnp.full((*pool.cache.shape[:2], format.width), 255, jnp.uint8),
                       format.pack(jnp.asarray(pool.cache))])  # fmt: skip
    q = normal(len(LENS), TOKENS, HEADS, 128 + ROPE)
    every = np.broadcast_to(np.arange(160, dtype=np.int32), (len(LENS), TOKENS, 160))
    given = dict(scale=0.1, query_lens=np.int32(NEW), kv_lora_rank=128, layer=1)
    dense = mla.mla_decode(q, cache, pool.tables, pool.lens, **given)
    pair = q[..., :128], q[..., 128:]
    sparse = mla.mla_sparse_decode(pair, cache, pool.tables, pool.lens, every, **given)
    for one, other in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_gradient_is_that_of_dense_attention_where_all_are_chosen(latents):
    cache = np.nan_to_num(latents.cache)
    q = normal(len(LENS), TOKENS, HEADS, DIM)
    weight = normal(len(LENS), TOKENS, HEADS, RANK, seed=4)
    every = np.broadcast_to(np.arange(160, dtype=np.int32), (len(LENS), TOKENS, 160))

    def loss(op, q, cache, *picked):
        out, lse = op(
            q, cache, latents.tables, latents.lens, *picked,
            scale=0.3, query_lens=np.int32(NEW), kv_lora_rank=RANK,
        )[:2]  # fmt: skip
        return (out * weight).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

    def gradients(*args):
        return jax.grad(lambda *x: loss(args[0], *x, *args[3:]), (0, 1))(*args[1:3])

    dense = gradients(mla.mla_decode, q, cache)
    for one, other in zip(gradients(mla.mla_sparse_prefill, q, cache, every), dense, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


POOL = dict(block_tables=np.zeros((2, 4), np.int32), seq_lens=np.zeros(2, np.int32))
INDEX = dict(
    q=np.zeros((2, 1, 4, 8), np.float32),
    weights=np.zeros((2, 1, 4), np.float32),
    index_cache=np.zeros((5, 16, 8), np.float32),
    top_k=8,
    **POOL,
)
FP8 = jnp.zeros((5, 16, 8), jnp.float8_e4m3fn)
SCALES = np.zeros((5, 16), np.float32)


@pytest.mark.parametrize("changed, error, words", [
    (dict(top_k=65), ValueError, r"top_k must be from 1 to 64, .*\(2, 4\) with pages of 16.* 65"),
    (dict(top_k=0), ValueError, "top_k must be from 1 to 64.* got 0"),
    (dict(top_k=8.0), TypeError, "top_k must be a Python integer, got float"),
    (dict(top_k=True), TypeError, "top_k must be a Python integer, got bool"),
    (dict(weights=np.zeros((2, 1, 3), np.float32)), ValueError, "weights .*Hi = 3, but q .*Hi = 4"),
    (dict(weights=jnp.zeros((2, 1, 4), jnp.bfloat16)), TypeError, "weights must be float32, got b"),
    (dict(index_cache=np.zeros((5, 16, 9), np.float32)), ValueError, "index_cache .*D = 9, but q"),
    (dict(index_cache=np.zeros((2, 5, 16, 8))), ValueError, "index_cache .* stack .*give layer="),
    (dict(index_cache=np.zeros((5, 16, 8), np.uint8)), TypeError, "index_cache must be .*uint8"),
    (dict(index_cache=FP8), ValueError, r"index_cache .* needs k_scale=, float32 \(5, 16\)"),
    (dict(k_scale=SCALES), ValueError, "index_cache .* float32 is not; drop k_scale"),
    (dict(index_cache=FP8, k_scale=SCALES[:4]), ValueError, "k_scale .*N = 4.*N = 5"),
    (dict(index_cache=FP8, k_scale=SCALES.astype("float16")), TypeError, "k_scale must be float32"),
    (dict(seq_lens=np.int32([65, 0])), ValueError, "seq_lens .* holds 65.* reach 64"),
    (dict(seq_lens=np.int32([9, 0]), block_tables=np.full((2, 4), 5, np.int32)), ValueError,
     "block_tables .* holds page 5 .* index_cache has pages 0 to 4"),
    (dict(query_lens=np.int32([2, 0])), ValueError, "query_lens .* holds 2, but q .* has 1 tokens"),
])  # fmt: skip
def test_the_index_names_the_argument_that_does_not_fit(changed, error, words):
    for implementation in (None, "mosaic_gpu", "xla"):
        with pytest.raises(error, match=f"mla_index: .*{words}"):
            mla.mla_index(**(INDEX | changed), implementation=implementation)


@pytest.mark.parametrize("name", ["batch", "q_len", "num_heads", "top_k", "kv_lora_rank"])
@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_the_arenas_spec_names_a_size_that_is_none(name, size):
    sizes = dict(batch=2, q_len=1, num_heads=3, top_k=12) | {name: size}
    with pytest.raises(ValueError, match=rf"mla.sparse_scratch: .*{name}.*{size}"):
        mla.sparse_scratch(**sizes)


SPARSE = dict(
    q=np.zeros((2, 1, 3, 24), np.float32),
    kv_cache=np.zeros((5, 16, 24), np.float32),
    indices=np.zeros((2, 1, 8), np.int32),
    scale=1.0,
    kv_lora_rank=16,
    **POOL,
)


@pytest.mark.parametrize("changed, error, words", [
    (dict(indices=np.zeros((2, 1, 8))), TypeError, r"indices must be int32, got float64 \(2, 1, 8"),
    (dict(indices=np.zeros((2, 1, 8), np.int64)), TypeError, "indices must be int32, got int64"),
    (dict(indices=np.zeros((2, 8), np.int32)), ValueError, r"indices \[B, S, K\] .* \(2, 8\)"),
    (dict(indices=np.zeros((2, 2, 8), np.int32)), ValueError, "indices .*S = 2, but q has S = 1"),
    (dict(indices=np.zeros((3, 1, 8), np.int32)), ValueError, "indices .*B = 3, but q has B = 2"),
    (dict(indices=np.zeros((2, 1, 0), np.int32)), ValueError, "indices .*none of them empty"),
    (dict(sinks=np.zeros(2, np.float32)), ValueError, "sinks .*H = 2, but q has H = 3"),
    (dict(sinks=np.zeros(3)), TypeError, "sinks must be float32, got float64"),
    (dict(kv_lora_rank=25), ValueError, "kv_lora_rank .*D = 24.*25"),
    (dict(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
    (dict(kv_cache=np.zeros((5, 16, 20), np.float32)), ValueError, "kv_cache .*D = 20, but q"),
])  # fmt: skip
@pytest.mark.parametrize("op", [mla.mla_sparse_decode, mla.mla_sparse_prefill])
def test_attention_names_the_argument_that_does_not_fit(op, changed, error, words):
    for implementation in (None, "mosaic_gpu", "xla"):
        with pytest.raises(error, match=f"{op.__name__}: .*{words}"):
            op(**(SPARSE | changed), implementation=implementation)
