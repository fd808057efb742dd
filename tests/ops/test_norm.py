"""`rms_norm_layer` against float64 and its kernel; stacks, patterns, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.layer_index import LayerIndex
from jaxattn.kernels.linear.rms_norm import rms_norm_mosaic
from jaxattn.ops.linear.rms_norm import add_rms_norm_layer, rms_norm_layer
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import both_devices, no_races


def operands(tokens, features, layers=3):
    draw = normals(features)
    return draw(*tokens, features, scale=3), draw(layers, features, mean=1, scale=0.25)


def expected(x, weight, eps):
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.sampled
@pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("tokens, features", [((2, 1), 640), ((3,), 512), ((2,), 192)])
def test_matches_float64(tokens, features, dtype, implementation):
    x, weights = operands(tokens, features)
    weights = weights.at[:2].set(jnp.nan)  # other layers'
    norm = functools.partial(rms_norm_layer, eps=1e-3, dtype=dtype, implementation=implementation)
    out = jax.jit(norm)(x, weights, layer=2)
    assert out.dtype == dtype
    rtol = 2**-8 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(out, np.float64), expected(x, weights[2], 1e-3), rtol)


@pytest.mark.parametrize(
    "implementation",
    ["xla", "mosaic_gpu_interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
def test_the_sum_is_exact_and_the_norm_is_of_the_sum(implementation):
    x, weights = operands((3, 1), 640)
    added = normals(5)(*x.shape)
    norm = functools.partial(add_rms_norm_layer, eps=1e-3, implementation=implementation)
    total, out = jax.jit(norm)(x, added, weights, layer=1)
    np.testing.assert_array_equal(total, x + added)
    np.testing.assert_allclose(out, expected(total, weights[1], 1e-3), rtol=1e-5)


def test_what_is_added_has_the_shape_of_the_stream():
    x, weights = operands((2,), 256)
    with pytest.raises(ValueError, match=r"added \(1, 256\) must have the shape of x \(2, 256\)"):
        add_rms_norm_layer(x, x[:1], weights, layer=0)


@both_devices
def test_a_place_in_a_pattern_is_the_layer_of_its_number(implementation):
    x, weights = operands((2,), 256, layers=6)
    norm = functools.partial(rms_norm_layer, x, weights, implementation=implementation)
    by_place = jax.jit(lambda repeat: norm(layer=LayerIndex(repeat, 3, 1)))(jnp.int32(1))
    np.testing.assert_array_equal(by_place, norm(layer=4))


@pytest.mark.gpu
@pytest.mark.parametrize("features", [128, 2048, 2880, 7168, 8192])
def test_real_widths_and_more_blocks_than_65535(features):
    x, weights = operands((2**17 if features == 128 else 64, 1), features)
    norm = functools.partial(rms_norm_layer, layer=1, implementation="mosaic_gpu")
    np.testing.assert_allclose(jax.jit(norm)(x, weights), expected(x, weights[1], 1e-6), rtol=1e-5)


def test_no_race_in_the_interpreter():
    options = dict(eps=1e-6, dtype=jnp.bfloat16, interpret=True)
    for features, more in ((256, False), (256, True), (192, True)):
        x, weights = operands((2,), features)
        added = 2 * x if more else None
        with no_races():
            jax.block_until_ready(rms_norm_mosaic(x, weights, added=added, layer=0, **options))


@pytest.mark.parametrize("features", [64, 100, 16384])
def test_the_kernel_refuses_what_it_has_no_threads_for(features):
    x, weights = operands((1,), features)
    with pytest.raises(NotImplementedError, match=rf"features.*\(1, {features}\)"):
        rms_norm_layer(x, weights, layer=0, implementation="mosaic_gpu_interpret")


def test_shapes_that_do_not_fit_are_named():
    x, weights = operands((1,), 256)
    with pytest.raises(ValueError, match=r"x \(1, 128\).*weights \(3, 256\)"):
        rms_norm_layer(x[:, :128], weights, layer=0)
    with pytest.raises(TypeError, match=r"x must be.*int32 \(1, 256\)"):
        rms_norm_layer(x.astype(jnp.int32), weights, layer=0)
    with pytest.raises(ValueError, match="weights"):
        rms_norm_layer(x, weights[0], layer=0)
    with pytest.raises(TypeError, match="rms_norm_layer: x must be an array, got list"):
        rms_norm_layer([1.0], weights, layer=0)


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu", "xla"])
@pytest.mark.parametrize(
    "layer, error, words",
    [
        (3, ValueError, r"layer=3 is out of range: weights \(3, 256\) has 3"),
        (-1, ValueError, "layer=-1 is out of range"),
        (np.int64(5), ValueError, "layer=5 is out of range"),
        (jnp.int32(-1), ValueError, "layer=-1 is out of range"),
        (LayerIndex(1, 3, 0), ValueError, "layer=3 is out of range"),
        (LayerIndex(jnp.int32(1), 3, 2), ValueError, "layer=5 is out of range"),
        (True, TypeError, "layer must be an integer, got bool"),
        (1.0, TypeError, "layer must be an integer, got float"),
        (None, TypeError, "layer must be an integer, got NoneType"),
        (jnp.zeros(1, jnp.int32), TypeError, r"layer must be an integer scalar, got int32 \(1,\)"),
        (jnp.float32(1), TypeError, r"layer must be an integer scalar, got float32 \(\)"),
    ],
)
def test_a_layer_outside_of_the_stack_is_refused(layer, error, words, implementation):
    x, weights = operands((1,), 256)
    with pytest.raises(error, match=f"^rms_norm_layer: {words}"):
        rms_norm_layer(x, weights, layer=layer, implementation=implementation)
    with pytest.raises(error, match=f"^add_rms_norm_layer: {words}"):
        add_rms_norm_layer(x, x, weights, layer=layer, implementation=implementation)


@pytest.mark.parametrize("layer", [np.int64(2), np.array(2), jnp.int32(2), LayerIndex(2, 1, 0)])
def test_a_layer_may_be_any_integer(layer):
    x, weights = operands((1,), 256)
    found = rms_norm_layer(x, weights, layer=layer, implementation="xla")
    np.testing.assert_array_equal(found, rms_norm_layer(x, weights, layer=2, implementation="xla"))
