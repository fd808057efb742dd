"""New weights over several devices: each has the share that it would have at the start."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxattn.engine.startup.placed_params import CheckedParams
from jaxattn.engine.startup.weight_buffers import WeightBuffers
from jaxattn.models import divided
from jaxattn.parallel import Parallel
from tests.helpers.virtual_devices import on_virtual_devices
from tests.parallel.cases import decoder
from tests.parallel.test_same_tokens import GROUPED, HYBRID, KIMI


def numpy_params(model, seed):
    """NumPy's, without compiling a program of JAX."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: draw.standard_normal(x.shape).astype(x.dtype), model.param_shapes()
    )


def fully_sharded(tree, devices):
    """As a trainer has them: along the first axis that divides by all devices, else whole."""
    mesh = Mesh(np.array(devices), ("fsdp",))

    def put(leaf):
        axis = next((n for n, size in enumerate(leaf.shape) if size % len(devices) == 0), None)
        axes = () if axis is None else (*(None,) * axis, "fsdp")
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(put, tree)


def assert_equal(found, wanted):
    for own, other in zip(found, wanted, strict=True):
        assert own.sharding.is_equivalent_to(other.sharding, other.ndim)
        for one, two in zip(own.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, two.data)


def pointers(buffers):
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in buffers.leaves
        if leaf.size
        for shard in leaf.addressable_shards
    ]


@pytest.mark.slow_cases(reason="a cut of another axis; found by the other layouts there too")
@pytest.mark.parametrize(
    "layers, tied, layout",
    [
        (HYBRID, False, dict(tensor=2, context=2, expert=2)),
        pytest.param(HYBRID, False, dict(data=2, expert=2), marks=pytest.mark.slow),
        pytest.param(GROUPED, True, dict(data=2, tensor=4), marks=pytest.mark.slow),
        pytest.param(KIMI, False, dict(data=2, tensor=4, context=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_virtual_devices
def test_other_layouts_are_brought_into_the_engines_buffers(layers, tied, layout):
    whole, parallel = decoder(*layers, tied=tied), Parallel(**layout)
    model, devices = divided(whole, parallel), tuple(jax.devices()[: parallel.gpus])
    trees = [numpy_params(whole, seed) for seed in range(2)]
    placed = [CheckedParams.of(model, tree, devices).place() for tree in trees]
    given = jax.tree.map(jax.device_put, trees[0])  # some of it is the engine's on one device
    buffers = WeightBuffers(CheckedParams.of(model, given, devices))
    assert_equal(buffers.leaves, placed[0])

    def update(tree, **options):
        arriving = buffers.check(tree, strict=False)
        buffers.compile(arriving)
        buffers.update(arriving, share=False, **options)

    sharded = [fully_sharded(tree, devices) for tree in trees]
    update(sharded[1])
    assert_equal(buffers.leaves, placed[1])
    before = pointers(buffers)
    update(sharded[0])
    assert_equal(buffers.leaves, placed[0])
    assert pointers(buffers) == before
    jax.tree.map(np.testing.assert_array_equal, given, trees[0])
    buffers.check(sharded[1], strict=True)
    with pytest.raises(
        ValueError,
        match=r"parameter 'embedding' with .*; parameter .*expect_updates",
    ):
        buffers.check(trees[1], strict=True)
    buffers.compile_own()  # for those that it was made of, which are whole, as these are
    buffers.check(trees[1], strict=True)
