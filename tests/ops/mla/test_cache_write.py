"""FP8 latent caches against an encoder and a decoder in struct and ml_dtypes, byte by byte, and the
ops that write and read them against float64 attention over what those bytes mean.
"""

import functools
import re
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.numerics.rope import RopeConfig, Rotation, rope, rotation
from tests.helpers.draws import normal
from tests.helpers.kernel_cases import x64
from tests.helpers.mla_cases import assert_same_bits, decode_numpy, prefill_numpy

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
BLOCK_SCALED = LatentFormat(np.uint8)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """A test runs on both, and on a machine that has both not twice on one."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield


def encode_block(block):
    """128 numbers -> (power-of-two scale, 128 bytes): the smallest scale that 448 of it holds."""
    finite = block[np.isfinite(block)].astype(np.float64)
    exponent = -117
    while 448 * 2.0**exponent < np.abs(finite).max(initial=0) and exponent < 119:
        exponent += 1
    return 2.0**exponent, saturated(block, 2.0**exponent).tobytes()


def saturated(numbers, scale):
    """e4m3, with NaN for what is not finite."""
    scaled = np.clip(np.float64(numbers) / scale, -448, 448)
    return np.where(np.isfinite(numbers), scaled, np.nan).astype(E4M3)


def encode_numpy(token, rank):
    """The bytes of one token's latent."""
    blocks = [encode_block(token[i : i + 128]) for i in range(0, rank, 128)]
    numbers, scales = b"".join(b for _, b in blocks), [s for s, _ in blocks]
    return numbers + struct.pack(f"<{len(scales)}f", *scales) + token[rank:].astype(BF16).tobytes()


