"""Experts of 4 bits against float64: in the interpreter, lowered for a GPU, and on one.

What is expected is made of the dequantized weights, rounded to the tokens' dtype.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.dispatch import Refusal, traced_for_hopper
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.kernels.moe.four_bit_tile_config import choose_four_bit
from jaxattn.kernels.moe.launch import mixture_of_experts_mosaic
from jaxattn.ops.moe.experts import mixture_of_experts
from tests.helpers.at_once import at_once
from tests.helpers.four_bit_compiled import dequantize, quantize
from tests.helpers.kernel_cases import no_races, relative, slow
from tests.helpers.moe_cases import expected, moe_case

LAYER = 1
MXFP4 = FourBitFormat("mxfp4", 32, "e8m0")
INT4, INT4_128 = FourBitFormat("int4", 32), FourBitFormat("int4", 128)
HALF_ZEROS = FourBitFormat("int4", 128, "float16", zeros=True)
ZEROS = FourBitFormat("int4", 32, zeros=True)
ACTIVATION = ClampedSwiGLU(alpha=1.702, limit=0.5)


def four_bit_case(form, tokens, experts=3, top_k=2, *, features, width, biases=False, **options):
    """(arguments of the op, its keywords, what is expected)."""
    found = moe_case(
        tokens, experts, top_k, features=features, width=width, biases=biases, seed=3, **options
    )
    x, ids, weights, gate_up, down = found[:5]
    ids = ids.at[0, 0].set(-1) if tokens > 1 else ids
    halves = gate_up.reshape(2, experts, 2, width, features)
    tiles = [quantize(each, form) for each in (halves, down)]
    named = {"form": form, "layer": LAYER}
    of_layer = {}
    if biases:
        named |= {**found[5], "activation": ACTIVATION}
        of_layer = {name: bias[LAYER] for name, bias in found[5].items()}
        of_layer["activation"] = ACTIVATION
    wide = [dequantize(each[LAYER], form, x.dtype) for each in tiles]
    wide[0] = wide[0].reshape(experts, 2 * width, features)
    return (x, ids, weights, *tiles), named, expected(x, ids, weights, *wide, **of_layer)


def few(form, **sizes):
    """The chosen cut with two stages, and three blocks."""
    chosen = choose_four_bit(form, **sizes)
    short = {
        name: dataclasses.replace(getattr(chosen, name), stages=2, blocks=3)
        for name in ("gate_up", "down")
    }
    return dataclasses.replace(chosen, combine=128, **short)


@pytest.mark.slow_cases(reason="another format's tiles; found by tests/core and on a GPU too")
@pytest.mark.parametrize(
    "form, tokens, features, width, options",
    [
        # The combine's last piece has 64 columns; tiles of 16 columns are narrowed to 8.
        (MXFP4, 9, 192, 64, {"biases": True}),
        pytest.param(
            MXFP4,
            2,
            128,
            64,
            {"biases": True},
            marks=pytest.mark.slow(
                reason="a tile of 8 columns that is not narrowed; found by `steps of 192`, which "
                "narrows to 8, and on a GPU too"
            ),
        ),
        pytest.param(INT4, 1, 64, 64, {}, marks=pytest.mark.slow),
        pytest.param(HALF_ZEROS, 2, 128, 128, {"dtype": jnp.float16}, marks=pytest.mark.slow),
    ],
    ids=["steps of 192", "mxfp4 with biases", "int4", "int4 of float16 with zero points"],
)
def test_no_race_and_what_float64_gives(form, tokens, features, width, options):
    args, named, wanted = four_bit_case(form, tokens, features=features, width=width, **options)
    config = few(form, tokens=tokens, top_k=2, experts=3, hidden=features, expert_size=width)
    run = functools.partial(mixture_of_experts_mosaic, **named, config=config, interpret=True)
    with no_races():
        y = jax.block_until_ready(jax.jit(run)(*args))
    assert relative(y, wanted) < 1e-3
    by_xla = at_once(mixture_of_experts, *args, **named, implementation="xla")
    assert relative(by_xla, wanted) < 1e-3


@pytest.mark.slow(reason="rows of another warpgroup; found by prompts on a GPU too")
def test_two_warpgroups_of_rows_have_what_one_has():
    args, named, wanted = four_bit_case(INT4, 3, features=64, width=128)
    config = few(INT4, tokens=3, top_k=2, experts=3, hidden=64, expert_size=128)
    wide = dataclasses.replace(
        config,
        gate_up=dataclasses.replace(config.gate_up, consumers=2, split=False),
    )
    y = jax.jit(functools.partial(mixture_of_experts_mosaic, **named, config=wide, interpret=True))
    assert relative(y(*args), wanted) < 1e-3


@pytest.mark.slow(
    reason="a number that is dequantized otherwise; found by float64 of three formats there and "
    "by core/test_four_bit_tiles too"
)
def test_float32_products_have_the_dequantized_numbers():
    """As a CPU takes the path: no rounding but float32's."""
    args, named, _ = four_bit_case(INT4, 5, features=64, width=64, dtype=jnp.float32)
    x, ids, weights, *tiles = args
    gate_up, down = (dequantize(each, INT4, jnp.float32) for each in tiles)
    gate_up = gate_up.reshape(2, 3, 128, 64)
    by_xla = functools.partial(at_once, mixture_of_experts, implementation="xla")
    found = by_xla(*args, **named)
    wanted = by_xla(x, ids, weights, gate_up, down, layer=LAYER)
    np.testing.assert_array_equal(found, wanted)


