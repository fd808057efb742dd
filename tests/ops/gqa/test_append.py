"""`gqa_append`: new tokens' heads normed, rotated and cached, against float64 and the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.cache.formats import FP8
from jaxattn.core.numerics.rope import RopeConfig, rotation
from jaxattn.gqa import gqa_append, pack_gqa_weights
from tests.helpers.kernel_cases import NO_SUCH_PAGE, both_devices

LENS = np.array([17, 0, 1, 32], np.int32)
EPS = 1e-5


def arguments(dim, *, heads=4, kv_heads=2, q_len=2, gated=False, page=16, cache_dtype=jnp.bfloat16):
    """The op's arguments, of a stack of two layers whose cache is NaN."""
    rng = np.random.default_rng(dim)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(4, q_len, *shape)), jnp.bfloat16)  # noqa: E731
    norms = [jnp.asarray(rng.normal(size=(2, dim)) / 4, jnp.float32) for _ in range(2)]
    weights = pack_gqa_weights(*norms, zero_centered=True)
    tables = np.full((4, 3), NO_SUCH_PAGE, np.int32)
    tables[0, :2], tables[2, 0], tables[3, :2] = (5, 2), 0, (1, 6)
    cache = jnp.full((2, 8, 2, page, kv_heads, dim), jnp.nan, cache_dtype)
    q = draw(heads, dim * (1 + gated))
    args = (q, draw(kv_heads, dim), 30 * draw(kv_heads, dim), weights, cache)
    return (*args, jnp.asarray(tables), jnp.asarray(LENS)), norms


turned = jax.jit(rotation, static_argnums=1)
# Compiled once for all tests of the same shapes.
op = jax.jit(gqa_append, static_argnames=("config", "eps", "implementation", "gates"))


def append(args, config, implementation, **options):
    positions = np.maximum(args[-1][:, None] - args[0].shape[1] + np.arange(args[0].shape[1]), 0)
    given = {"layer": 1, "gates": False, "rotation": turned(positions, config), **options}
    return op(*args, config=config, eps=EPS, implementation=implementation, **given)


def expected(x, norm, positions, config):
    """float64 heads [B, S, H, D] normed with 1 + norm, their first pairs turned as complex
    numbers."""
    x, norm = np.asarray(x, np.float64), np.asarray(norm, np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (1 + norm)
    half = config.dim // 2
    angles = positions[..., None, None] * config.theta ** (-np.arange(half) / half)
    first, second = np.split(x[..., : config.dim], 2, axis=-1)
    if config.interleaved:
        first, second = x[..., : config.dim : 2], x[..., 1 : config.dim : 2]
    turned = (first + 1j * second) * np.exp(1j * angles)
    both = [turned.real, turned.imag]
    if config.interleaved:
        rotated = np.stack(both, axis=-1).reshape(*x.shape[:-1], config.dim)
    else:
        rotated = np.concatenate(both, axis=-1)
    return np.concatenate([rotated, x[..., config.dim :]], axis=-1)


anywhere = pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)


