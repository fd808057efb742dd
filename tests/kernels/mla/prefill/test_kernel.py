"""The Mosaic GPU kernel of MLA's prefill against float64, in the interpreter and on a Hopper GPU.

Poison: past a row's lengths the queries, both pieces of the keys, and the values are NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxattn import mla
from jaxattn.kernels.attention.causal_tile_order import head_group, tile_order
from jaxattn.kernels.mla.prefill.launch import MlaPrefillTileConfig, attend_mosaic
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow, slow_interpreted, x64

SCALE = 192**-0.5


@dataclasses.dataclass
class Case:
    q: Array  # [B, T, H, 192]
    k: Array  # [B, K, H, 128]
    k_pe: Array  # [B, K, 64]
    v: Array  # [B, K, H, 128]
    bounds: Array  # [B, 4]

    @property
    def args(self) -> tuple[Array, ...]:
        return self.q, self.k, self.k_pe, self.v, self.bounds


def make_case(tokens, keys, heads, bounds, *, dtype=jnp.bfloat16, seed=0) -> Case:
    rng = np.random.default_rng(seed)
    batch = len(bounds)
    shapes = (tokens, heads, 192), (keys, heads, 128), (keys, 64), (keys, heads, 128)
    q, k, k_pe, v = (rng.normal(size=(batch, *shape)) for shape in shapes)
    for b, (_, queries, count, _) in enumerate(bounds):
        q[b, queries:] = np.nan
        for x in (k, k_pe, v):
            x[b, count:] = np.nan
    arrays = (jnp.asarray(x.astype(dtype)) for x in (q, k, k_pe, v))
    return Case(*arrays, jnp.asarray(bounds, jnp.int32))


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, T, H, 128], lse [B, T, H]) in float64; (0, -inf) where a query sees no key."""
    q, k, k_pe, v = (np.asarray(x, np.float64) for x in case.args[:4])
    batch, tokens, heads, _ = q.shape
    out, lse = np.zeros((batch, tokens, heads, 128)), np.full((batch, tokens, heads), -np.inf)
    for b, (first, queries, count, offset) in enumerate(np.asarray(case.bounds).tolist()):
        for h in range(heads):
            keys = np.concatenate([k[b, :count, h], k_pe[b, :count]], axis=1)
            scores = q[b, :queries, h] @ keys.T * SCALE
            key, last = np.arange(count), np.arange(len(scores))[:, None] + offset
            scores[(key < first) | (key > last)] = -np.inf
            sees = ~np.isneginf(scores).all(axis=1)
            top = np.where(sees, scores.max(axis=1, initial=-np.inf), 0)
            p = np.exp(scores - top[:, None])
            total = np.where(sees, p.sum(axis=1), 1)
            out[b, : len(p), h] = (p / total[:, None]) @ v[b, :count, h]
            lse[b, : len(p), h] = np.where(sees, top + np.log(total), -np.inf)
    return out, lse


def assert_close(out, lse, expected, expected_lse, lse_atol=1e-5) -> None:
    """Each row within 1e-3 or 2/128 of its largest value and 4e-3 in relative L2, since P is
    rounded to the queries' dtype before it meets the values; the LSE within `lse_atol`; nothing
    where a query sees nothing."""
    error = np.abs(np.asarray(out, np.float64) - expected).max(axis=-1)
    assert (error <= np.maximum(1e-3, 2 / 128 * np.abs(expected).max(axis=-1))).all(), error.max()
    assert relative(out, expected) < 4e-3
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    assert not np.asarray(out)[np.isneginf(expected_lse)].any()
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected_lse, rtol=2e-6, atol=lse_atol)


@functools.cache
def attention(**options):
    return jax.jit(functools.partial(attend_mosaic, scale=SCALE, **options))


def attend(case: Case, implementation, **options):
    interpret = implementation == "mosaic_gpu_interpret"
    return attention(interpret=interpret, **options)(*case.args)


def run(case: Case, implementation, **kwargs) -> None:
    assert_close(*attend(case, implementation, **kwargs), *oracle(case))


