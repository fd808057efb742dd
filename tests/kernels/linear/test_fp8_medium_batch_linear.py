"""Products of 33 to 256 tokens with a layer's FP8 matrices: the kernel against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.kernels.hopper.device import RESERVED_BYTES, SHARED_BYTES
from jaxattn.kernels.linear import fp8_medium_batch_linear
from jaxattn.kernels.linear.fp8_medium_batch_linear import (
    choose,
    columns_of,
    many_linears_fp8_mosaic,
    sums_bytes,
)
from jaxattn.kernels.linear.linear import LinearTileConfig
from jaxattn.ops.linear.fp8_linear import linear_fp8_layer
from tests.helpers.kernel_cases import no_races, slow
from tests.kernels.linear.test_fp8_linear import (
    SHAPES,
    case,
    close,
    kernels_lowered,
    scanned,
    wanted,
)


@pytest.mark.slow_cases(
    reason="a token's sum that another block has, gate and up in one launch; found by unequal "
    "parts, and gate and up of one launch in test_fp8_linear, too"
)
@pytest.mark.parametrize(
    "tokens, inner, sizes, gated, config",
    [
        (
            33,
            384,
            (128, 192),
            False,
            LinearTileConfig(parts=2, stages=2),
        ),  # unequal shares, a tail of N
        slow(
            136, 512, (128, 128), True, LinearTileConfig(parts=2, stages=2)
        ),  # two blocks of the same rows
        slow(64, 384, (256,), False, LinearTileConfig(parts=1, stages=2)),
        slow(40, 256, (128, 128), True, LinearTileConfig(parts=1, stages=2)),
        slow(
            72, 512, (256,), False, LinearTileConfig(parts=3, stages=2)
        ),  # tokens that parts do not divide
        slow(256, 256, (128,), False, None),
    ],
)
def test_the_kernel_in_the_interpreter(tokens, inner, sizes, gated, config):
    x, weights, scales = case(tokens, inner, *sizes)
    with no_races(when=all(n % 128 == 0 for n in sizes)):
        found = many_linears_fp8_mosaic(
            x, weights, scales, layer=jnp.int32(0), affine=(1, 1), config=config, gated=gated,
            out_dtypes=[jnp.float32] * (1 if gated else len(sizes)), interpret=True,
        )  # fmt: skip
        jax.block_until_ready(found)
    close(found, wanted(x, weights, scales, 1, gated), 1e-5)


def test_a_nan_in_a_token_or_in_another_layer_stays_there():
    x, weights, scales = case(36, 256, 128)
    scales = [scales[0].at[0].set(jnp.nan)]
    op = partial(linear_fp8_layer, layer=1, implementation="mosaic_gpu_interpret")
    clean, found = (op(each, weights, scales)[0] for each in (x, x.at[34].set(jnp.nan)))
    assert np.isfinite(clean).all() and np.isnan(found[34]).all()
    np.testing.assert_array_equal(np.delete(found, 34, 0), np.delete(clean, 34, 0))
    close([clean], wanted(x, weights, scales, 1), 1e-5)


@pytest.mark.parametrize("tokens", [33, 64, 104, 128, 200, 256])
@pytest.mark.parametrize("inner, sizes, gated", SHAPES)
def test_a_block_has_room_and_its_tokens(inner, sizes, gated, tokens):
    columns, turns = columns_of(tokens)
    assert tokens <= columns * turns < tokens + 16 and columns % 8 == 0 and columns <= 128
    tiles = turns * sum(-(-n // (64 if gated else 128)) for n in sizes[: 1 if gated else None])
    config = choose(tiles=tiles, steps=inner // 128, columns=columns, gated=gated)
    stage = 128 * (128 + columns * 2)
    total = config.stages * stage + sums_bytes(columns) * (gated or config.parts > 1)
    assert total + 1024 + RESERVED_BYTES <= SHARED_BYTES
    assert 2 <= config.stages <= inner // 128 // config.parts
    assert config.parts * tiles >= 64


@pytest.mark.parametrize("inner, sizes, gated", [SHAPES[0], SHAPES[4]])
def test_real_shapes_are_lowered_for_a_gpu(inner, sizes, gated, monkeypatch):
    monkeypatch.setattr(fp8_medium_batch_linear, "require_hopper", lambda *args, **kwargs: None)
    assert kernels_lowered(many_linears_fp8_mosaic, 128, inner, sizes, gated) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [33, 64, 128, 200, 256])
@pytest.mark.parametrize("inner, sizes, gated", [(2048, (12288, 128), False), *SHAPES[1:5]])
def test_the_kernel_on_a_gpu(inner, sizes, gated, tokens):
    x, weights, scales = case(tokens, inner, *sizes, layers=3, seed=tokens)
    found = scanned(x, weights, scales, gated)
    expected = wanted(x, weights, scales, 2, gated)
    close([y[2] for y in found], expected, 4e-3 if gated else 1e-4)
    jax.tree.map(np.testing.assert_array_equal, found, scanned(x, weights, scales, gated))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 128])
def test_float16_on_a_gpu(tokens):
    x, weights, scales = case(tokens, 1024, 256, 192, dtype=jnp.float16)
    found = linear_fp8_layer(x, weights, scales, layer=1, implementation="mosaic_gpu")
    close(found, wanted(x, weights, scales, 1), 1e-4)