def decode_bytes(stored, rank):
    """The latent, float64, of one token's bytes."""
    numbers = np.frombuffer(stored[:rank], E4M3).astype(np.float64)
    scales = struct.unpack(f"<{rank // 128}f", stored[rank : rank + rank // 32])
    rope = np.frombuffer(stored[rank + rank // 32 :], BF16).astype(np.float64)
    return np.concatenate([numbers * np.repeat(scales, 128), rope])


def tokens_as_bytes(latents, rank):
    flat = [np.frombuffer(encode_numpy(x, rank), np.uint8) for x in latents.reshape(-1, rank + 64)]
    return np.stack(flat).reshape(*latents.shape[:-1], -1)


# The formats


def test_a_token_takes_the_bytes_that_its_format_says():
    sizes = {"bfloat16": 1152, "float16": 1152, "float32": 2304, "float8_e4m3fn": 576, "uint8": 656}
    for dtype, nbytes in sizes.items():
        format = LatentFormat(dtype)
        assert format.nbytes == nbytes
        assert format.width == (656 if dtype == "uint8" else 576)
        assert jnp.zeros((2, format.width), format.dtype).nbytes == 2 * nbytes
    assert LatentFormat("uint8", 512, 0).nbytes == 528
    assert LatentFormat(jnp.uint8, 256, 64).nbytes == 256 + 8 + 128
    assert LatentFormat(jnp.bfloat16, 24, 8) == LatentFormat("bfloat16", 24, 8)


@pytest.mark.parametrize(
    "args, error, words",
    [
        (("float8_e5m2",), TypeError, "dtype must be bfloat16 .*or uint8, got float8_e5m2"),
        (("int32",), TypeError, "got int32"),
        (("uint8", 500), ValueError, "multiple of 128, got 500; use float8_e4m3fn with kv_scale"),
        (("bfloat16", 0), ValueError, "kv_lora_rank must be at least 1 .*got 0 and 64"),
        (("uint8", 512, -1), ValueError, "qk_rope_head_dim at least 0, got 512 and -1"),
        (("bfloat16", True), TypeError, "kv_lora_rank must be an integer, got bool True"),
        (("bfloat16", 512.0), TypeError, "kv_lora_rank must be an integer, got float 512.0"),
        (("bfloat16", 512, None), TypeError, "qk_rope_head_dim must be an integer, got NoneType"),
    ],
)
def test_a_format_that_does_not_exist_is_an_error(args, error, words):
    with pytest.raises(error, match=words):
        LatentFormat(*args)


def test_block_scaled_bytes_written_out():
    """512 numbers, 4 scales, 64 rope numbers: FlashMLA's layout, little-endian."""
    token = np.concatenate([np.repeat([448, -1.0, 0, 449], 128), np.full(64, -2.0)])
    stored = np.asarray(BLOCK_SCALED.pack(jnp.float32(token))).tobytes()
    expected = (
        (b"\x7e" * 128, b"\xf8" * 128, b"\x00" * 128, b"\x76" * 128),
        (1.0, 2.0**-8, 2.0**-117, 2.0),
        b"\x00\xc0" * 64,
    )
    assert stored == b"".join(expected[0]) + struct.pack("<4f", *expected[1]) + expected[2]


def hard_latents(rank, rope, seed=0):
    """Magnitudes from the smallest to the largest, ties, the edges of a scale, NaN, inf, zeros."""
    rng = np.random.default_rng(seed)
    latents = rng.standard_normal((40, rank + rope))
    latents *= 2.0 ** rng.uniform(-12, 12, latents.shape)  # subnormal beside the block's largest
    latents[:12] *= 2.0 ** rng.integers(-110, 110, (12, 1))
    latents = latents.astype(np.float32)
    edge = np.float32(448 * 2.0**-3)
    latents[12:16, 0] = edge, np.nextafter(edge, np.float32(99)), 2 * edge, edge / 2
    latents[12:16, 1:rank] = rng.integers(-40, 40, (4, rank - 1)) / 8  # many ties
    latents[16] = 0
    latents[17, ::3], latents[18, 5], latents[19] = np.nan, np.inf, np.nan
    latents[20, 7], latents[21] = -np.inf, 3e38
    latents[18, -1], latents[20, 130 % rank] = -np.inf, np.inf
    latents[21, :4] = np.float32([3.4e38, -3.4e38, np.inf, 3.2e38])
    latents[16, 1:4] = np.float32([1e-45, -1e-40, 2.0**-126])
    return latents


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rank, rope", [(512, 64), (128, 0), (256, 32)])
def test_block_scaled_packs_and_unpacks_byte_by_byte(rank, rope):
    format = LatentFormat(np.uint8, rank, rope)
    latents = hard_latents(rank, rope)
    stored = np.asarray(jax.jit(format.pack)(latents))
    assert stored.dtype == np.uint8 and stored.shape == (40, format.width)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = [np.frombuffer(encode_numpy(x, rank), np.uint8) for x in latents]
        values = np.float32([decode_bytes(x.tobytes(), rank) for x in expected])
    # The sign of a NaN is free.
    not_finite = ~np.isfinite(latents[:, :rank])
    nan = np.concatenate([not_finite, np.zeros((40, rank // 32), bool)], axis=1)
    np.testing.assert_array_equal(stored[:, : nan.shape[1]][nan] & 0x7F, 0x7F)
    rope_nan = np.repeat(np.isnan(latents[:, rank:]), 2, axis=1)
    same = ~np.concatenate([nan, rope_nan], axis=1)
    np.testing.assert_array_equal(stored[same], np.stack(expected)[same])
    unpacked = np.asarray(jax.jit(format.unpack)(stored))
    assert unpacked.dtype == np.float32
    np.testing.assert_array_equal(unpacked, values)
    # Inf and NaN spoil nothing beside them, and values keep 3 bits beyond the leading one.
    np.testing.assert_array_equal(np.isnan(unpacked[:, :rank]), not_finite)
    assert not np.isinf(unpacked[:, :rank]).any()
    ordinary = latents[22:, :rank].reshape(18, -1, 128)
    scale = np.abs(ordinary).max(-1, keepdims=True) / 448 * 2
    error = np.abs(unpacked[22:, :rank].reshape(ordinary.shape) - ordinary)
    assert (error <= np.maximum(np.abs(ordinary) / 16, scale * 2.0**-10)).all()


@pytest.mark.usefixtures("device")
def test_per_tensor_numbers_saturate_and_what_is_not_finite_is_nan():
    format, latents = LatentFormat("float8_e4m3fn"), hard_latents(512, 64)
    stored = np.asarray(jax.jit(format.pack)(latents, jnp.float32(0.25)))
    assert stored.dtype == E4M3
    expected, finite = saturated(latents, 0.25), np.isfinite(latents)
    assert_same_bits(stored[finite], expected[finite])
    assert np.isnan(np.float32(stored)[~finite]).all()
    values = np.asarray(jax.jit(format.unpack)(stored, jnp.float32(0.25)))
    assert values.dtype == np.float32 and np.nanmax(np.abs(values)) == 448 * 0.25
    np.testing.assert_array_equal(values, np.float32(expected) * 0.25)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_float64_numbers_beyond_float32_saturate(dtype):
    format, kv_scale = LatentFormat(dtype, 128, 0), 2.0 if dtype == "float8_e4m3fn" else None
    with x64():
        latent = jnp.zeros(128, jnp.float64).at[:3].set(jnp.array([1e300, -1e300, jnp.inf]))
        found = np.asarray(format.unpack(format.pack(latent, kv_scale), kv_scale))
    largest = 448 * (kv_scale or 2.0**119)
    np.testing.assert_array_equal(found[:4], np.float32([largest, -largest, np.nan, 0]))


# Writing and reading a paged cache

LENS = [0, 1, 15, 16, 17, 40]
RANK, ROPE = 128, 64
KV_SCALE = 2.0**-5


@pytest.fixture(scope="module", params=["uint8", "float8_e4m3fn"])
def paged(request):
    """A stack whose pages were all NaN before `mla_cache_write`, and what its tokens mean."""
    format = LatentFormat(request.param, RANK, ROPE)
    rng = np.random.default_rng(0)
    page, pages = 16, 14
    tables = np.where(np.arange(4) % 2, -1, 2147480000) + np.zeros((len(LENS), 1), np.int32)
    order = iter(rng.permutation(pages))
    for b, n in enumerate(LENS):
        tables[b, : -(-n // page)] = [next(order) for _ in range(-(-n // page))]
    tables = tables.astype(np.int32)
    latents = rng.standard_normal((len(LENS), max(LENS), RANK + ROPE)).astype(np.float32)
    latents[:, ::5] *= 50  # beyond 448 * KV_SCALE: saturates
    if format.block_scaled:
        stored = tokens_as_bytes(latents, RANK)
        means = [decode_bytes(x.tobytes(), RANK) for x in stored.reshape(-1, format.width)]
        scale = None
    else:
        stored = np.clip(latents / KV_SCALE, -448, 448).astype(E4M3)
        means, scale = np.float64(stored) * KV_SCALE, KV_SCALE
    means = np.reshape(means, latents.shape)
    nan = np.full((2, pages, page, format.width), 0xFF, np.uint8).view(format.dtype)
    for b, n in enumerate(LENS):
        latents[b, n:] = np.nan
    lens = np.array(LENS, np.int32)
    expected = nan.copy()
    for b, n in enumerate(LENS):
        for t in range(n):
            expected[1, tables[b, t // page], t % page] = stored[b, t]
    write = jax.jit(
        lambda cache, latent: mla.mla_cache_write(
            cache, latent, tables, lens, query_lens=lens, layer=1, kv_scale=scale
        ),
        donate_argnums=0,
    )
    compiled = write.lower(nan, latents).compile()
    return dict(
        format=format,
        write=compiled,
        cache=np.asarray(compiled(jnp.asarray(nan), latents)),
        expected=expected,
        tables=tables,
        lens=lens,
        latents=[x[:n] for x, n in zip(latents, LENS, strict=True)],
        means=[x[:n] for x, n in zip(means, LENS, strict=True)],
        kwargs=dict(kv_scale=scale, layer=1),
    )


def test_what_is_written_is_the_new_tokens_bytes_in_place(paged):
    assert_same_bits(paged["cache"], paged["expected"])
    assert paged["write"].memory_analysis().alias_size_in_bytes == paged["cache"].nbytes
    if paged["format"].block_scaled:  # of float8 XLA's CPU backend makes float16 and back
        stack = ",".join(map(str, paged["cache"].shape))
        made = re.findall(rf"= \w+\[{stack}\]\S* (\w+)\(", paged["write"].as_text())
        assert made and set(made) <= {"parameter", "scatter", "fusion"}


def run_decode(paged, q, cache=None, implementation=None, **changed):
    args = (q, paged["cache"] if cache is None else cache, paged["tables"], paged["lens"])
    kwargs = dict(scale=0.1, kv_lora_rank=RANK, implementation=implementation)
    return mla.mla_decode(*args, **(kwargs | paged["kwargs"] | changed))


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_decode_reads_what_the_bytes_mean(paged, dtype, atol):
    q = jnp.asarray(normal(6, 2, 3, RANK + ROPE, scale=0.3), dtype)
    out, lse = run_decode(paged, q)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    expected, expected_lse = decode_numpy(np.float64(q), paged["means"], 0.1, RANK)
    largest = max(np.abs(x).max(initial=0) for x in paged["means"])
    np.testing.assert_allclose(np.float64(out), expected, atol=atol * largest)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert_same_bits(out[0], np.zeros_like(out[0]))
    assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("paged", ["float8_e4m3fn"], indirect=True)
def test_decode_gradients_of_an_fp8_cache(paged):
    """Of the queries and of the scale, with NaN wherever no row looks."""
    q = normal(6, 2, 3, RANK + ROPE, scale=0.3)
    weight = normal(6, 2, 3, RANK, seed=5)

    def loss(q, scale):
        return (run_decode(paged, q, kv_scale=scale)[0] * weight).sum()

    def loss_numpy(q, ratio):
        means = [x * ratio for x in paged["means"]]
        return (decode_numpy(q, means, 0.1, RANK)[0] * weight).sum()

    along, step = normal(*q.shape, seed=6).astype(np.float64), 1e-5
    grad_q, grad_scale = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, jnp.float32(KV_SCALE))
    slope = loss_numpy(q + step * along, 1) - loss_numpy(q - step * along, 1)
    np.testing.assert_allclose((np.float64(grad_q) * along).sum(), slope / 2 / step, rtol=1e-3)
    slope = loss_numpy(q, 1 + step) - loss_numpy(q, 1 - step)
    np.testing.assert_allclose(grad_scale * KV_SCALE, slope / 2 / step, rtol=1e-3)


def test_a_nan_of_a_row_stays_in_it_and_a_missing_page_is_nan(paged):
    q = normal(6, 2, 3, RANK + ROPE, scale=0.3)
    run = jax.jit(functools.partial(run_decode, paged))
    clean = run(q, paged["cache"])[0]
    cache = paged["cache"].copy()
    cache.view(np.uint8)[1, paged["tables"][3, 0], 2, 9] = 0x7F
    out = run(q, cache)[0]
    assert np.isnan(out[3, 1]).any() and np.isfinite(np.delete(out, 3, 0)).all()
    assert_same_bits(np.delete(out, 3, 0), np.delete(clean, 3, 0))
    tables = paged["tables"].copy()
    tables[4, 1] = -1
    out = jax.jit(lambda tables: run_decode(paged | dict(tables=tables), q)[0])(tables)
    assert np.isnan(out[4, 1]).all()
    assert_same_bits(np.delete(out, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "uint8"])
def test_an_inf_latent_shows_in_the_row_that_reads_it(dtype):
    """Of a quantized cache as of any other."""
    format = LatentFormat(dtype, RANK, ROPE)
    cache = jnp.zeros((3, 16, format.width), format.dtype)
    latent = np.ones((3, 2, RANK + ROPE), np.float32)
    latent[0, 1, 9] = latent[1, 0, RANK + 3] = np.inf
    pages, lens = np.arange(3, dtype=np.int32)[:, None], np.full(3, 2, np.int32)
    kwargs = dict(kv_scale=2.0) if format.per_tensor else {}
    cache = mla.mla_cache_write(cache, latent, pages, lens, **kwargs)
    q = np.ones((3, 1, 1, RANK + ROPE), np.float32)
    out, lse = mla.mla_decode(q, cache, pages, lens, scale=0.1, kv_lora_rank=RANK, **kwargs)
    assert np.isnan(out[:2]).all() and np.isnan(lse[:2]).all()
    np.testing.assert_allclose(out[2], 1, rtol=1e-6)


def test_only_a_block_of_pages_is_unpacked_at_a_time(paged):
    """Decode and prefill make no floating array as large as a layer."""
    tables = np.zeros((1, 200), np.int32)
    cache = jax.ShapeDtypeStruct((2, 200, 16, paged["format"].width), paged["format"].dtype)
    args = (tables, np.array([3], np.int32))
    q = jnp.zeros((1, 4, 2, RANK + ROPE))
    latent, w = jnp.zeros((1, 4, RANK + ROPE)), jnp.zeros((2, RANK, RANK))
    new = np.array([2], np.int32)
    for step in (
        lambda cache: mla.mla_decode(
            q, cache, *args, scale=1.0, kv_lora_rank=RANK, **paged["kwargs"]
        ),
        lambda cache: mla.mla_prefill(
            q, latent, w, w, cache, *args, new, scale=1.0, block=256, **paged["kwargs"]
        ),
    ):
        sizes = [
            int(np.prod([int(n) for n in shape.split(",")]))
            for shape in re.findall(
                r"(?:f32|bf16|f16)\[([\d,]+)\]", str(jax.make_jaxpr(step)(cache))
            )
        ]
        assert max(sizes) < 200 * 16 * (RANK + ROPE) // 4


def test_prefill_reads_its_prefix_from_an_fp8_cache(paged):
    heads, nope, values = 2, 8, 6
    new = np.array([2, 1, 4, 0, 3, 4], np.int32)  # row 0 is padding
    w_uk = normal(heads, nope, RANK, seed=2, scale=0.1)
    w_uv = normal(heads, RANK, values, seed=3, scale=0.1)
    q = normal(6, 4, heads, nope + ROPE, scale=0.3)
    latent = np.full((6, 4, RANK + ROPE), np.nan, np.float32)
    # A row sees its prefix as stored and its new tokens as they were given.
    seen = [x.copy() for x in paged["means"]]
    for b, count in enumerate(new):
        q[b, count:] = np.nan
        if LENS[b] and count:
            seen[b][-count:] = latent[b, :count] = paged["latents"][b][-count:]
    out, lse = mla.mla_prefill(
        q, latent, w_uk, w_uv, paged["cache"], paged["tables"], paged["lens"], new, scale=0.1,
        block=16, **paged["kwargs"],
    )  # fmt: skip
    expected, expected_lse = prefill_numpy(q, seen, new, w_uk, w_uv, 0.1)
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    for b, count in enumerate(new):
        padding = np.asarray(out)[b, count if LENS[b] else 0 :]
        assert_same_bits(padding, np.zeros_like(padding))


def test_the_kernel_says_that_it_reads_no_other_rank(paged):
    q = jnp.zeros((6, 1, 2, RANK + ROPE), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"kv_lora_rank={RANK}"):
        run_decode(paged, q, implementation="mosaic_gpu_interpret")


def test_a_scale_may_be_traced_and_a_layers_own():
    """As one of float32 [L], indexed in a scan over layers."""
    scales = jnp.array([0.5, 0.125], jnp.float32)
    tables, lens = np.array([[1, 0]], np.int32), np.array([20], np.int32)
    latent = normal(1, 20, RANK + ROPE)
    q = normal(1, 1, 2, RANK + ROPE, scale=0.3)

    @jax.jit
    def step(cache, scales):
        def one(cache, xs):
            layer, kv_scale = xs
            kwargs = dict(layer=layer, kv_scale=kv_scale)
            cache = mla.mla_cache_write(cache, latent, tables, lens, **kwargs)
            return cache, mla.mla_decode(
                q, cache, tables, lens, scale=0.1, kv_lora_rank=RANK, **kwargs
            )

        return jax.lax.scan(one, cache, (jnp.arange(2), scales))

    cache = jnp.full((2, 2, 16, RANK + ROPE), jnp.nan, jnp.float8_e4m3fn)
    cache, (out, lse) = step(cache, scales)
    for layer, scale in enumerate((0.5, 0.125)):
        means = np.float64((latent[0] / scale).astype(E4M3)) * scale
        expected, expected_lse = decode_numpy(q, [means], 0.1, RANK)
        np.testing.assert_allclose(out[layer], expected, atol=1e-5)
        np.testing.assert_allclose(lse[layer], expected_lse, atol=1e-5)


CONFIG = RopeConfig(ROPE)


def write_three_tokens(cache, latent, angles, kv_scale, *, rotated_before):
    tables, lens = np.array([[1, 0], [-1, -1]], np.int32), np.array([18, 0], np.int32)
    kwargs = dict(rotation=Rotation(angles), config=CONFIG)
    if rotated_before:
        turned = rope(latent[..., RANK:], Rotation(angles), CONFIG)
        latent, kwargs = jnp.concatenate([latent[..., :RANK], turned], axis=-1), {}
    return mla.mla_cache_write(cache, latent, tables, lens, kv_scale=kv_scale, **kwargs)


@pytest.mark.sampled
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8"])
def test_rotation_on_the_way_is_rotation_before(dtype):
    format = LatentFormat(dtype, RANK, ROPE)
    empty = jnp.zeros((2, 16, format.width), dtype)
    angles = rotation(jnp.array([[15, 16, 17], [0, 1, 2]]), CONFIG).angles
    operands = empty, jnp.asarray(normal(2, 3, RANK + ROPE), jnp.bfloat16), angles
    kv_scale = KV_SCALE if format.per_tensor else None
    write = functools.partial(write_three_tokens, kv_scale=kv_scale)
    cache, expected = (
        jax.jit(functools.partial(write, rotated_before=before))(*operands)
        for before in (False, True)
    )
    assert_same_bits(np.asarray(cache), np.asarray(expected))
    written = np.asarray(cache).view(np.uint8).any(axis=-1)
    assert written[1, 15] and written[0, :2].all() and written.sum() == 3


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(config=None), "must be given together, got rotation= without config="),
        (dict(rotation=None), "must be given together, got config= without rotation="),
        (
            dict(config=RopeConfig(32)),
            r"config.dim=32 does not fit latent \(2, 3, 192\), which has 64",
        ),
        (dict(rotation=Rotation(np.zeros((2, 1, 128)))), r"\[B, S\] = \[2, 3\].*\(2, 1, 128\)"),
    ],
)
def test_a_rotation_that_does_not_fit_is_named(changed, words):
    kwargs = dict(rotation=Rotation(np.zeros((2, 3, 128))), config=CONFIG) | changed
    with pytest.raises(ValueError, match="mla_cache_write: .*" + words):
        mla.mla_cache_write(BYTE_CACHE, TOKENS, **ADDRESSES, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, kernels", [("bfloat16", 1), ("float8_e4m3fn", 1), ("uint8", 2)])
def test_rotation_quantization_and_write_are_one_kernel_behind_the_scales(dtype, kernels):
    format = LatentFormat(dtype, RANK, ROPE)
    shapes = (2, 16, format.width), (2, 3, RANK + ROPE), (2, 3, 2 * ROPE)
    operands = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in zip(shapes, (dtype, jnp.bfloat16, jnp.float32), strict=True)
    ]
    kv_scale = KV_SCALE if format.per_tensor else None
    write = functools.partial(write_three_tokens, kv_scale=kv_scale, rotated_before=False)
    compiled = jax.jit(write, donate_argnums=0).lower(*operands).compile()
    entry = compiled.as_text().partition("ENTRY")[2]
    assert len(re.findall(r" (?:fusion|copy|custom-call)\(", entry)) == kernels


# Validation

FP8_CACHE = np.zeros((5, 16, RANK + ROPE), E4M3)
BYTE_CACHE = np.zeros((5, 16, 260), np.uint8)  # 128 + 4 + 2 * 64
ADDRESSES = dict(block_tables=np.zeros((2, 4), np.int32), seq_lens=np.zeros(2, np.int32))
TOKENS = np.zeros((2, 3, RANK + ROPE), np.float32)
W = np.zeros((2, 8, RANK), np.float32), np.zeros((2, RANK, 6), np.float32)
OPS = {
    "mla_decode": lambda **kw: mla.mla_decode(
        TOKENS[:, :, None], scale=1.0, kv_lora_rank=RANK, **ADDRESSES, **kw
    ),
    "mla_prefill": lambda **kw: mla.mla_prefill(
        np.zeros((2, 3, 2, 8 + ROPE), np.float32), TOKENS, *W, scale=1.0,
        query_lens=np.zeros(2, np.int32), **ADDRESSES, **kw,
    ),
    "mla_cache_write": lambda **kw: mla.mla_cache_write(latent=TOKENS, **ADDRESSES, **kw),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "cache, kv_scale, error, words",
    [
        (FP8_CACHE, None, ValueError, r"\(5, 16, 192\) float8_e4m3fn needs kv_scale="),
        (FP8_CACHE, 0.0, ValueError, "kv_scale must be positive and finite, got 0.0"),
        (FP8_CACHE, float("nan"), ValueError, "kv_scale must be positive and finite, got nan"),
        (FP8_CACHE, np.float32(1e-45), ValueError, "kv_scale must be positive and finite"),
        (FP8_CACHE, jnp.float32(-1), ValueError, "kv_scale must be positive and finite, got -1.0"),
        (FP8_CACHE, True, TypeError, "kv_scale must be .*got bool"),
        (FP8_CACHE, "1", TypeError, "kv_scale must be a Python number .*got str"),
        (FP8_CACHE, np.ones(5, np.float32), TypeError, r"kv_scale .* scalar, got float32 \(5,\)"),
        (FP8_CACHE, np.ones((), np.int32), TypeError, r"kv_scale .* scalar, got int32"),
        (BYTE_CACHE, 1.0, ValueError, r"kv_cache \(5, 16, 260\) uint8 is not; drop kv_scale"),
        (np.float32(FP8_CACHE), 1.0, ValueError, r"\(5, 16, 192\) float32 is not; drop kv_scale"),
        (FP8_CACHE[..., 1:], 1.0, ValueError, r"kv_cache .*\(5, 16, 191\), so D = 191.*D = 192"),
        (
            BYTE_CACHE[..., 1:],
            None,
            ValueError,
            r"kv_cache \(5, 16, 259\) uint8 has 259 .*(260|656)",
        ),
        (BYTE_CACHE[0], None, ValueError, r"kv_cache \[N, C, Ds\] needs 3 axes.*\(16, 260\)"),
        (BYTE_CACHE[None], None, ValueError, r"kv_cache \(1, 5, 16, 260\) is a stack.*give layer="),
        (BYTE_CACHE.view(np.int8), None, TypeError, r"kv_cache .*, got int8 \(5, 16, 260\)"),
    ],
)
def test_ops_name_the_cache_or_scale_that_does_not_fit(op, cache, kv_scale, error, words):
    with pytest.raises(error, match=f"{op}: .*{words}"):
        OPS[op](kv_cache=cache, kv_scale=kv_scale)


def test_a_rank_without_whole_blocks_is_an_error():
    q, cache = np.zeros((2, 1, 3, 100), np.float32), np.zeros((5, 16, 100), np.uint8)
    with pytest.raises(
        ValueError, match=r"mla_decode: kv_cache \(5, 16, 100\) uint8: .*128, got 9"
    ):
        mla.mla_decode(q, cache, **ADDRESSES, scale=1.0, kv_lora_rank=96)
