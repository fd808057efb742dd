"""Products of a few tokens with a layer's FP8 matrices: the kernel against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, quantize
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns, interleave_columns
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear import fp8_linear
from jaxattn.kernels.linear.fp8_linear import choose, linears_fp8_mosaic
from jaxattn.kernels.linear.linear import LinearTileConfig
from jaxattn.ops.linear.fp8_linear import gated_fp8_layer, linear_fp8_layer
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import no_races, slow

# Compiled once for all tests of the same shapes.
deinterleaved = jax.jit(deinterleave_columns)


@jax.jit
def quantized(plain, noise):
    numbers, scale = quantize(plain)
    return interleave_columns(numbers), scale * jnp.exp(noise)


def case(tokens, inner, *sizes, layers=2, seed=0, dtype=jnp.bfloat16):
    """x, weights and scales; each block of weights is as large as no other."""
    draw, weights, scales = normals(seed), [], []
    x = draw(tokens, inner, dtype=dtype)
    for size in sizes:
        plain = draw(layers, size, inner, scale=inner**-0.5)
        weight, scale = quantized(plain, draw(layers, -(-size // BLOCK), -(-inner // BLOCK)))
        weights.append(weight)
        scales.append(scale)
    return x, weights, scales


@partial(jax.jit, static_argnames=("gated", "implementation"))
def scanned(x, weights, scales, gated, implementation="mosaic_gpu"):
    """The results of three layers, one after another in a scan."""

    def body(layer, _):
        op = gated_fp8_layer if gated else linear_fp8_layer
        ys = op(x, tuple(weights), tuple(scales), layer=layer, implementation=implementation)
        return layer + 1, (ys,) if gated else ys

    return jax.lax.scan(body, jnp.int32(0), None, 3)[1]


def wanted(x, weights, scales, layer, gated=False):
    x, products = np.asarray(x, np.float64), []
    for weight, scale in zip(weights, scales, strict=True):
        numbers = np.asarray(deinterleaved(np.asarray(weight)[layer])).astype(float)
        wide = np.kron(np.asarray(scale).astype(float)[layer], np.ones((BLOCK, BLOCK)))
        products.append(x @ (numbers * wide[: numbers.shape[0], : numbers.shape[1]]).T)
    if gated:
        return [products[0] / (1 + np.exp(-products[0])) * products[1]]
    return products


def close(found, expected, limit):
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one, np.float64)
        assert one.shape == other.shape and np.isfinite(one).all()
        assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tokens, inner, sizes, config",
    [
        (1, 512, (256,), LinearTileConfig(parts=4, stages=1)),
        (
            3,
            640,
            (128, 192),
            LinearTileConfig(parts=2, stages=2),
        ),  # parts of unequal shares, a tail of N
        (9, 384, (256, 128), LinearTileConfig(parts=1, stages=2)),
        (17, 1024, (128,), LinearTileConfig(parts=8, stages=1)),
        (32, 1024, (128, 128), LinearTileConfig(parts=2, stages=2)),  # as of more than 8 tokens
        (2, 256, (320,), None),
    ],
)
def test_the_kernel_in_the_interpreter(tokens, inner, sizes, config):
    x, weights, scales = case(tokens, inner, *sizes)
    with no_races(when=all(n % 128 == 0 for n in sizes)):
        found = at_once(
            linears_fp8_mosaic,
            x, weights, scales, layer=jnp.int32(0), affine=(1, 1), config=config, interpret=True,
            out_dtypes=[jnp.float32] * len(sizes),
        )  # fmt: skip
        jax.block_until_ready(found)
    close(found, wanted(x, weights, scales, 1), 1e-5)


def test_gate_and_up_are_one_launch():
    x, weights, scales = case(5, 512, 256, 256)
    with no_races():
        found = at_once(
            linears_fp8_mosaic,
            x, weights, scales, layer=1, gated=True, out_dtypes=[jnp.bfloat16], interpret=True,
            config=LinearTileConfig(parts=2, stages=1),
        )  # fmt: skip
        jax.block_until_ready(found)
    close(found, wanted(x, weights, scales, 1, gated=True), 3e-3)


@pytest.mark.parametrize("dtype, limit", [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-3)])
def test_the_reference_is_the_layers_product(dtype, limit):
    x, weights, scales = case(6, 208, 24, 264, dtype=dtype)  # blocks cut off by both edges
    found = linear_fp8_layer(x, weights, scales, layer=LayerIndex(jnp.int32(1), 1, 0))
    close(found, wanted(x, weights, scales, 1), limit)
    x, weights, scales = case(3, 256, 128, 128, dtype=dtype)
    found = gated_fp8_layer(x, weights, scales, layer=0, out_dtype=jnp.float32)
    close([found], wanted(x, weights, scales, 0, gated=True), 2 * limit)


def test_a_nan_in_a_token_or_in_another_layer_stays_there():
    x, weights, scales = case(4, 256, 128)
    scales = [scales[0].at[0].set(jnp.nan)]
    op = partial(linear_fp8_layer, layer=1, implementation="mosaic_gpu_interpret")
    clean, found = (op(each, weights, scales)[0] for each in (x, x.at[2].set(jnp.nan)))
    assert np.isfinite(clean).all() and np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(clean, 2, 0))


def test_the_gradient_of_tokens_is_the_references():
    x, weights, scales = case(3, 256, 128)

    def loss(x, implementation):
        op = partial(linear_fp8_layer, layer=jnp.int32(1), implementation=implementation)
        return (op(x, weights, scales)[0] ** 2).sum()

    found, expected = (
        jax.grad(jax.jit(loss, static_argnums=1))(x, by) for by in ("mosaic_gpu_interpret", "xla")
    )
    close([found], [np.asarray(expected, np.float64)], 1e-2)


@pytest.mark.parametrize(
    "tokens, inner, size, dtype, message",
    [
        (257, 128, 128, jnp.bfloat16, "1 to 256 tokens"),
        (4, 192, 128, jnp.bfloat16, "K a multiple of 128"),
        (4, 128, 136, jnp.bfloat16, "N a multiple of 64"),
        (4, 128, 64, jnp.bfloat16, "at least 128"),
        (4, 128, 128, jnp.float32, "x in bfloat16 or float16; got float32"),
    ],
)
def test_what_the_kernel_has_not_is_refused_by_name(tokens, inner, size, dtype, message):
    x, weights, scales = case(tokens, inner, size, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        linear_fp8_layer(x, weights, scales, layer=0, implementation="mosaic_gpu_interpret")


def test_bad_arguments_are_named():
    x, weights, scales = case(2, 256, 192, 128)
    op = partial(linear_fp8_layer, layer=0)
    with pytest.raises(ValueError, match=r"scales\[0\] must be float32 \[2, 2, 2\] for weights"):
        op(x, weights, [scales[0][:, :1], scales[1]])
    with pytest.raises(TypeError, match=r"weights\[1\]"):
        op(x, [weights[0], weights[1].astype(jnp.bfloat16)], scales)
    with pytest.raises(ValueError, match="2 weights have 1 scales"):
        op(x, weights, scales[:1])
    with pytest.raises(ValueError, match="x"):
        op(x[:, :128], weights, scales)
    with pytest.raises(ValueError, match="gate and up with the same shape"):
        gated_fp8_layer(x, tuple(weights), tuple(scales), layer=0)


SHAPES = [  # Qwen3-Next's, and DeepSeek-V3's
    (2048, (12288,), False),
    (4096, (2048,), False),
    (2048, (8192, 512, 512), False),
    (7168, (1536, 576), False),
    (7168, (2048, 2048), True),
    (16384, (7168,), False),
]
real = pytest.mark.parametrize("inner, sizes, gated", SHAPES)


def kernels_lowered(linears, tokens, inner, sizes, gated):
    """How many kernels a launch of `linears` is, lowered for a GPU."""
    shape = jax.ShapeDtypeStruct
    weights = [shape((4, size, inner), jnp.float8_e4m3fn) for size in sizes]
    scales = [shape((4, -(-size // 128), inner // 128), jnp.float32) for size in sizes]

    def step(x, weights, scales):
        dtypes = [jnp.float32] * (1 if gated else len(sizes))
        return linears(x, weights, scales, layer=1, out_dtypes=dtypes, gated=gated)

    traced = jax.jit(step).trace(shape((tokens, inner), jnp.bfloat16), weights, scales)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu")


@pytest.mark.sampled
@real
@pytest.mark.parametrize("tokens", [1, 32])
def test_real_shapes_are_lowered_for_a_gpu(inner, sizes, gated, tokens, monkeypatch):
    monkeypatch.setattr(fp8_linear, "require_hopper", lambda *args, **kwargs: None)
    assert kernels_lowered(linears_fp8_mosaic, tokens, inner, sizes, gated) == 1


@pytest.mark.parametrize("tokens", [1, 8, 16, 24, 32])
@real
def test_several_blocks_of_a_multiprocessor_fit(inner, sizes, gated, tokens):
    columns = -(-tokens // 8) * 8
    tiles = sum(-(-n // 128) for n in sizes[: 1 if gated else None])
    config = choose(tiles=tiles, steps=inner // 128, columns=columns, gated=gated)
    stage = 128 * (128 * (1 + gated) + columns * 2)
    total = config.stages * stage + (1 + gated) * columns * 128 * 4
    blocks = config.parts * tiles
    together = min(3, -(-blocks // 132)) if not gated else 1
    assert total + 1024 <= 228 * 1024 / together and blocks >= min(tiles * 8, 132)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 32])
@real
def test_the_kernel_on_a_gpu(inner, sizes, gated, tokens):
    x, weights, scales = case(tokens, inner, *sizes, layers=3, seed=tokens)
    found = scanned(x, weights, scales, gated)
    for layer in (1, 2) if inner * max(sizes) < 2**25 else (2,):  # float64 takes its time
        expected = wanted(x, weights, scales, layer, gated)
        close([y[layer] for y in found], expected, 4e-3 if gated else 1e-4)
    again = scanned(x, weights, scales, gated)
    jax.tree.map(np.testing.assert_array_equal, found, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_number_of_fp8_is_exact_on_a_gpu(dtype):
    """Tokens that each pick a column out of 128, for all 254 numbers in each column."""
    codes = np.add.outer(np.arange(256), np.arange(128)).astype(np.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    numbers = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    weights, scales = [interleave_columns(numbers)[None]], [jnp.ones((1, 2, 1))]
    for first in range(0, 128, 32):
        x = jnp.eye(32, 128, first, dtype=dtype)
        [found] = linear_fp8_layer(x, weights, scales, layer=0, implementation="mosaic_gpu")
        np.testing.assert_array_equal(found, numbers[:, first : first + 32].T.astype(jnp.float32))


def normed_case(inner, *sizes, layers=2, seed=0):
    draw = normals(seed)
    x, added = (draw(1, inner, scale=3) for _ in range(2))
    norms = draw(2 * layers, inner, mean=1, scale=0.2)
    return x, added, norms, *case(1, inner, *sizes, layers=layers, seed=seed + 1)[1:]


def check_normed(found, x, added, norms, weights, scales, layer, gated=False):
    *products, total, normed = found
    x, added, norms = (np.asarray(each, np.float64) for each in (x, added, norms))
    sums = x + added
    row = sums / np.sqrt((sums**2).mean() + 1e-5) * norms[2 * layer + 1]
    close(products, wanted(row, weights, scales, layer, gated), 4e-3)
    np.testing.assert_allclose(total, sums, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(normed, np.float64), row, rtol=2**-8, atol=1e-6)


@pytest.mark.slow_cases(reason="a norm of another part; found by two parts too")
@pytest.mark.parametrize(
    "inner, sizes, gated, config",
    [
        (512, (256, 128), False, LinearTileConfig(parts=2, stages=2)),
        (512, (128, 128), True, LinearTileConfig(parts=1, stages=2)),
        (768, (192,), False, None),  # a tail of N
        slow(2048, (128,), False, LinearTileConfig(parts=4, stages=2)),
    ],
)
def test_a_norm_comes_before_a_product(inner, sizes, gated, config):
    x, added, norms, weights, scales = normed_case(inner, *sizes)
    norm = RmsNormPrologueParams(added=added, weights=norms, affine=(2, 3), eps=1e-5, gives=True)
    with no_races(when=all(n % 128 == 0 for n in sizes)):
        found = at_once(
            linears_fp8_mosaic,
            x, weights, scales, layer=jnp.int32(0), affine=(1, 1), norm=norm, config=config,
            gated=gated, out_dtypes=[jnp.float32] * (1 if gated else len(sizes)), interpret=True,
        )  # fmt: skip
        jax.block_until_ready(found)
    check_normed(found, x, added, norms, weights, scales, 1, gated)


NORMED = [(2048, (12288,)), (2048, (8192, 512, 512)), (7168, (1536, 576))]


@pytest.mark.parametrize("inner, sizes", NORMED)
def test_blocks_that_norm_have_room_for_the_token(inner, sizes):
    tiles, steps = sum(-(-n // 128) for n in sizes), inner // 128
    config = choose(tiles=tiles, steps=steps, columns=8, gated=False, normed=True)
    total = config.stages * 128 * 128 + steps // config.parts * 2048 + 8 * 128 * 4
    together = min(3, -(-config.parts * tiles // 132))
    assert total + 1024 <= 228 * 1024 / together and steps % config.parts == 0


@pytest.mark.gpu
@pytest.mark.parametrize("inner, sizes", NORMED[:2])
def test_a_norm_comes_before_a_product_on_a_gpu(inner, sizes):
    x, added, norms, weights, scales = normed_case(inner, *sizes, layers=3)
    run = jax.jit(
        lambda layer, weights, scales: linears_fp8_mosaic(
            x,
            weights,
            scales,
            layer=layer,
            out_dtypes=[jnp.float32] * len(sizes),
            norm=RmsNormPrologueParams(
                added=added, weights=norms, affine=(2, 1), eps=1e-5, gives=True
            ),
        )
    )
    for layer in range(3):
        found = run(layer, weights, scales)
        check_normed(found, x, added, norms, weights, scales, layer)
        jax.tree.map(np.testing.assert_array_equal, found, run(layer, weights, scales))


@pytest.mark.parametrize(
    "tokens, inner, message",
    [(2, 2048, "normalizes only one token"), (1, 5120, "got K=5120 with parts=8")],
)
def test_a_norm_that_the_kernel_has_not_is_refused(tokens, inner, message):
    x, added = jnp.zeros((2, tokens, inner))
    norm = RmsNormPrologueParams(
        added=added, weights=jnp.zeros((2, inner)), affine=(1, 0), eps=1e-6
    )
    _, weights, scales = case(1, inner, 128)
    with pytest.raises(NotImplementedError, match=message):
        linears_fp8_mosaic(
            x, weights, scales, layer=0, out_dtypes=[jnp.float32], norm=norm, interpret=True
        )
