"""Linears with FP8 weights: alone, in a stack, behind a norm, beside another in bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.fp8_block_scaling import dequantize, quantize
from jaxattn.core.numerics.fp8_weight_layout import (
    deinterleave_columns,
    interleave_columns,
    split_fp8,
)
from jaxattn.nn import Fp8Linear, GatedDeltaNet, GatedMLP, Linear
from jaxattn.nn.fp8_linear import ExtraFp8Weights
from jaxattn.nn.linear import StackedWeight, linears
from jaxattn.nn.linear_attention import gdn as gdn_module
from jaxattn.ops.linear import norm_linear
from jaxattn.ops.linear.norm_linear import PendingNorm
from tests.helpers.at_once import at_once
from tests.helpers.draws import normals

INTERPRET = "mosaic_gpu_interpret"


def test_pairs_are_four_bytes_of_a_thread():
    columns = interleave_columns(jnp.arange(32))
    assert columns[:8].tolist() == [0, 8, 1, 9, 2, 10, 3, 11] and columns[16] == 16
    np.testing.assert_array_equal(deinterleave_columns(columns), np.arange(32))


@pytest.mark.parametrize("dtype, limit", [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_a_linear_multiplies_by_what_its_numbers_mean(dtype, limit):
    linear = Fp8Linear(160, 192, dtype=dtype, rngs=nnx.Rngs(0))
    assert linear.weight.shape == (192, 160) and linear.scale.shape == (2, 2)
    x = normals(1)(2, 3, 160)
    wide = np.asarray(
        at_once(
            lambda: dequantize(
                deinterleave_columns(linear.weight[...]), linear.scale[...], jnp.float32
            )
        )
    )
    expected = np.asarray(x, np.float64) @ wide.T
    found = np.asarray(at_once(linear, x), np.float64)
    assert np.linalg.norm(found - expected) <= limit * np.linalg.norm(expected)
    gradient = at_once(jax.grad(lambda x: linear(x).sum()), x)
    np.testing.assert_allclose(gradient[0, 0], wide.sum(0), rtol=3e-2, atol=3e-2)


def among_nan(own: jax.Array, layers: int, layer: int) -> jax.Array:
    stack = np.full((layers, *own.shape), np.nan, own.dtype)
    stack[layer] = own
    return jnp.asarray(stack)


def stacked(linear: Linear, layers: int, layer: int, implementation: str) -> Linear:
    """The linear as number `layer` of a stack; the others are NaN."""
    place = LayerIndex(jnp.int32(layer + 1), 1, -1)
    for name, attribute in linear.stacked.items():
        stack = among_nan(getattr(linear, name)[...], layers, layer)
        setattr(linear, attribute, StackedWeight(stack, place, implementation))
    return linear


@pytest.mark.slow_cases(
    reason="a token's norm that is another's; found by one token there and tokens of each kernel "
    "alone too"
)
@pytest.mark.parametrize("tokens", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_two_kinds_beside_each_other_behind_a_norm(tokens, monkeypatch):
    made = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    own = Fp8Linear(512, 256, **made), Linear(512, 64, **made), Fp8Linear(512, 128, **made)
    draw = np.random.default_rng(1)
    x, added = (draw.standard_normal((1, tokens, 512), np.float32) for _ in range(2))
    norms = 1 + draw.standard_normal((4, 512), np.float32) / 8
    # The launch of FP8 weights makes the norm, and no other.
    monkeypatch.setattr(norm_linear, "linears_mosaic", None)

    def run(implementation: str, *modules: Linear):
        for module in modules:
            stacked(module, 3, 1, implementation)

        def call(x, added, norms):
            stream = PendingNorm(
                x, added, norms, layer=LayerIndex(modules[0].in_stack.layer.repeat, 2, -1),
                eps=1e-6, dtype=jnp.bfloat16, implementation=implementation,
            )  # fmt: skip
            return [*linears(stream, *modules), stream.total]

        return jax.jit(call)(x, added, norms)

    found, expected = run(INTERPRET, *own), run("xla", *own)
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(each, np.float64) for each in (one, other))
        assert np.isfinite(one).all()
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)


def test_an_mlp_takes_gate_and_up_in_one_launch():
    names = ("gate_proj", "up_proj", "down_proj")
    mlp = GatedMLP(256, 128, fp8=names, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert all(isinstance(getattr(mlp, name), Fp8Linear) for name in names)
    x = normals(1)(1, 2, 256)
    expected = np.asarray(at_once(mlp, x))
    for name in names:
        stacked(getattr(mlp, name), 2, 1, INTERPRET)
    text = str(jax.make_jaxpr(lambda x: mlp(x))(x))
    assert text.count("name=linear_fp8_layer") >= 2
    found = np.asarray(at_once(mlp, x))
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


def test_numbers_of_another_dtype_are_quantized_as_published():
    weights = jax.random.normal(jax.random.key(0), (128, 256))

    def there_and_back(weights):
        numbers, scales = quantize(weights)
        return dequantize(deinterleave_columns(interleave_columns(numbers)), scales, jnp.float32)

    np.testing.assert_allclose(at_once(there_and_back, weights), weights, atol=0.15)


@pytest.mark.parametrize("rows", [64, 128])
def test_two_parts_have_the_bits_of_bfloat16(rows):
    weights = np.random.default_rng(0).standard_normal((2, rows, 256)).clip(-3.5, 3.5)
    weights[:, 0, ::128] = 3.515625  # just above 448 / 128: no scale is coarser
    weights = weights.astype(jnp.bfloat16)
    numbers, scales = at_once(split_fp8, jnp.asarray(weights))
    assert numbers.shape == (2, 2 * rows, 256) and scales.shape == (2, 2 * rows // 128, 2)
    first, rest = np.split(np.asarray(at_once(dequantize, numbers, scales, jnp.float32)), 2, axis=1)
    found, wide = first + rest, weights.astype(np.float32)
    np.testing.assert_allclose(found, wide, atol=2.0**-17 * np.abs(wide).max(), rtol=0)
    large = np.abs(wide) > np.abs(wide).max() / 896
    np.testing.assert_array_equal(found[large], wide[large])
    zeros = at_once(split_fp8, jnp.zeros((1, 64, 128)))[0]
    assert not np.asarray(zeros, np.float32).any()


def test_a_delta_nets_gates_are_in_the_launch_of_its_inputs(monkeypatch):
    made = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    net = GatedDeltaNet(256, 16, 32, fp8=("in_proj_qkvz",), **made)
    x = normals(1)(2, 1, 256, dtype=jnp.bfloat16)
    pools = jnp.zeros((2, 3, net.conv_dim), jnp.bfloat16), jnp.zeros((2, 32, 128, 128))
    slots = np.arange(2)
    step = partial(net.decode, x, *pools, state_indices=slots, implementation="xla")
    expected = at_once(step)
    own = stacked(net.in_proj_qkvz, 2, 1, INTERPRET).in_stack
    numbers, scales = at_once(split_fp8, net.in_proj_ba.weight[...].T)
    stacks = (among_nan(each, 2, 1) for each in (at_once(interleave_columns, numbers), scales))
    places = (StackedWeight(stack, own.layer, INTERPRET) for stack in stacks)
    net.gates_in_stack = ExtraFp8Weights(*places, jnp.dtype(jnp.float32))
    monkeypatch.setattr(gdn_module, "linears", None)  # all four are one launch
    for one, other in zip(at_once(step)[:3], expected[:3], strict=True):
        one, other = (np.asarray(each, np.float64) for each in (one, other))
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other) > 0
