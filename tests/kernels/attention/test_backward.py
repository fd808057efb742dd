"""The kernel of attention's gradients against float64, in the interpreter and on a Hopper GPU."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gqa, mla
from jaxattn.core.dispatch import traced_for_hopper
from jaxattn.kernels.attention.backward.launch import attention_backward
from jaxattn.kernels.attention.backward.smem import scratch_types
from jaxattn.kernels.attention.backward.tile_config import CONFIGS, DTYPES
from jaxattn.kernels.attention.backward.tile_scheduler import BackwardTileScheduler, ranges_of
from jaxattn.kernels.hopper.device import RESERVED_BYTES, SHARED_BYTES, shared_bytes
from tests.helpers.kernel_cases import both_devices, no_races, relative, slow

SCALE = 0.1


def first_seen(runs: tuple[int, ...], window: int) -> np.ndarray:
    """[1, T], the first token of each token's run and window."""
    begins = np.repeat(np.cumsum((0, *runs[:-1])), runs)
    return np.maximum(begins, np.arange(len(begins)) - (window - 1))[None].astype(np.int32)


def dense(q, k, v, first, soft_cap):
    """(out, lse [B, T, H]) of [B, T, H, D] in NumPy's float64, and its pullback."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    slope = 1.0
    if soft_cap is not None:
        tanh = np.tanh(s / soft_cap)
        s, slope = soft_cap * tanh, 1 - tanh**2
    t = np.arange(q.shape[1])
    s = np.where((t <= t[:, None]) & (t >= first[..., None])[:, None], s, -np.inf)
    lse = np.logaddexp.reduce(s, axis=-1)
    p = np.exp(s - lse[..., None])
    out = np.einsum("bhqk,bkhd->bqhd", p, v)

    def pullback(d_out, d_lse):
        dp = np.einsum("bqhd,bkhd->bhqk", d_out, v)
        delta = np.einsum("bqhd,bqhd->bhq", d_out, out) - d_lse.swapaxes(1, 2)
        ds = p * (dp - delta[..., None]) * slope * SCALE
        dk = np.einsum("bhqk,bqhd->bkhd", ds, q)
        dv = np.einsum("bhqk,bqhd->bkhd", p, d_out)
        summed = [x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(axis=3) for x in (dk, dv)]
        return np.einsum("bhqk,bkhd->bqhd", ds, k), *summed

    return out, lse.swapaxes(1, 2), pullback


@functools.partial(jax.jit, static_argnames=("soft_cap", "interpret"))
def backward(*args, first, soft_cap, interpret):
    return attention_backward(
        *args, scale=SCALE, first=first, soft_cap=soft_cap, interpret=interpret
    )


@both_devices
@pytest.mark.slow_cases(reason="other widths; the ops' own gradients have those of 64 and 192 dims")
@pytest.mark.parametrize(
    "heads, kv_heads, dim, values, runs, window, soft_cap",
    [
        (2, 1, 128, 128, (50, 86), 200, 3.0),
        slow(1, 1, 256, 256, (136,), 200, None),
        slow(2, 1, 64, 64, (20, 100, 30), 200, None),
        slow(1, 1, 192, 128, (150,), 41, None),
    ],
)
def test_matches_float64(heads, kv_heads, dim, values, runs, window, soft_cap, implementation):
    first = first_seen(runs, window)
    rng, tokens = np.random.default_rng(0), first.shape[1]
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, values), (heads, values)
    q, k, v, d_out = (
        np.asarray(jnp.asarray(rng.normal(size=(1, tokens, *shape)), jnp.bfloat16))
        for shape in shapes
    )
    d_lse = rng.normal(size=(1, tokens, heads))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    out, lse, pullback = dense(*wide, first, soft_cap)
    delta = np.einsum("bqhd,bqhd->bqh", d_out.astype(np.float64), out) - d_lse
    stats = (x.astype(np.float32) for x in (lse, delta))
    args = q, k, v, d_out, *stats, np.array([tokens], np.int32)
    options = dict(first=jnp.asarray(first, jnp.int32), soft_cap=soft_cap)
    interpret = implementation == "mosaic_gpu_interpret"
    with no_races() if interpret else contextlib.nullcontext():
        grads = jax.block_until_ready(backward(*args, **options, interpret=interpret))
    expected = pullback(d_out.astype(np.float64), d_lse)
    for got, wanted in zip((grads.dq, grads.dk, grads.dv), expected, strict=True):
        assert got.dtype == q.dtype and relative(got, wanted) < 4e-3
    if not interpret:
        again = backward(*args, **options, interpret=False)
        for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dims", CONFIGS)
def test_every_width_has_room(dims):
    for dtype in DTYPES:
        needed = shared_bytes(scratch_types(CONFIGS[dims], dtype))
        assert needed <= SHARED_BYTES - RESERVED_BYTES, (dims, needed)


@pytest.mark.parametrize("seen", ["all", "first"])
def test_each_query_is_visited_by_its_keys_tiles_in_their_order(seen):
    """What `turns` says of a tile of queries is the first of the tiles of keys that come there, and
    all from there to the diagonal's do."""
    tokens, config = 1000, CONFIGS[128, 128]
    lengths = np.array([1000, 333, 0], np.int32)
    first = None
    if seen == "first":
        cuts = np.sort(np.random.default_rng(0).choice(tokens, (3, 7)), axis=1)
        first = np.array([[max([0, *row[row <= t]]) for t in range(tokens)] for row in cuts])
        first = jnp.asarray(first, jnp.int32)
    ranges = ranges_of(jnp.asarray(lengths), first, tokens, config)
    tiles = BackwardTileScheduler(
        keys=config.keys, queries=config.queries, count=8, heads=1, group=1, together=1
    )
    visits: dict[tuple[int, int], list[int]] = {}
    for item in range(3 * 8):
        tile = tiles.at(jnp.int32(item), np.asarray(ranges.tiles))
        for i in range(int(tiles.steps(tile))):
            m = int(tiles.step(tile, jnp.int32(i))[1])
            visits.setdefault((int(tile.row), m), []).append(int(tile.number))
    for row, length in enumerate(lengths.tolist()):
        for m in range(-(-length // config.queries)):
            begin = int(ranges.turns[row, m])
            last = min((m + 1) * config.queries, length) - 1
            assert visits.pop((row, m)) == list(range(begin, last // config.keys + 1)), (row, m)
            if first is not None:
                assert begin == int(first[row, m * config.queries]) // config.keys
    assert not visits


FEATURES = dict(window=99, soft_cap=9.0)


@pytest.mark.slow(
    reason="an operation without a lowering; found by the gradient in a scan, in "
    "kernels/test_lowering, too"
)
@pytest.mark.slow_cases(reason="other widths; each has the launches that this one has, and room")
@pytest.mark.parametrize(
    "dims, options",
    [
        ((128, 64, 128), {}),
        slow((192, 64, 256), {}),
        *(slow((dim, 0, dim), options) for dim in (64, 128, 256) for options in ({}, FEATURES)),
    ],
)
def test_gradients_lower_for_a_gpu(dims, options):
    """One launch forward and one backward, with and without what a call may have beside q, k, v."""
    (dim, rope, values), dtype = dims, jnp.bfloat16 if options else jnp.float16

    def shape(*sizes):
        return jax.ShapeDtypeStruct((1, 512, *sizes), dtype)

    given = {"q": shape(4, dim + rope), "k": shape(2, dim), "v": shape(2, values)}
    op, more = gqa.gqa_attention, {"segment_ids": np.zeros((1, 512), np.int32)}
    if rope:
        given |= {"k": shape(4, dim), "v": shape(4, values), "k_pe": shape(rope)}
        op = functools.partial(mla.causal_attention, scale=0.1)
    if options:
        given |= {"gate": given["q"], "sinks": jax.ShapeDtypeStruct((4,), jnp.float32)}

    def grads(given):
        out, pull = jax.vjp(lambda given: op(**given, **options, **more), given)
        return pull(out)

    with traced_for_hopper(True):
        lowered = jax.jit(grads).trace(given).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2