# --- without a GPU

REAL = {"gpt-oss": (2880, 2880, 32, 4, MXFP4), "qwen3": (2048, 768, 128, 8, INT4_128)}
COUNTS = (1, 8, 32, 64, 128, 256, 2048)


def lowered(form, tokens, features, width, experts, top_k, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct
    args = (
        x((tokens, features), dtype), x((tokens, top_k), jnp.int32),
        x((tokens, top_k), jnp.float32),
        x((2, experts, 2, *form.tiles(width, features)), jnp.uint8),
        x((2, experts, *form.tiles(features, width)), jnp.uint8),
    )  # fmt: skip
    run = functools.partial(mixture_of_experts, form=form, layer=LAYER, implementation="mosaic_gpu")
    with traced_for_hopper(True):
        return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "form, dtype",
    [
        (MXFP4, jnp.bfloat16),
        (INT4, jnp.bfloat16),
        pytest.param(MXFP4, jnp.float16, marks=pytest.mark.slow),
        pytest.param(HALF_ZEROS, jnp.float16, marks=pytest.mark.slow),
        (HALF_ZEROS, jnp.bfloat16),
    ],
    ids=str,
)
@pytest.mark.slow_cases(reason="another widening that does not lower; found on a GPU too")
def test_every_format_lowers_for_a_gpu(form, dtype):
    text = lowered(form, 9, 256, 128, 4, 2, dtype)
    assert text.count("custom_call @mosaic_gpu") == 3  # two products and the sum


@pytest.mark.slow_cases(
    reason="a ring of fewer stages in another format; found by MXFP4 of gpt-oss there, and by all "
    "formats on a GPU, too"
)
@pytest.mark.parametrize("name", ["gpt-oss", slow("qwen3")])
def test_every_number_of_tokens_has_shared_memory(name, monkeypatch):
    """A ring of two stages at least, which lowering counts; wide tiles are the largest."""
    features, width, experts, top_k, form = REAL[name]
    for tokens in COUNTS:
        config = choose_four_bit(
            form, tokens=tokens, top_k=top_k, experts=experts, hidden=features, expert_size=width
        )
        for product in (config.gate_up, config.down):
            assert product.stages >= 2 and product.depth % form.columns == 0
    lowered(form, COUNTS[-1], features, width, experts, top_k)


def test_numbers_that_would_be_rounded_twice_are_refused():
    args, named, _ = four_bit_case(INT4, 2, features=64, width=64, dtype=jnp.float16)
    with pytest.raises(Refusal, match="float16 if the scales are not bfloat16; got x float16"):
        mixture_of_experts(*args, **named, implementation="mosaic_gpu_interpret")


def test_tiles_of_other_sizes_are_named():
    args, named, _ = four_bit_case(INT4, 2, features=64, width=64)
    x, ids, weights, gate_up, down = args
    with pytest.raises(ValueError, match=r"gate_up .* must end in \[2, 1, 1, 2304\]"):
        mixture_of_experts(x, ids, weights, gate_up[:, :, :1], down, **named)
    with pytest.raises(TypeError, match="form must be a FourBitFormat or None, got str"):
        mixture_of_experts(*args, **(named | {"form": "int4"}))


# --- on a GPU

GPU_CASES = {
    "gpt-oss, a token": (MXFP4, 1, 6, 4, 2880, 192, {"biases": True}),
    "gpt-oss, some": (MXFP4, 33, 6, 4, 2880, 192, {"biases": True}),
    "mxfp4, a prompt": (MXFP4, 300, 4, 2, 512, 256, {}),
    "int4": (INT4, 4, 6, 4, 512, 256, {}),
    "int4, a prompt": (INT4, 260, 4, 2, 256, 128, {}),
    "int4 of 128, a prompt": (INT4_128, 300, 6, 4, 768, 768, {}),
    "zero points, some": (HALF_ZEROS, 31, 6, 4, 768, 1408, {}),
    "int4 of 128": (INT4_128, 40, 6, 4, 512, 256, {}),
    "zero points": (HALF_ZEROS, 9, 6, 4, 512, 256, {}),
    "zero points beside scales in bfloat16": (ZEROS, 11, 6, 4, 512, 256, {}),
    "mxfp4 in float16": (MXFP4, 3, 4, 2, 256, 128, {"dtype": jnp.float16}),
    "zero points in float16": (HALF_ZEROS, 33, 4, 2, 256, 128, {"dtype": jnp.float16}),
}


@pytest.mark.gpu
def test_a_tokens_bits_do_not_depend_on_the_others():
    """One token and 20 are multiplied by mma of single warps, and 400 by wgmma."""
    args, named, _ = four_bit_case(INT4, 400, 4, 2, features=256, width=128)
    x, ids, weights, *tiles = args
    run = jax.jit(functools.partial(mixture_of_experts_mosaic, **named))
    alone, some, all_of_them = (
        run(x[1 : 1 + n], ids[1 : 1 + n], weights[1 : 1 + n], *tiles) for n in (1, 20, 399)
    )
    np.testing.assert_array_equal(alone[0], some[0])
    np.testing.assert_array_equal(alone[0], all_of_them[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu(name):
    form, tokens, experts, top_k, features, width, options = GPU_CASES[name]
    args, named, wanted = four_bit_case(
        form, tokens, experts, top_k, features=features, width=width, **options
    )
    y = jax.jit(functools.partial(mixture_of_experts_mosaic, **named))(*args)
    assert relative(y, wanted) < 2e-3
