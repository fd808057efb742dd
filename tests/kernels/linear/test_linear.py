"""Products of a few tokens with a layer's matrices: the kernel against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rope import RopeConfig, rope, rotation
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import RmsNormPrologueParams
from jaxattn.kernels.linear import linear
from jaxattn.kernels.linear.linear import LinearTileConfig, choose, linears_mosaic
from jaxattn.kernels.linear.rope_epilogue import RopeEpilogueParams
from jaxattn.ops.linear.linear import gated_layer, heads_layer, linear_layer
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import no_races, slow


def case(tokens, inner, *sizes, layers=2, seed=0, dtype=jnp.bfloat16):
    draw = normals(seed)
    x = draw(tokens, inner, dtype=dtype)
    return x, [draw(layers, inner, size, scale=inner**-0.5, dtype=dtype) for size in sizes]


def wanted(x, weights, layer, gated=False):
    x = np.asarray(x, np.float64)
    products = [x @ np.asarray(each).astype(np.float64)[layer] for each in weights]
    if gated:
        return [products[0] / (1 + np.exp(-products[0])) * products[1]]
    return products


def close(found, expected, limit=2e-3):
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one, np.float64)
        assert one.shape == other.shape and np.isfinite(one).all()
        assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "tokens, inner, sizes, config",
    [
        (1, 256, (256,), LinearTileConfig(parts=4, stages=2)),
        (
            3,
            320,
            (128, 192),
            LinearTileConfig(parts=2, stages=2),
        ),  # parts of unequal shares, a tail of N
        (9, 128, (256, 128), LinearTileConfig(parts=1, stages=2)),
        (17, 512, (128,), LinearTileConfig(parts=8, stages=1)),
        (2, 128, (256, 64), LinearTileConfig(parts=2, stages=1)),  # less than a tile
    ],
)
def test_the_kernel_in_the_interpreter(tokens, inner, sizes, config):
    x, weights = case(tokens, inner, *sizes)
    with no_races(when=all(n % 128 == 0 for n in sizes)):
        found = at_once(
            linears_mosaic,
            x, weights, layer=jnp.int32(0), affine=(1, 1), config=config, interpret=True,
            out_dtypes=[jnp.float32] * len(sizes),
        )  # fmt: skip
        jax.block_until_ready(found)
    close(found, wanted(x, weights, 1))


@pytest.mark.parametrize("size", [192, 64])
@pytest.mark.parametrize(
    "config", [LinearTileConfig(parts=1, stages=2), LinearTileConfig(parts=2, stages=1)]
)
def test_heads_have_matrices_of_their_own(config, size):
    x, (weights,) = case(3, 128, size, layers=6)  # two layers of three heads
    x = jnp.concatenate([x, 2 * x, 3 * x], axis=-1)
    (found,) = at_once(
        linears_mosaic,
        x, [weights], layer=jnp.int32(1), heads=3, config=config, interpret=True,
        out_dtypes=[jnp.float32],
    )  # fmt: skip
    expected = [wanted(x[:, 128 * h : 128 * (h + 1)], [weights], 3 + h)[0] for h in range(3)]
    close([found], [np.concatenate(expected, axis=-1)])


def test_the_op_of_heads_in_the_interpreter_gives_the_references_result():
    x, (weights,) = case(12, 64, 128, layers=6)
    # A head behind the others is not read.
    x, weights = x.reshape(4, 1, 3, 64).at[:, :, 2].set(jnp.nan), weights.reshape(3, 2, 64, 128)
    op = partial(heads_layer, x, weights, layer=2)
    np.testing.assert_allclose(
        *(np.asarray(op(implementation=by), np.float32) for by in ("mosaic_gpu_interpret", "xla")),
        rtol=1e-2, atol=1e-2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="must end in"):
        heads_layer(x[:, :, :1], weights, layer=2)


def split_case(tokens, inner, *sizes):
    x, weights = case(tokens, inner * len(sizes), *sizes)
    weights = [each[:, inner * i : inner * (i + 1)] for i, each in enumerate(weights)]
    pieces = np.split(np.asarray(x, np.float64), len(sizes), axis=-1)
    return x, weights, [wanted(p, [w], 1)[0] for p, w in zip(pieces, weights, strict=True)]


@pytest.mark.parametrize(
    "config", [LinearTileConfig(parts=1, stages=2), LinearTileConfig(parts=2, stages=1)]
)
def test_matrices_have_numbers_of_x_of_their_own(config):
    x, weights, expected = split_case(3, 128, 256, 128, 384)
    with no_races():
        found = at_once(
            linears_mosaic,
            x, weights, layer=jnp.int32(1), split=True, config=config, interpret=True,
            out_dtypes=[jnp.float32] * 3,
        )  # fmt: skip
        jax.block_until_ready(found)
    close(found, expected)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu_interpret"])
def test_the_op_of_a_split_x(implementation):
    x, weights, expected = split_case(2, 64, 128, 192)
    x = x.reshape(2, 1, 128)
    run = partial(linear_layer, layer=1, split=True, implementation=implementation)
    found = run(x, weights)
    close([y[:, 0] for y in found], expected)
    with pytest.raises(ValueError, match="must end in 2 times K"):
        run(x[..., :64], weights)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_a_split_x_on_a_gpu(tokens):
    """Kimi-Linear's decays and output gate, of 128 numbers each."""
    x, weights, expected = split_case(tokens, 128, 4096, 4096)
    found = linear_layer(x, weights, layer=1, split=True, implementation="mosaic_gpu")
    close(found, expected)
    each = [
        linear_layer(part, [weight], layer=1, implementation="mosaic_gpu")[0]
        for part, weight in zip(jnp.split(x, 2, axis=-1), weights, strict=True)
    ]
    for one, other in zip(found, each, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
def test_biases_are_added_before_the_one_rounding(implementation):
    x, weights = case(3, 128, 192, 64)
    draw = normals(1)
    biases = [draw(2, 192, scale=9, dtype=jnp.bfloat16), draw(2, 128, scale=9)]
    run = partial(
        linear_layer, layer=1, out_dtypes=[jnp.float32, jnp.bfloat16],
        implementation=implementation,
    )  # fmt: skip
    found = run(x, weights, biases=biases)
    pairs = zip(wanted(x, weights, 1), biases, strict=True)
    expected = [y + np.asarray(b, np.float64)[1, : y.shape[-1]] for y, b in pairs]
    close(found[:1], expected[:1], 1e-6)
    np.testing.assert_allclose(np.asarray(found[1], np.float64), expected[1], rtol=2**-8)
    with pytest.raises(ValueError, match=r"biases\[0\] \(2, 128\) must be \[L, N or more\]"):
        run(x, weights, biases=biases[1:] * 2)
    with pytest.raises(ValueError, match="there must be one bias for each of 2 weights, got 1"):
        run(x, weights, biases=biases[:1])
    with pytest.raises(TypeError, match=r"biases\[1\] must be .* got int32"):
        run(x, weights, biases=[biases[0], biases[1].astype(jnp.int32)])


def turned_heads(tokens, heads, inner, size, interleaved, seed=0):
    draw = normals(seed)
    x = draw(tokens, heads, inner + 64, dtype=jnp.bfloat16)
    weights = draw(2, heads, inner, size, scale=inner**-0.5, dtype=jnp.bfloat16)
    config = RopeConfig(dim=64, interleaved=interleaved)
    turned = rotation(jnp.arange(tokens) * 977, config), config
    return x, weights, turned


def check_turned(tokens, heads, inner, size, interleaved, implementation):
    x, weights, turned = turned_heads(tokens, heads, inner, size, interleaved, seed=tokens)
    op = partial(
        heads_layer, layer=1, rotary=turned, spare_heads=-heads % 8, implementation=implementation
    )
    found = jax.jit(op)(x, weights)
    assert found.shape == (tokens, -(-heads // 8) * 8, size + 64)
    found = np.asarray(found[:, :heads], np.float64)  # what is behind them is undefined
    wide, weight = (np.asarray(each, np.float64) for each in (x[..., :inner], weights[1]))
    close([found[..., :size]], [np.einsum("thk,hkn->thn", wide, weight)], 4e-3)
    rotated = rope(x[..., inner:].astype(jnp.float32), *turned)
    np.testing.assert_allclose(found[..., size:], rotated, rtol=2**-8, atol=2**-8)


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu_interpret"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_dims_follow_a_heads_product(implementation, interleaved):
    check_turned(3, 2, 128, 256, interleaved, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("heads, inner, size", [(16, 128, 512), (20, 192, 512)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_dims_follow_on_a_gpu(heads, inner, size, tokens, interleaved):
    check_turned(tokens, heads, inner, size, interleaved, "mosaic_gpu")


def test_no_race_between_a_product_and_what_is_rotated():
    x, weights, (angles, config) = turned_heads(3, 2, 128, 128, True)
    with no_races():
        (found,) = at_once(
            linears_mosaic,
            x.reshape(3, -1), [weights.reshape(-1, 128, 128)], layer=jnp.int32(1), heads=2,
            rope=RopeEpilogueParams(angles.angles, config.interleaved),
            config=LinearTileConfig(parts=2, stages=2),
            out_dtypes=[jnp.bfloat16], interpret=True,
        )  # fmt: skip
        jax.block_until_ready(found)


def test_gate_and_up_are_one_launch():
    x, weights = case(5, 256, 256, 256)
    run = partial(
        linears_mosaic, layer=1, gated=True, out_dtypes=[jnp.bfloat16], interpret=True,
        config=LinearTileConfig(parts=2, stages=2),
    )  # fmt: skip
    with no_races():
        found = jax.block_until_ready(run(x, weights))
    close(found, wanted(x, weights, 1, gated=True), 4e-3)


def test_a_nan_in_a_token_or_in_another_layer_stays_there():
    x, weights = case(4, 128, 128)
    weights = [weights[0].at[0].set(jnp.nan)]
    op = partial(linear_layer, weights=weights, layer=1, implementation="mosaic_gpu_interpret")
    clean, found = op(x)[0], op(x.at[2].set(jnp.nan))[0]
    assert np.isfinite(clean).all() and np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(clean, 2, 0))


def test_the_reference_is_the_layers_product():
    x, weights = case(6, 48, 24, 40, dtype=jnp.float32)
    place = LayerIndex(jnp.int32(1), 1, 0)
    close(linear_layer(x, weights, layer=place), wanted(x, weights, 1), 1e-6)
    weights = weights[:1] * 2
    close([gated_layer(x, *weights, layer=0)], wanted(x, weights, 0, gated=True), 5e-3)


def test_the_gradient_is_the_references():
    x, weights = case(3, 128, 128)

    def loss(x, weights, implementation):
        y = linear_layer(x, weights, layer=jnp.int32(1), implementation=implementation)[0]
        return (y**2).sum()

    found, wanted = (
        jax.grad(jax.jit(loss, static_argnums=2), argnums=(0, 1))(x, weights, implementation)
        for implementation in ("mosaic_gpu_interpret", "xla")
    )
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2e-2, atol=1e-2
        )


@pytest.mark.parametrize(
    "x, weight, message",
    [
        ((33, 128), (2, 128, 128), "1 to 32 tokens"),
        ((5, 1024), (1, 1024, 16512), "1 to 4 tokens for matrices of this size"),
        ((4, 100), (2, 100, 128), "K and N multiples of 64"),
        ((4, 128), (2, 128, 136), "K and N multiples of 64"),
        ((4, 128), (2, 128, 32), "N at least 64"),
    ],
)
def test_what_the_kernel_has_not_is_refused_by_name(x, weight, message):
    args = jnp.zeros(x, jnp.bfloat16), [jnp.zeros(weight, jnp.bfloat16)]
    with pytest.raises(NotImplementedError, match=message):
        linear_layer(*args, layer=0, implementation="mosaic_gpu_interpret")
    with pytest.raises(NotImplementedError, match="both in float16; got bfloat16 and float32"):
        linears_mosaic(
            jnp.zeros((4, 128), jnp.bfloat16), [jnp.zeros((2, 128, 128))], layer=0,
            out_dtypes=[jnp.float32], interpret=True,
        )  # fmt: skip


SHAPES = [  # DeepSeek-V2-Lite's, and the largest of Qwen3-Next and DeepSeek-V3
    (2048, (3072, 576), False),
    (2048, (2048,), False),
    (2048, (2816, 2816), True),
    (2816, (2048,), False),
    (2048, (12288, 64), False),
    (2048, (2 * (256 + 32),), False),  # Qwen3.5's router and gate, in halves
    (7168, (1536, 576), False),
    (16384, (7168,), False),
]
real = pytest.mark.parametrize("inner, sizes, gated", SHAPES)


@pytest.mark.sampled
@real
@pytest.mark.parametrize("tokens", [1, 32])
def test_real_shapes_are_lowered_for_a_gpu(inner, sizes, gated, tokens, monkeypatch):
    monkeypatch.setattr(linear, "require_hopper", lambda *args, **kwargs: None)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def step(x, *weights):
        dtypes = [jnp.float32] * (1 if gated else len(sizes))
        return linears_mosaic(x, weights, layer=1, out_dtypes=dtypes, gated=gated)

    if tokens > 4 and max(sizes) * inner > 2**24:
        with pytest.raises(NotImplementedError, match="1 to 4 tokens for matrices of this size"):
            jax.eval_shape(step, shape((tokens, inner)), *(shape((4, inner, n)) for n in sizes))
        return
    args = shape((tokens, inner)), *(shape((4, inner, size)) for size in sizes)
    text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("tokens", [1, 32])
@real
def test_two_blocks_of_a_multiprocessor_fit(inner, sizes, gated, tokens):
    columns = -(-tokens // 8) * 8
    tiles = sum(-(-n // 128) for n in sizes[: 1 if gated else None])
    config = choose(tiles=tiles, steps=inner // 64, columns=columns, gated=gated)
    stage = 64 * (128 * (1 + gated) + columns) * 2
    total = config.stages * stage + (1 + gated) * columns * 132 * 4
    assert total < 227 * 1024 and config.parts * tiles >= min(tiles * 8, 132)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 17, 32])
@real
def test_the_kernel_on_a_gpu(inner, sizes, gated, tokens):
    if tokens > 4 and max(sizes) * inner > 2**24:
        pytest.skip("so large matrices have 4 tokens at most")
    x, weights = case(tokens, inner, *sizes, layers=3, seed=tokens)

    @jax.jit
    def scanned(x, weights):
        def body(layer, _):
            if gated:
                ys = (gated_layer(x, *weights, layer=layer, implementation="mosaic_gpu"),)
            else:
                ys = linear_layer(x, weights, layer=layer, implementation="mosaic_gpu")
            return layer + 1, ys

        return jax.lax.scan(body, jnp.int32(0), None, 3)[1]

    found = scanned(x, weights)
    for layer in range(3):
        close([y[layer] for y in found], wanted(x, weights, layer, gated), 4e-3 if gated else 1e-4)
    again = scanned(x, weights)
    jax.tree.map(np.testing.assert_array_equal, found, again)


HEADS = [(16, 128, 512), (16, 512, 128), (20, 192, 512), (7, 128, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 32])
@pytest.mark.parametrize("heads, inner, size", HEADS)
def test_products_of_heads_on_a_gpu(heads, inner, size, tokens):
    x, (weights,) = case(tokens, heads * inner, size, layers=3, seed=tokens)
    x, weights = x.reshape(tokens, heads, inner), weights.reshape(3, heads, inner, size)
    found = jax.jit(partial(heads_layer, layer=2, implementation="mosaic_gpu"))(x, weights)
    x, weight = (np.asarray(each, np.float64) for each in (x, weights[2]))
    close([found], [np.einsum("thk,hkn->thn", x, weight)], 4e-3)


@pytest.mark.parametrize("heads, inner, size", HEADS)
def test_products_of_heads_are_lowered_for_a_gpu(heads, inner, size, monkeypatch):
    monkeypatch.setattr(linear, "require_hopper", lambda *args, **kwargs: None)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    op = partial(heads_layer, layer=1, implementation="mosaic_gpu")
    args = shape((4, 1, heads, inner)), shape((2, heads, inner, size))
    text = jax.jit(op).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def normed_case(inner, *sizes, layers=2, seed=0):
    draw = normals(seed)
    x, added = (draw(1, inner, scale=3) for _ in range(2))
    norms = draw(2 * layers, inner, mean=1, scale=0.2)
    return x, added, norms, case(1, inner, *sizes, layers=layers, seed=seed + 1)[1]


def wanted_of_norm(x, added, norms, place, eps):
    x, added, norms = (np.asarray(each, np.float64) for each in (x, added, norms))
    total = x + added
    return total, total / np.sqrt((total**2).mean() + eps) * norms[place]


def check_normed(found, x, added, norms, weights, layer, limit=4e-3, gated=False):
    *products, total, normed = found
    sums, row = wanted_of_norm(x, added, norms, 2 * layer + 1, 1e-5)
    close(products, wanted(row, weights, layer, gated), limit)
    np.testing.assert_allclose(total, sums, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(normed, np.float64), row, rtol=2**-8, atol=1e-6)


@pytest.mark.slow_cases(reason="a norm of another part; found by two parts too")
@pytest.mark.parametrize(
    "inner, sizes, gated, config",
    [
        (256, (256, 64), False, LinearTileConfig(parts=2, stages=2)),
        (512, (128, 128), True, LinearTileConfig(parts=1, stages=2)),
        slow(1024, (192,), False, LinearTileConfig(parts=4, stages=3)),
        (768, (192,), False, None),  # six blocks
    ],
)
def test_a_norm_comes_before_a_product(inner, sizes, gated, config):
    x, added, norms, weights = normed_case(inner, *sizes)
    norm = RmsNormPrologueParams(added=added, weights=norms, affine=(2, 3), eps=1e-5, gives=True)
    with no_races(when=all(n % 128 == 0 for n in sizes)):
        found = at_once(
            linears_mosaic,
            x, weights, layer=jnp.int32(0), affine=(1, 1), norm=norm, config=config, gated=gated,
            out_dtypes=[jnp.float32] * (1 if gated else len(sizes)), interpret=True,
        )  # fmt: skip
        jax.block_until_ready(found)
    check_normed(found, x, added, norms, weights, 1, gated=gated)


NORMED = [
    (2048, (3072, 576)), (2048, (12288, 64)), (2048, (1088,)), (4096, (2048,)),
    (2304, (12288, 256, 128)), (2304, (256,)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("inner, sizes", NORMED)
def test_a_norm_comes_before_a_product_on_a_gpu(inner, sizes):
    x, added, norms, weights = normed_case(inner, *sizes, layers=3)
    run = jax.jit(
        lambda layer, *weights: linears_mosaic(
            x,
            weights,
            layer=layer,
            out_dtypes=[jnp.float32] * len(sizes),
            norm=RmsNormPrologueParams(
                added=added, weights=norms, affine=(2, 1), eps=1e-5, gives=True
            ),
        )  # fmt: skip
    )
    for layer in range(3):
        found = run(layer, *weights)
        check_normed(found, x, added, norms, weights, layer)
        jax.tree.map(np.testing.assert_array_equal, found, run(layer, *weights))


@pytest.mark.parametrize("inner, sizes", NORMED)
def test_blocks_that_norm_have_room_for_the_token(inner, sizes):
    tiles = sum(-(-n // 128) for n in sizes)
    config = choose(tiles=tiles, steps=inner // 64, columns=8, gated=False, normed=True)
    mine = inner // 64 // config.parts
    total = config.stages * 64 * 128 * 2 + mine * 1024 + 8 * 128 * 4
    assert total <= 75 * 1024  # three share a multiprocessor


@pytest.mark.parametrize(
    "tokens, inner, message",
    [
        (2, 2048, "normalizes only one token"),
        (1, 192, "a multiple of 128; got K=192"),
        (1, 5120, "got K=5120 with parts=8"),
    ],
)
def test_a_norm_that_the_kernel_has_not_is_refused(tokens, inner, message):
    x, added = jnp.zeros((2, tokens, inner))
    norm = RmsNormPrologueParams(
        added=added, weights=jnp.zeros((2, inner)), affine=(1, 0), eps=1e-6
    )
    weights = [jnp.zeros((1, inner, 128), jnp.bfloat16)]
    with pytest.raises(NotImplementedError, match=message):
        linears_mosaic(x, weights, layer=0, out_dtypes=[jnp.float32], norm=norm, interpret=True)