@pytest.mark.sampled
@anywhere
@pytest.mark.parametrize(
    "dim, config, options",
    [
        (128, RopeConfig(dim=128, interleaved=False), {}),
        (256, RopeConfig(dim=64, interleaved=False), dict(gated=True)),
        (64, RopeConfig(dim=32, interleaved=True), dict(gated=True, heads=6)),
    ],
)
def test_matches_float64_and_touches_nothing_else(dim, config, options, implementation):
    args, (q_norm, k_norm) = arguments(dim, **options)
    q, k, v, _, cache, tables, lens = args
    queries, written = append(args, config, implementation)
    positions = np.maximum(LENS[:, None] - 2 + np.arange(2), 0)
    wanted = expected(q[..., :dim], q_norm[1], positions, config)
    np.testing.assert_allclose(np.asarray(queries, np.float64), wanted, rtol=2**-7, atol=2e-2)
    keys = expected(k, k_norm[1], positions, config)
    untouched = np.ones((2, 8, 2, 16), bool)
    for row, token in np.ndindex(4, 2):
        position = LENS[row] - 2 + token
        if LENS[row] and position >= 0:
            page, slot = int(tables[row, position // 16]), position % 16
            untouched[1, page, :, slot] = False
            got = np.asarray(written[1, page, :, slot], np.float64)
            np.testing.assert_allclose(got[0], keys[row, token], rtol=2**-7, atol=2e-2)
            np.testing.assert_array_equal(got[1], np.asarray(v[row, token], np.float64))
    assert not untouched.all() and np.isnan(np.asarray(written, np.float32)[untouched]).all()


@both_devices
@pytest.mark.parametrize("cache_dtype, scale", [(jnp.float16, None), (FP8, [[0.5, 0.02], [1, 4]])])
def test_the_kernel_gives_the_bits_of_the_reference(cache_dtype, scale, implementation):
    """Values beyond 448 times their scale saturate, Inf and NaN are NaN in FP8."""
    config = RopeConfig(dim=32, interleaved=False)
    args, _ = arguments(64, cache_dtype=cache_dtype)
    edges = jnp.asarray([np.inf, -np.inf, np.nan, 1e30, -0.0], jnp.bfloat16)
    args = (*args[:2], args[2].at[0, :, 0, :5].set(edges), args[3], *args[4:])
    options = {} if scale is None else {"kv_scale": jnp.asarray(scale, jnp.float32)}
    options["query_lens"] = jnp.asarray([1, 0, 1, 2], jnp.int32)
    found, wanted = (append(args, config, some, **options) for some in (implementation, "xla"))
    # On a GPU the sum of squares has another order: a rounding apart at most.
    exact = implementation == "mosaic_gpu_interpret"
    near = 0 if exact else 2**-3 if scale else 2**-7
    for got, same in zip(found, wanted, strict=True):
        got, same = np.asarray(got, np.float32), np.asarray(same, np.float32)
        np.testing.assert_allclose(got, same, rtol=near, atol=near * 1e-2)
    if scale is not None:  # row 0's token 16 is the first of its page 2
        of_edges = np.asarray(found[1][1, 2, 1, 0, 0, :5], np.float32)
        assert np.isnan(of_edges[:3]).all() and of_edges[3] == 448


@both_devices
def test_heads_that_are_not_normed(implementation):
    config = RopeConfig(dim=128, interleaved=False)
    args, _ = arguments(128, heads=2, kv_heads=1, q_len=1)
    args = (*args[:3], None, args[4][1], *args[5:])
    found, wanted = (append(args, config, x, layer=None) for x in (implementation, "xla"))
    for got, same in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(same, np.float32))


@both_devices
def test_a_layer_that_the_cache_lacks_reads_no_weights_behind_the_stack(implementation):
    config = RopeConfig(dim=128, interleaved=False)
    args, _ = arguments(128, heads=2, kv_heads=1, q_len=1)
    args = (*args[:4], args[4].at[:].set(1), *args[5:])
    queries, cache = append(args, config, implementation, layer=jnp.int32(9))
    last, _ = append(args, config, implementation, layer=1)
    np.testing.assert_array_equal(np.asarray(queries), np.asarray(last))
    assert (np.asarray(cache) == 1).all()


@pytest.mark.slow_cases(reason="the gate of another head; found by 4 heads of 256 there too")
@anywhere
@pytest.mark.parametrize(
    "dim, heads",
    [(256, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((128, 2), (64, 6)))],
)
def test_gates_come_as_they_are_in_an_array_of_their_own(dim, heads, implementation):
    config = RopeConfig(dim=64, interleaved=False)
    args, _ = arguments(dim, heads=heads, gated=True)
    queries, cache, gates = append(args, config, implementation, gates=True)
    np.testing.assert_array_equal(gates, args[0][..., dim:])
    alone = append(args, config, implementation)
    for one, other in zip((queries, cache), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(config=RopeConfig(dim=256)), "config.dim=256 exceeds D = 128"),
        (dict(weights=jnp.zeros((2, 128))), "must be float32 with W = 256"),
        (dict(kv_scale=1.0), "drop kv_scale"),
        (dict(gates=True), "gates=True needs q"),
        (dict(q=jnp.zeros((4, 2, 4, 96), jnp.bfloat16)), "must have D = 128"),
        (dict(kv_cache=jnp.zeros((2, 8, 2, 16, 2, 128), FP8)), "needs kv_scale="),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    args, _ = arguments(128)
    names = ("q", "k", "v", "weights", "kv_cache", "block_tables", "seq_lens")
    config = change.pop("config", RopeConfig(dim=128, interleaved=False))
    positions = jnp.zeros((4, 2), jnp.int32)
    given = dict(zip(names, args, strict=True)) | change
    with pytest.raises(ValueError, match=message):
        gqa_append(**given, rotation=rotation(positions, config), config=config, layer=1)


def test_heads_of_an_odd_number_of_64_dims_are_refused_by_the_kernel_alone():
    config = RopeConfig(dim=64, interleaved=False)
    args, _ = arguments(64, heads=3, kv_heads=1)
    append(args, config, None)
    with pytest.raises(
        NotImplementedError, match="H and Hk multiples of 2 for 64 dims, got H = 3, Hk = 1"
    ):
        append(args, config, "mosaic_gpu_interpret")
