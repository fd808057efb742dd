"""`mla_append`: a step's new tokens normed, rotated and cached, against float64 and the kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.numerics.rope import RopeConfig, YarnConfig, rotation
from jaxattn.kernels.mla.append import mla_append_mosaic
from jaxattn.ops.mla.append import mla_append, pack_mla_weights
from jaxattn.ops.mla.cache_write import mla_cache_write
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import both_devices, mla_case, no_races
from tests.ops.mla.test_cache_write import saturated, tokens_as_bytes

YARN = YarnConfig(factor=40, original_max_position_embeddings=4096, mscale_all_dim=0.5)


def arguments(lens, q_len, query_rank, config, *, page=64, table_tail=-1):
    """The op's arguments, of a stack of two layers; the cache holds `lens` tokens and poison."""
    case = mla_case(lens, q_len=q_len, page=page, table_tail=table_tail)
    draw, tokens = normals(len(lens)), (len(lens), q_len)
    kv = draw(*tokens, 576)
    q = None if query_rank is None else draw(*tokens, query_rank)
    norms = [draw(2, n or 1, mean=1, scale=0.25) for n in (512, query_rank)]
    weights = pack_mla_weights(norms[0], None if q is None else norms[1], rope_dim=config.dim)
    positions = jnp.maximum(case.seq_lens[:, None] - q_len + jnp.arange(q_len), 0)
    return (kv, q, weights, case.kv_cache, case.block_tables, case.seq_lens), positions


turned = jax.jit(rotation, static_argnums=1)
# Compiled once for all tests of the same shapes.
op = jax.jit(mla_append, static_argnames=("config", "eps", "dtype", "implementation"))


def append(args, positions, config, implementation, layer=1, query_lens=None, kv_scale=None):
    traced = dict(layer=layer, query_lens=query_lens, kv_scale=kv_scale)
    traced["rotation"] = turned(positions, config)
    fixed = dict(config=config, eps=1e-5, dtype=jnp.bfloat16, implementation=implementation)
    return op(*args, **traced, **fixed)


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def expected_latents(kv, weights, positions, config):
    """[B, S, 576] in float64: complex numbers turned by their angles."""
    kv, weights = np.asarray(kv, np.float64), np.asarray(weights, np.float64)
    angles = np.asarray(rotation(positions, config).angles, np.float64)
    cos, sin = angles[..., :64], angles[..., 64:]
    if config.interleaved:
        pairs = kv[..., 512::2] + 1j * kv[..., 513::2]
        turned = pairs * (cos[..., ::2] + 1j * sin[..., 1::2])
        rotated = np.stack([turned.real, turned.imag], axis=-1).reshape(*kv.shape[:2], 64)
    else:
        turned = (kv[..., 512:544] + 1j * kv[..., 544:]) * (cos[..., :32] + 1j * sin[..., 32:])
        rotated = np.concatenate([turned.real, turned.imag], axis=-1)
    return np.concatenate([normed(kv[..., :512], weights[:512]), rotated], axis=-1)


anywhere = pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)


