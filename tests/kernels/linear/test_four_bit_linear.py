"""Products with dense matrices of 4 bits against float64: in the interpreter, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.dispatch import traced_for_hopper
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.kernels.linear.four_bit_linear import linears_four_bit_mosaic
from jaxattn.kernels.linear.linear import LinearTileConfig
from jaxattn.ops.linear.four_bit_linear import gated_four_bit_layer, linear_four_bit_layer
from tests.helpers.four_bit_compiled import dequantize, quantize
from tests.helpers.kernel_cases import no_races, relative

INT4, INT4_128 = FourBitFormat("int4", 32), FourBitFormat("int4", 128)
MXFP4 = FourBitFormat("mxfp4", 32, "e8m0")
HALF_ZEROS = FourBitFormat("int4", 128, "float16", zeros=True)
ZEROS = FourBitFormat("int4", 32, zeros=True)
LAYER = 1


def linear_case(form, tokens, inner, sizes, gated=False, dtype=jnp.bfloat16):
    """(x, stacks of tiles, what is expected)."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, inner)), dtype)
    drawn = [rng.normal(size=(2, size, inner)) * inner**-0.5 for size in sizes]
    weights = [quantize(jnp.asarray(each, jnp.float32), form) for each in drawn]
    wide = [np.asarray(dequantize(each[LAYER], form, dtype), np.float64) for each in weights]
    found = [np.asarray(x, np.float64) @ each.T for each in wide]
    if gated:
        found = [found[0] / (1 + np.exp(-found[0])) * found[1]]
    return x, weights, found


@pytest.mark.parametrize(
    "tokens, inner, sizes, gated, parts",
    [(3, 128, (128, 256), False, 1), (9, 192, (128,), False, 2), (2, 128, (128, 128), True, 1)],
    ids=["two matrices", "a cluster", "gated"],
)
def test_no_race_and_what_float64_gives(tokens, inner, sizes, gated, parts):
    x, weights, wanted = linear_case(INT4, tokens, inner, sizes, gated)
    run = functools.partial(
        linears_four_bit_mosaic, form=INT4, layer=LAYER, out_dtypes=[jnp.float32] * len(wanted),
        gated=gated, config=LinearTileConfig(parts=parts, stages=2),
    )  # fmt: skip
    with no_races():
        op = functools.partial(run, interpret=True)
        found = jax.block_until_ready(jax.jit(op)(x, weights))
    options = {"layer": LAYER, "implementation": "xla"}
    if gated:
        others = [gated_four_bit_layer(x, tuple(weights), INT4, out_dtype=jnp.float32, **options)]
    else:
        others = linear_four_bit_layer(x, weights, INT4, **options)
    for y, other, exact in zip(found, others, wanted, strict=True):
        assert relative(y, exact) < 1e-5 and relative(other, exact) < 1e-5


@pytest.mark.parametrize("tokens", [1, 40, 256])
def test_numbers_of_tokens_lower_for_a_gpu(tokens):
    x = jax.ShapeDtypeStruct
    weights = [x((2, *INT4_128.tiles(size, 4096)), jnp.uint8) for size in (14336, 14336)]
    run = functools.partial(
        gated_four_bit_layer, form=INT4_128, layer=LAYER, implementation="mosaic_gpu"
    )
    with traced_for_hopper(True):
        traced = jax.jit(run).trace(x((tokens, 4096), jnp.bfloat16), tuple(weights))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_weights_that_do_not_fit_are_named():
    x, weights, _ = linear_case(INT4, 2, 128, (128,))
    with pytest.raises(ValueError, match=r"weights\[0\] \[2, 2, 2, 2304\] must .* for x \[2, 64\]"):
        linear_four_bit_layer(x[:, :64], weights, INT4, layer=LAYER)
    with pytest.raises(ValueError, match="must be gate and up with the same shape"):
        gated_four_bit_layer(x, tuple(weights), INT4, layer=LAYER)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form, tokens, inner, sizes, gated, dtype",
    [
        (INT4_128, 1, 4096, (512, 128, 192), False, jnp.bfloat16),
        (INT4_128, 33, 1024, (256, 256), True, jnp.bfloat16),
        (INT4, 8, 576, (512,), False, jnp.bfloat16),
        (INT4_128, 200, 2048, (384,), False, jnp.bfloat16),
        (INT4, 130, 320, (192, 192), True, jnp.bfloat16),
        (HALF_ZEROS, 24, 1024, (256, 256), True, jnp.bfloat16),
        (HALF_ZEROS, 64, 512, (128,), False, jnp.float16),
        (ZEROS, 5, 576, (192,), False, jnp.bfloat16),
        (ZEROS, 100, 512, (128, 128), True, jnp.bfloat16),
        (INT4_128, 16, 14336, (256,), False, jnp.bfloat16),
        (INT4_128, 129, 768, (1408, 1408), True, jnp.bfloat16),
        (INT4, 128, 2880, (2880, 2880), True, jnp.bfloat16),
        (MXFP4, 200, 2880, (2880, 768), False, jnp.bfloat16),
    ],
)
def test_on_a_gpu(form, tokens, inner, sizes, gated, dtype):
    x, weights, wanted = linear_case(form, tokens, inner, sizes, gated, dtype)
    run = functools.partial(
        linears_four_bit_mosaic, form=form, layer=LAYER, out_dtypes=[jnp.float32] * len(wanted),
        gated=gated,
    )  # fmt: skip
    for y, exact in zip(jax.jit(run)(x, weights), wanted, strict=True):
        assert relative(y, exact) < 1e-3
