"""The norm of a stream and the product after it, in one launch and in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.core.layer_index import LayerIndex
from jaxattn.nn.linear import Linear, StackedWeight, linears
from jaxattn.ops.linear.norm_linear import PendingNorm, tokens_of
from tests.helpers.draws import normals
from tests.helpers.kernel_cases import no_races


def stream(tokens=1, features=256, implementation=None, seed=0):
    draw = normals(seed)
    x, added = (draw(tokens, 1, features) for _ in range(2))
    norms = draw(4, features, mean=1, scale=0.1)
    layer = jnp.int32(1)
    made = PendingNorm(
        x, added, norms, layer=LayerIndex(layer, 2, 1), eps=1e-6, dtype=jnp.bfloat16,
        implementation=implementation,
    )  # fmt: skip
    total = np.asarray(x, np.float64) + np.asarray(added, np.float64)
    square = (total**2).mean(-1, keepdims=True)
    return made, layer, total, total / np.sqrt(square + 1e-6) * np.asarray(norms[3], np.float64)


def matrix(features=256, columns=128, seed=1, dtype=jnp.bfloat16):
    return normals(seed)(2, features, columns, scale=features**-0.5, dtype=dtype)


@pytest.mark.parametrize("give", [False, True])
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu_interpret"])
def test_a_product_makes_the_norm_that_it_reads(implementation, give):
    x, layer, total, normed = stream(implementation=implementation)
    weight, place = matrix(), LayerIndex(layer, 1, 0)
    assert x.serves([weight], place)
    (y,) = x.linears((weight,), layer=place, out_dtypes=[jnp.float32], give=give)
    wanted = normed @ np.asarray(weight[1], np.float64)
    assert y.shape == (1, 1, 128)
    assert np.linalg.norm(y - wanted) <= 4e-3 * np.linalg.norm(wanted)
    np.testing.assert_allclose(x.total, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(tokens_of(x).astype(jnp.float32), normed, rtol=2**-8, atol=1e-6)


def test_no_race_between_a_norm_and_its_product():
    x, layer, *_ = stream(features=1024, implementation="mosaic_gpu_interpret")
    place = LayerIndex(layer, 1, 0)
    with no_races():
        weights = (matrix(1024, 256), matrix(1024, 128))
        ys = x.linears(weights, layer=place, out_dtypes=[jnp.float32] * 2, give=True)
        jax.block_until_ready((ys, x.total))


def test_what_the_product_does_not_serve_is_normed_by_itself():
    x, layer, total, normed = stream(tokens=3)
    place = LayerIndex(layer, 1, 0)
    assert not x.serves([matrix()], place)
    np.testing.assert_allclose(jnp.asarray(x).astype(jnp.float32), normed, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(x.total, total, rtol=1e-6, atol=1e-6)
    one, layer, *_ = stream()
    place = LayerIndex(layer, 1, 0)
    assert one.serves([matrix()], place)
    assert not one.serves([matrix()], LayerIndex(jnp.int32(1), 1, 0))  # another loop's number
    assert not one.serves([matrix(dtype=jnp.float32)], place)
    assert not one.serves([matrix(256, 96)], place)
    assert not stream(features=192)[0].serves([matrix(192)], place)
    assert not stream(implementation="xla")[0].serves([matrix()], place)


def test_modules_take_a_stream_before_its_norm():
    from flax import nnx

    x, layer, _, normed = stream()
    linear = Linear(256, 64, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    linear.in_stack = StackedWeight(matrix(256, 64), LayerIndex(layer, 1, 0), None)
    (y,) = linears(x, linear)
    wanted = normed @ np.asarray(linear.in_stack.weights[1], np.float64)
    assert np.linalg.norm(y - wanted) <= 4e-3 * np.linalg.norm(wanted)
    apart = linear(stream()[0])  # a module by itself asks for the norm
    np.testing.assert_allclose(apart, y, rtol=2e-2, atol=2e-2)