@pytest.mark.sampled
@anywhere
@pytest.mark.parametrize(
    "lens, q_len, query_rank, page, config",
    [
        ([70, 0, 1, 128], 2, 256, 64, RopeConfig(yarn=YARN)),
        ([17, 33], 1, None, 16, RopeConfig(interleaved=False)),
        ([65], 1, 96, 64, RopeConfig()),  # the kernel has no threads for such queries: XLA does
    ],
)
def test_matches_float64_and_touches_nothing_else(
    lens, q_len, query_rank, page, config, implementation
):
    args, positions = arguments(lens, q_len, query_rank, config, page=page)
    kv, q, weights, cache, tables, seq_lens = args
    queries, written = append(args, positions, config, implementation)
    expected = expected_latents(kv, weights[1], positions, config)
    untouched = np.ones(cache.shape[:3], bool)
    for row, length in enumerate(lens):
        for token in range(q_len):
            position = length - q_len + token
            if length and position >= 0:
                place = (1, int(tables[row, position // page]), position % page)
                untouched[place] = False
                got = np.asarray(written[place], np.float64)
                np.testing.assert_allclose(got, expected[row, token], rtol=2**-7, atol=1e-5)
    bits = [np.asarray(x).view(np.uint16)[untouched] for x in (cache, written)]
    np.testing.assert_array_equal(*bits)
    if q is None:
        assert queries is None
    else:
        wanted = normed(np.asarray(q, np.float64), np.asarray(weights[1, 576:], np.float64))
        assert queries.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(queries, np.float64), wanted, rtol=2**-7, atol=1e-6)


@both_devices
def test_the_kernel_gives_the_bits_of_the_reference(implementation):
    config = RopeConfig()
    args, positions = arguments([70, 3], 2, 128, config)
    # A plain cache and one layer's weights.
    args = (*args[:2], args[2][0], args[3][1], *args[4:])
    queries, written = append(args, positions, config, implementation, layer=None)
    wanted = append(args, positions, config, "xla", layer=None)
    # On a GPU the sum of squares has another order: a rounding apart at most.
    exact = implementation == "mosaic_gpu_interpret"
    for got, expected in zip((queries, written), wanted, strict=True):
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(got, expected, rtol=0 if exact else 2**-7)


EDGES = np.float32([np.inf, -np.inf, np.nan, 0, 1e-40, 3e38])


def edge_arguments(config):
    """A row of a token an edge, in a latent dim and in a rope dim; and where they are written."""
    args, positions = arguments([66], len(EDGES), None, config)
    kv, tables = args[0], np.asarray(args[4])
    kv = kv.at[..., jnp.array([9, 530])].set(EDGES[:, None])
    at = np.asarray(positions)
    return (kv, *args[1:]), positions, (1, np.take_along_axis(tables, at // 64, axis=1), at % 64)


@both_devices
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.gpu)])
def test_inf_nan_and_extremes_are_written_as_the_reference_writes_them(dtype, implementation):
    config = RopeConfig()
    args, positions, place = edge_arguments(config)
    args = (*args[:3], args[3].astype(dtype), *args[4:])
    found, expected = (
        np.asarray(append(args, positions, config, some)[1][place], np.float32)
        for some in (implementation, "xla")
    )
    # A GPU takes subnormal numbers for 0, and sums squares in another order.
    exact = implementation == "mosaic_gpu_interpret"
    tolerance = dict(rtol=0) if exact else dict(rtol=2**-7, atol=2**-24)
    np.testing.assert_allclose(found, expected, **tolerance)  # a NaN of either sign is one
    rotated = found[0, :3, 512:]
    assert not np.isfinite(rotated[:, 18:20]).any()  # the pair of dim 530
    assert np.isfinite(np.delete(rotated, [18, 19], axis=1)).all()


@pytest.mark.parametrize("kv_scale", [None, 2.0**-3])
def test_an_fp8_cache_holds_no_inf(kv_scale):
    """Of what a float32 cache would hold, finite numbers saturate and others are NaN."""
    config = RopeConfig()
    args, positions, place = edge_arguments(config)
    weights = args[2].at[:, 2:9].set(3e38)  # finite times some numbers, Inf times others

    def written(dtype, kv_scale=None):
        cache = jnp.zeros((*args[3].shape[:3], LatentFormat(dtype).width), dtype)
        changed = (args[0], None, weights, cache, *args[4:])
        return np.asarray(append(changed, positions, config, "xla", kv_scale=kv_scale)[1][place])

    held = written("float32").reshape(-1, 576)
    assert np.isinf(held[:, :512]).any() and np.isinf(held[:, 512:]).any()
    if kv_scale:
        found, expected = written("float8_e4m3fn", kv_scale), saturated(held, kv_scale)
    else:
        found, expected = written("uint8"), tokens_as_bytes(held, 512)
        found, expected = found[..., :528], expected[:, :528]  # its rope numbers are not FP8
    found, expected = found.reshape(expected.shape).view(np.uint8), expected.view(np.uint8)
    dims = 576 if kv_scale else 512
    nan = np.pad(~np.isfinite(held[:, :dims]), ((0, 0), (0, found.shape[1] - dims)))
    np.testing.assert_array_equal(found[nan] & 0x7F, 0x7F)  # of either sign
    np.testing.assert_array_equal(found[~nan], expected[~nan])


@pytest.mark.sampled
@anywhere
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_padding_tokens_leave_nothing_behind(poison, implementation):
    """A padding row, and the token before a row's first."""
    config, real = RopeConfig(), np.array([[1, 1], [0, 0], [0, 1]], bool)
    args, positions = arguments([70, 0, 1], 2, 128, config)
    kv, q, *rest = args
    poisoned = (jnp.where(real[..., None], x, poison) for x in (kv, q))
    queries, cache = append(args, positions, config, implementation)
    found, written = append((*poisoned, *rest), positions, config, implementation)
    for one, other in ((found[real], queries[real]), (written, cache)):
        one, other = (np.asarray(x).view(np.uint16) for x in (one, other))
        np.testing.assert_array_equal(one, other)


@anywhere
def test_rows_with_fewer_new_tokens_than_others(implementation):
    """A row's first n tokens are written as those of a batch of n tokens a row."""
    config, lens, new = RopeConfig(), [70, 3], [1, 2]
    args, _ = arguments(lens, 2, 128, config)
    query_lens = jnp.asarray(new, jnp.int32)
    positions = (args[5] - query_lens)[:, None] + jnp.arange(2)
    _, written = append(args, positions, config, implementation, query_lens=query_lens)
    page = int(args[4][0, 1])  # of the first row's tokens 64 to 69
    bits = [np.array(x).view(np.uint16) for x in (args[3], written)]
    same = (bits[0] == bits[1]).all(-1)
    assert same[1, page, 4] and not same[1, page, 5]  # only the last token is new, and its first
    one = np.asarray(written[1, page, 5], np.float64)
    expected = expected_latents(args[0], args[2][1], positions, config)[0, 0]
    np.testing.assert_allclose(one, expected, rtol=2**-7, atol=1e-5)
    assert same.sum() == same.size - 3


@pytest.mark.parametrize("interleaved", [True, False])
def test_no_race_in_the_interpreter(interleaved):
    """Rows of one token and of two, with compressed queries, beside one of padding."""
    config = RopeConfig(interleaved=interleaved)
    args, positions = arguments([70, 0, 33], 2, 128, config)
    given = dict(query_lens=jnp.asarray([2, 0, 1], jnp.int32), layer=1)
    angles = rotation(positions, config).angles
    with no_races():
        found = jax.block_until_ready(
            mla_append_mosaic(
                *args, angles=angles, interleaved=interleaved, eps=1e-5, dtype=jnp.bfloat16,
                interpret=True, **given,
            )
        )  # fmt: skip
    wanted = append(args, positions, config, "xla", **given)
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


@both_devices
@pytest.mark.parametrize("page_number", [-1, 10**6])
def test_a_page_that_does_not_exist_is_not_written(page_number, implementation):
    config = RopeConfig()
    args, positions = arguments([70], 1, None, config)
    tables = jnp.full_like(args[4], page_number)

    @jax.jit  # traced, or the page would be refused
    def step(tables):
        return append((*args[:4], tables, args[5]), positions, config, implementation)

    _, written = step(tables)
    before, after = (np.asarray(x).view(np.uint16) for x in (args[3], written))
    np.testing.assert_array_equal(before, after)


def write_beyond(op, size, implementation):
    """Two tokens written by `op` to the last page of a cache of more than `size` elements: what the
    page holds of them, what it should, and which tokens of the cache are not as they were."""
    config, pages = RopeConfig(), size // (64 * 576) + 4
    (kv, _, weights, *_, seq_lens), positions = arguments([66], 2, None, config)
    cache = jnp.ones((1, pages, 64, 576), jnp.bfloat16)
    addresses = jnp.asarray([[1, pages - 1]], jnp.int32), seq_lens
    if op == "mla_append":
        expected = expected_latents(kv, weights[1], positions, config)
        given = dict(rotation=rotation(positions, config), config=config, eps=1e-5)

        def step(cache):
            weight = weights[1:]
            return mla_append(
                kv, None, weight, cache, *addresses, **given, layer=0, implementation=implementation
            )[1]
    else:
        expected = np.asarray(kv.astype(jnp.bfloat16), np.float64)

        def step(cache):
            return mla_cache_write(cache, kv, *addresses, layer=0)

    cache = jax.jit(step, donate_argnums=0)(cache)
    changed = jax.jit(lambda cache: (cache != 1).any(axis=-1))(cache)
    return np.asarray(cache[0, -1, :2], np.float64), expected[0], np.argwhere(changed).tolist()


@pytest.mark.parametrize("op", ["mla_append", "mla_cache_write"])
@pytest.mark.parametrize(
    "size, implementation",
    [
        (2**20, "xla"),
        pytest.param(2**31, "mosaic_gpu", marks=[pytest.mark.gpu, pytest.mark.large]),
    ],
)
def test_pages_beyond_2_31_elements(op, size, implementation):
    found, expected, changed = write_beyond(op, size, implementation)
    tolerance = dict(rtol=2**-7, atol=1e-5) if op == "mla_append" else dict(rtol=0)
    np.testing.assert_allclose(found, expected, **tolerance)
    page = size // (64 * 576) + 3
    assert changed == [[0, page, 0], [0, page, 1]]


def test_bad_arguments_are_named():
    config = RopeConfig()
    args, positions = arguments([70], 1, None, config)
    with pytest.raises(ValueError, match=r"mla_append: weights \(2, 575\) must be float32 with W"):
        append((*args[:2], args[2][:, 1:], *args[3:]), positions, config, None)
    with pytest.raises(ValueError, match=r"rotation must be for positions \[B, S\] = \[1, 1\]"):
        append(args, jnp.zeros((1, 2), jnp.int32), config, None)
    with pytest.raises(TypeError, match=r"kv must be .*, got int32 \(1, 1, 576\)"):
        append((args[0].astype(jnp.int32), *args[1:]), positions, config, None)
    op = functools.partial(mla_append, config=config, layer=0)
    given = rotation(positions, config)
    with pytest.raises(TypeError, match="mla_append: weights must be an array, got list"):
        op(*args[:2], [1.0], *args[3:], rotation=given)
    with pytest.raises(
        TypeError, match=r"mla_append: rotation must be .* got float32 \(1, 1, 128\)"
    ):
        op(*args, rotation=given.angles)
    for wrong in (None, 64):
        with pytest.raises(TypeError, match="mla_append: config must be a .*RopeConfig, got "):
            mla_append(*args, config=wrong, layer=0, rotation=given)
    for i, name in enumerate(("kv", "q", "weights", "kv_cache", "block_tables", "seq_lens")):
        words = "must be (an array, got list|integers, got float)"
        with pytest.raises(TypeError, match=f"mla_append: {name} {words}"):
            op(*args[:i], [1.0], *args[i + 1 :], rotation=given)
    with pytest.raises(ValueError, match="kv_cache .* is a stack of layers; give layer="):
        append(args, positions, config, None, layer=None)
    with pytest.raises(ValueError, match=r"weights \(2, 576\) are a stack of layers; give layer="):
        append((*args[:3], args[3][1], *args[4:]), positions, config, None, layer=None)
    with pytest.raises(ValueError, match="kv_scale is only for a float8_e4m3fn cache"):
        op = functools.partial(mla_append, config=config, rotation=rotation(positions, config))
        op(*args, layer=0, kv_scale=2.0, implementation="mosaic_gpu_interpret")
    with pytest.raises(NotImplementedError, match="P = 64, got R=544, P=32"):
        small = RopeConfig(dim=32)
        append(args, positions, small, "mosaic_gpu_interpret")


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (dict(kv_norm=None), TypeError, "kv_norm must be an array, got NoneType"),
        (dict(kv_norm=[1.0]), TypeError, "kv_norm must be an array, got list"),
        (dict(kv_norm=np.ones((2, 5), np.int32)), TypeError, r"kv_norm must .*int32 \(2, 5\)"),
        (dict(kv_norm=np.float32(1)), ValueError, r"kv_norm \[R\] needs 1 axes.*shape \(\)"),
        (dict(q_norm=[1.0]), TypeError, "q_norm must be an array, got list"),
        (dict(q_norm=np.ones(3)), ValueError, r"q_norm \[L, Q\] needs 2 axes.*shape \(3,\)"),
        (dict(q_norm=np.ones((3, 2))), ValueError, r"q_norm .*L = 3, but kv_norm .*L = 2"),
        (dict(kv_norm=np.ones((5, 2))), ValueError, r"q_norm .*L = 2, but kv_norm .*L = 5"),
        (dict(rope_dim=-1), ValueError, "rope_dim must be at least 0, got -1"),
        (dict(rope_dim=True), TypeError, "rope_dim must be an integer, got bool"),
        (dict(rope_dim=4.0), TypeError, "rope_dim must be an integer, got float"),
    ],
)  # fmt: skip
def test_packing_names_the_argument_that_does_not_fit(changed, error, words):
    good = dict(kv_norm=np.ones((2, 5)), q_norm=np.ones((2, 3)), rope_dim=4)
    assert pack_mla_weights(**good).shape == (2, 12)
    with pytest.raises(error, match=f"pack_mla_weights: {words}"):
        pack_mla_weights(**(good | changed))