@slow_interpreted(
    "a mask of another row; found by causal attention, lines behind prefixes and merged prefixes "
    "compared with float64 there, and by the same test on a GPU, too"
)
@pytest.mark.parametrize(
    "tokens, keys, heads, bounds",
    [
        (136, 136, 2, [(0, 136, 136, 0), (0, 70, 70, 0), (0, 0, 0, 0)]),  # causal chunks
        (72, 264, 1, [(0, 72, 264, 264), (0, 72, 65, 264), (0, 72, 0, 264)]),  # prefixes, all seen
        (130, 330, 1, [(0, 130, 330, 200), (0, 129, 150, 21)]),  # from the bottom right
        (160, 160, 1, [(140, 160, 160, 0), (3, 7, 7, 0)]),  # first keys that do not count
        (5, 3, 3, [(0, 5, 3, 0), (0, 2, 1, 0)]),  # fewer than a tile of 8
    ],
)
def test_matches_float64(tokens, keys, heads, bounds, implementation):
    run(make_case(tokens, keys, heads, bounds), implementation)


@pytest.mark.slow_cases(reason="a ring that comes round; found by three blocks too")
@slow_interpreted(
    "a tile that no block takes; found by the order of tiles, which has each once, there too"
)
@pytest.mark.parametrize("blocks", [slow(1), 3])
def test_resident_blocks_take_many_tiles(blocks, implementation):
    case = make_case(264, 264, 2, [(0, 264, 264, 0), (0, 130, 130, 0)])
    run(case, implementation, config=MlaPrefillTileConfig(blocks=blocks, l2_bytes=1))


@pytest.mark.slow(
    reason="a number that is converted to another dtype; found by float64 at bfloat16 there, and "
    "by the same test on a GPU, too"
)
@both_devices
def test_float16(implementation):
    run(make_case(72, 72, 1, [(0, 70, 70, 0)], dtype=jnp.float16), implementation)


@both_devices
def test_a_nan_among_a_rows_own_keys_shows_in_that_row_alone(implementation):
    case = make_case(72, 72, 2, [(0, 72, 72, 0)] * 2)
    case.k = case.k.at[0, 3, 1, 5].set(jnp.nan)
    out, lse = attend(case, implementation)
    assert np.isnan(out[0, 3:, 1]).all() and np.isnan(lse[0, 3:, 1]).all()
    for finite in (out[1], lse[1], out[0, :, 0], out[0, :3, 1], lse[0, :3, 1]):
        assert np.isfinite(finite).all()


