"""The sum over GPUs with residual and norm: XLA's form on virtual devices, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxattn.core.cache.symmetric_buffer import SymmetricBuffer
from jaxattn.core.dispatch import Refusal, traced_for_hopper
from jaxattn.ops.collectives.all_reduce_norm import all_reduce_norm_layer
from jaxattn.parallel import DeviceGroup, Parallel
from tests.helpers.virtual_devices import on_virtual_devices

TOKENS, FEATURES, LAYERS, EPS = 5, 256, 3, 1e-6
GPUS = 4


def inputs(tokens: int, features: int, gpus: int, layers: int = LAYERS) -> tuple[np.ndarray, ...]:
    """(residual, the parts of all GPUs, weights), float32."""
    random = np.random.default_rng(7)
    sizes = (tokens, features), (gpus, tokens, features), (layers, features)
    residual, parts, weights = (random.standard_normal(size, np.float32) for size in sizes)
    return residual, parts, weights


def expected(
    residual: np.ndarray, parts: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(sum, norm) of parts that were rounded to bfloat16, in float64."""
    sent = np.asarray(parts.astype(jnp.bfloat16), np.float64)
    total = residual.astype(np.float64) + sent.sum(0)
    return total, total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS) * weight


@on_virtual_devices
def test_parts_are_added_to_the_residual_and_normed():
    group = DeviceGroup(Parallel(tensor=GPUS), tuple(jax.devices()[:GPUS]))
    residual, parts, weights = inputs(TOKENS, FEATURES, GPUS)
    axes = group.parallel.axes("tensor")

    def step(x: jax.Array, part: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        mailbox = SymmetricBuffer.empty(GPUS, TOKENS, FEATURES)
        return all_reduce_norm_layer(x, part[0], weights, mailbox, axes=axes, layer=1, eps=EPS)[:2]

    whole = PartitionSpec()
    specs = whole, PartitionSpec(axes), whole
    found = jax.jit(group.step(step, specs, (whole, whole)))(residual, parts, weights)
    total, normed = expected(residual, parts, weights[1])
    # The all-reduce rounds the sum of some numbers of about 1 to bfloat16.
    np.testing.assert_allclose(found[0], total, atol=2**-5)
    np.testing.assert_allclose(found[1], normed, atol=2**-4)
    assert np.abs(np.asarray(found[0]) - total).mean() < 2**-7


@on_virtual_devices
def test_a_mailbox_of_another_size_and_the_interpreter_are_refused():
    group = DeviceGroup(Parallel(tensor=2), tuple(jax.devices()[:2]))
    axes, whole = group.parallel.axes("tensor"), PartitionSpec()
    x, weights = jnp.zeros((8, FEATURES)), jnp.ones((1, FEATURES))

    def run(mailbox: SymmetricBuffer, implementation=None) -> None:
        def step(x: jax.Array, weights: jax.Array) -> jax.Array:
            return all_reduce_norm_layer(
                x, x, weights, mailbox, axes=axes, layer=0, implementation=implementation
            )[0]

        jax.eval_shape(group.step(step, (whole, whole), whole), x, weights)

    for mailbox in (SymmetricBuffer.empty(4, 8, FEATURES), SymmetricBuffer.empty(2, 7, FEATURES)):
        with pytest.raises(ValueError, match="the mailbox is for .* needs one of its own size"):
            run(mailbox)
    fits = SymmetricBuffer.empty(2, 8, FEATURES)
    run(fits)
    with pytest.raises(Refusal, match="interpreter does not support peer memory"):
        run(fits, "mosaic_gpu_interpret")
    with pytest.raises(Refusal, match="needs a Hopper GPU"):
        run(fits, "mosaic_gpu")


@on_virtual_devices
def test_gpus_that_are_not_the_mesh_and_an_inbox_of_2_gib_are_refused():
    """Parts would go to the memory of others, or before the inbox."""
    group = DeviceGroup(Parallel(tensor=4, context=2), tuple(jax.devices()[:4]))
    whole, every = PartitionSpec(), group.parallel.axes("all")

    def run(axes: tuple[str, ...], gpus: int, tokens: int, features: int) -> None:
        def step(x: jax.Array, weights: jax.Array) -> jax.Array:
            mailbox = SymmetricBuffer.empty(gpus, tokens, features)

            def layer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
                return all_reduce_norm_layer(
                    x, x, weights, mailbox, axes=axes, layer=number, implementation="mosaic_gpu"
                )[0], None

            return lax.scan(layer, x, jnp.arange(1))[0]

        of = (jax.ShapeDtypeStruct((n, features), jnp.float32) for n in (tokens, 1))
        with traced_for_hopper(True):
            jax.eval_shape(group.step(step, (whole, whole), whole), *of)

    for axes, gpus in ((group.parallel.axes("context"), 2), (every[::-1], 4)):
        with pytest.raises(Refusal, match="needs all axes of the mesh, in its order"):
            run(axes, gpus, 8, FEATURES)
    with pytest.raises(Refusal, match="less than 2 GiB"):
        run(every, 4, 16385, 8192)
    run(every, 4, 8, FEATURES)