@slow_interpreted(
    "a piece of the keys at another place; found by both forms compared with float64 too"
)
def test_keys_in_one_piece_are_keys_in_two(implementation):
    case = make_case(72, 72, 2, [(0, 70, 70, 0), (0, 3, 3, 0)])
    pieces = attend(case, implementation)
    shared = jnp.broadcast_to(case.k_pe[:, :, None], (2, 72, 2, 64))
    joined = dataclasses.replace(case, k=jnp.concatenate([case.k, shared], -1), k_pe=None)
    for a, b in zip(attend(joined, implementation), pieces, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("heads, tiles, group, blocks", [(8, 16, 4, 5), (3, 7, 3, 20)])
def test_every_tile_is_taken_once_and_the_shares_are_even(heads, tiles, group, blocks):
    order = tile_order(heads, tiles, group, blocks)
    assert sorted(order[order >= 0]) == list(range(heads * tiles))
    steps = tiles - np.arange(heads * tiles) % (tiles * group) // group + 1
    shares = [steps[items[items >= 0]].sum() for items in order]
    assert max(shares) - min(shares) <= tiles + 1
    assert head_group(12, 10, 35) == 3 and head_group(12, 10, 1) == 1


@pytest.mark.slow(
    reason="a race of a copy with a product; found by rows in lines there, which detect races, too"
)
def test_no_race_in_the_interpreter():
    case = make_case(200, 328, 1, [(0, 200, 300, 100), (0, 130, 70, 400)])
    options = dict(scale=SCALE, config=MlaPrefillTileConfig(blocks=2), interpret=True)
    with no_races():
        out, lse = jax.block_until_ready(attend_mosaic(*case.args, **options))
    assert_close(out, lse, *oracle(case))


@both_devices
def test_causal_attention_and_its_gradient(implementation):
    lengths = jnp.array([70, 3], jnp.int32)
    case = make_case(72, 72, 1, [(0, 70, 70, 0), (0, 3, 3, 0)])
    real = (jnp.arange(72) < lengths[:, None])[..., None]

    def loss(arrays, implementation):
        q, k, k_pe, v = arrays
        out, lse = mla.causal_attention(
            q, k, v, k_pe=k_pe, scale=SCALE, lengths=lengths, implementation=implementation
        )
        value = out.astype(jnp.float32).sum() + jnp.where(real, lse, 0).sum()
        return value, (out, lse)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    got, (out, lse) = grad(case.args[:4], implementation)
    assert_close(out, lse, *oracle(case))
    expected, _ = grad(case.args[:4], "xla")
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all() and relative(a, np.asarray(b, np.float64)) < 1e-2


@dataclasses.dataclass
class Prefill:
    """Rows of a cache whose last tokens are new; NaN in every slot that no row owns."""

    args: tuple[Array, ...]
    latents: list[np.ndarray]
    new: list[int]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        q, _, w_uk, w_uv = (np.asarray(x, np.float64) for x in self.args[:4])
        rank = w_uk.shape[2]
        out, lse = np.zeros((*q.shape[:3], 128)), np.full(q.shape[:3], -np.inf)
        rounded = lambda x: x.astype(self.args[0].dtype).astype(np.float64)  # noqa: E731
        for b, (latent, new) in enumerate(zip(self.latents, self.new, strict=True)):
            for h in range(q.shape[2] if len(latent) else 0):
                keys = np.concatenate([rounded(latent[:, :rank] @ w_uk[h].T), latent[:, rank:]], 1)
                values = rounded(latent[:, :rank] @ w_uv[h])
                for t in range(max(new - len(latent), 0), new):
                    seen = len(latent) - new + t + 1
                    scores = keys[:seen] @ q[b, t, h] * SCALE
                    p = np.exp(scores - scores.max())
                    out[b, t, h] = p @ values[:seen] / p.sum()
                    lse[b, t, h] = scores.max() + np.log(p.sum())
        return out, lse


def prefill_case(lens, new, *, heads=1, tokens=72, rank=128, page=64, dtype=jnp.bfloat16):
    rng = np.random.default_rng(1)
    round_ = lambda x: x.astype(dtype).astype(np.float64)  # noqa: E731
    latents = [round_(rng.normal(size=(n, rank + 64))) for n in lens]
    width = max(-(-max(lens) // page), 1) + 1
    tables = rng.permutation(len(lens) * width).reshape(len(lens), width).astype(np.int32)
    cache = np.full((2, len(lens) * width, page, rank + 64), np.nan)
    fresh = np.full((len(lens), tokens, rank + 64), np.nan)
    q = rng.normal(size=(len(lens), tokens, heads, 192))
    for b, (latent, count) in enumerate(zip(latents, new, strict=True)):
        for t in range(len(latent) - min(count, len(latent))):  # the new tokens are not cached
            cache[1, tables[b, t // page], t % page] = latent[t]
        tables[b, -(-len(latent) // page) :] = 2147480000
        first = max(count - len(latent), 0)
        fresh[b, first:count] = latent[len(latent) - (count - first) :]
        q[b, count:] = np.nan
    w_uk, w_uv = (rng.normal(size=(heads, *s)) / 12 for s in ((128, rank), (rank, 128)))
    floats = (jnp.asarray(x.astype(dtype)) for x in (q, fresh, w_uk, w_uv, cache))
    ints = (jnp.asarray(x, jnp.int32) for x in (tables, lens, new))
    return Prefill((*floats, *ints), latents, new)


def prefill(case, implementation, **kwargs):
    op = functools.partial(mla.mla_prefill, scale=SCALE, implementation=implementation, **kwargs)
    return jax.jit(op)(*case.args, layer=jnp.int32(1))


@slow_interpreted("a block left out of a merge; found by race detection of three merged blocks too")
def test_prefill_merges_the_cached_prefix(implementation):
    # A prefix over several blocks, one that ends at a page's end, none, padding, and more new
    # tokens than the row has.
    case = prefill_case([200, 70, 40, 0, 5], [70, 6, 40, 0, 9])
    assert_close(*prefill(case, implementation, block=64), *case.expected())


def in_lines(x: Array, new: list[int], tokens: int = 128) -> tuple[Array, list[int]]:
    """Lines [L, 128, ...] of rows [B, T, ...], one of no row behind them; and the lines' rows."""
    rows = [row for row, count in enumerate(new) for _ in range(-(-count // tokens))]
    found, used = [], dict.fromkeys(range(len(new)), 0)
    for row in rows:
        found.append(x[row, used[row] : used[row] + tokens])
        used[row] += tokens
    found.append(jnp.full_like(found[0], jnp.nan))
    return jnp.stack(found), [*rows, len(new)]


@both_devices
def test_rows_in_lines_see_their_own_keys_and_prefixes(implementation):
    """Two lines of a row behind a prefix of blocks, a line of one behind none, and no row.

    The blocks are merged in place, one after another.
    """
    new = [130, 0, 40]
    case = prefill_case([200, 0, 40], new, tokens=256)
    q, latent, *rest = case.args
    (q, rows), (latent, _) = in_lines(q, new), in_lines(latent, new)
    lined = dataclasses.replace(case, args=(q, latent, *rest))
    with no_races(when=implementation == "mosaic_gpu_interpret"):
        out, lse = jax.block_until_ready(
            prefill(lined, implementation, block=64, lines=jnp.asarray(rows, jnp.int32))
        )
    expected = [in_lines(jnp.asarray(x), new)[0] for x in case.expected()]
    assert_close(out[:-1], lse[:-1], *(np.asarray(x[:-1], np.float64) for x in expected))
    assert not np.asarray(out[-1]).any() and np.isneginf(lse[-1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("nope, values", [(128, 128), (192, 256)])
def test_real_lines_of_long_prompts_are_what_rows_are(nope, values):
    """8,192 tokens of four rows behind prefixes of up to 3,000, of both kernels' dims."""
    heads, rank, page, new = 16, 512, 64, [4096, 1000, 2048, 70]
    prefix = [3000, 0, 640, 100]
    rng = np.random.default_rng(3)
    floats = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    w_uk, w_uv = floats(heads, nope, rank) / 12, floats(heads, rank, values) / 12
    q, latent = floats(4, 4096, heads, nope + 64), floats(4, 4096, rank + 64)
    width = 112
    tables = jnp.asarray(rng.permutation(4 * width).reshape(4, width), jnp.int32)
    cache = floats(1, 4 * width, page, rank + 64)
    lens = jnp.asarray([a + b for a, b in zip(new, prefix, strict=True)], jnp.int32)
    rest = (w_uk, w_uv, cache, tables, lens, jnp.asarray(new, jnp.int32))
    op = functools.partial(mla.mla_prefill, scale=0.05, layer=0, implementation="mosaic_gpu")
    wanted = jax.jit(op)(q, latent, *rest)
    (lined, rows), (latents, _) = in_lines(q, new), in_lines(latent, new)
    found = jax.jit(op)(lined, latents, *rest, lines=jnp.asarray(rows, jnp.int32))
    for got, whole in zip(found, wanted, strict=True):
        expected, _ = in_lines(whole, new)
        count = np.asarray(jnp.isfinite(expected[:-1].astype(jnp.float32)))
        assert relative(np.where(count, got[:-1], 0), np.where(count, expected[:-1], 0)) < 5e-3


@pytest.mark.slow(
    reason="a race of a merge with the next block; found by rows in lines behind a cached prefix "
    "there, which detect races, too"
)
def test_no_race_where_a_cached_prefix_is_merged():
    """Three blocks of a prefix, one after another into one result, which they update in place."""
    case = prefill_case([200, 5, 70], [70, 5, 6])
    with no_races():
        outs = jax.block_until_ready(prefill(case, "mosaic_gpu_interpret", block=64))
    assert_close(*outs, *case.expected())


@both_devices
@pytest.mark.slow(reason="int64 addresses; found by x64 of every kernel in ops/test_transforms too")
def test_prefill_of_a_block_scaled_prefix_with_x64_enabled(implementation):
    case = prefill_case([100, 3], [20, 3])
    format = mla.LatentFormat("uint8", 128, 64)
    pack, unpack = jax.jit(format.pack), jax.jit(format.unpack)
    case.latents[0][:80] = unpack(pack(case.latents[0][:80]))
    args = [*case.args]
    args[4] = pack(args[4])
    case = dataclasses.replace(case, args=tuple(args))
    with x64():
        assert_close(*prefill(case, implementation), *case.expected())


@slow_interpreted("a gradient without a prefix; found by causal attention and its gradient too")
def test_prefill_without_a_prefix_and_its_gradient(implementation):
    case = prefill_case([12, 9, 0], [12, 9, 0], heads=2, tokens=16)

    def loss(floats, implementation):
        args = (*floats, *case.args[4:])
        out, lse = mla.mla_prefill(*args, scale=SCALE, layer=1, implementation=implementation)
        return out.astype(jnp.float32).sum(), (out, lse)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    got, (out, lse) = grad(case.args[:4], implementation)
    # A key that the gradient's product rounds the other way moves an LSE by 4e-5.
    assert_close(out, lse, *case.expected(), lse_atol=1e-4)
    expected, _ = grad(case.args[:4], "xla")
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all() and relative(a, np.asarray(b, np.float64)) < 1e-2


@pytest.mark.parametrize(
    "q_dim, v_dim, dtype, words",
    [
        (128, 128, jnp.bfloat16, "64 \\+ 64 and 128"),
        (256, 192, jnp.bfloat16, "192 \\+ 64 and 192"),
        (192, 64, jnp.bfloat16, "128 \\+ 64 and 64"),
        (192, 128, jnp.float32, "bfloat16 or float16, got float32"),
    ],
)
def test_refuses_what_it_does_not_serve(q_dim, v_dim, dtype, words):
    q, v = jnp.ones((1, 8, 1, q_dim), dtype), jnp.ones((1, 8, 1, v_dim), dtype)
    call = functools.partial(mla.causal_attention, q, q, v, scale=1.0)
    with pytest.raises(NotImplementedError, match=words):
        call(implementation="mosaic_gpu_interpret")
    assert call()[0].shape == v.shape


@pytest.mark.parametrize(
    "page, tokens, words",
    [
        (60, 128, "pages of a multiple of 8 tokens, got 60"),
        (64, 72, "multiple of 128 tokens, got 72"),
    ],
)
def test_refuses_lines_and_pages_that_no_copy_begins_at(page, tokens, words):
    case = prefill_case([40], [40], tokens=tokens, page=page)
    with pytest.raises(NotImplementedError, match=words):
        prefill(case, "mosaic_gpu_interpret", lines=jnp.zeros(1, jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("heads, tokens", [(128, 1024), (16, 4096)])
def test_real_shapes_repeat_bit_by_bit(heads, tokens):
    case = make_case(
        tokens, tokens, heads, [(0, tokens, tokens, 0), (0, tokens - 75, tokens - 75, 0)]
    )
    out, lse = attend(case, "mosaic_gpu")
    few = dataclasses.replace(case, q=case.q[:, :, -1:], k=case.k[:, :, -1:], v=case.v[:, :, -1:])
    assert_close(out[:, :, -1:], lse[:, :, -1:], *oracle(few))
    for _ in range(20):
        for a, b in zip(attend(case, "mosaic_gpu"), (out, lse), strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
            )


@pytest.mark.gpu
def test_real_prefill_with_a_long_prefix():
    case = prefill_case([3000, 1100], [500, 1024], heads=4, tokens=1024, rank=512)
    # Keys are products of 512 terms rounded to bfloat16: another order of the sum rounds some of
    # them the other way, and a key that a query looks at above all moves its LSE by 3e-4.
    expected = case.expected()
    assert_close(*prefill(case, "mosaic_gpu"), *expected, lse_atol=1e-3)
    assert_close(*prefill(case, "mosaic_gpu", block=512), *expected, lse_atol=1e-3)


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_2_to_the_31():
    # Row 2 begins at element 2**31 of the output. Its queries repeat, 1024 at a time.
    case = make_case(1024, 200, 128, [(0, 0, 0, 0), (0, 0, 0, 0), (0, 65536, 200, 0)])
    start = case.q[2:]
    q = jnp.zeros((3, 65536, 128, 192), jnp.bfloat16).at[2].set(jnp.tile(start[0], (64, 1, 1)))
    out, lse = attend(dataclasses.replace(case, q=q), "mosaic_gpu")
    few = Case(start[:, :, -1:], case.k[2:, :, -1:], case.k_pe[2:], case.v[2:, :, -1:], case.bounds)
    few.bounds = jnp.array([[0, 1024, 200, 0]], jnp.int32)
    assert_close(out[2:, :1024, -1:], lse[2:, :1024, -1:], *oracle(few))
    # From the 200th on, all queries see all keys.
    blocks = out[2].reshape(64, 1024, 128, 128)
    assert (blocks[1:] == blocks[1]).all() and (blocks[0, 200:] == blocks[1, 200:]).all()
    assert not out[:2].any()
