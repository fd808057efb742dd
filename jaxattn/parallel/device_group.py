"""A group of devices: its mesh, and trees of arrays over it.

A tree over a group has global arrays, described by a tree of PartitionSpecs. One GPU's part is a
tree of local arrays. Conversions between the two pass addresses and make no copies.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxattn.parallel.layout import Parallel


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """Devices in the order of `Parallel`'s GPU numbers.

    Raises:
        ValueError: The number of devices differs from the number of GPUs, or the devices are of
            several kinds.
    """

    parallel: Parallel
    devices: tuple[jax.Device, ...]

    def __post_init__(self) -> None:
        self.parallel.check_devices(self.devices)

    @cached_property
    def mesh(self) -> Mesh:
        axes = self.parallel.mesh_axes
        devices = np.array(self.devices).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))

    @property
    def each(self) -> PartitionSpec:
        """The spec of an array with a part per GPU, concatenated along the first axis."""
        return PartitionSpec(self.parallel.axes("all"))

    @property
    def rows(self) -> PartitionSpec:
        """The spec of an array of rows, with the data groups' rows concatenated."""
        return PartitionSpec(self.parallel.axes("data"))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """Converts a tree of PartitionSpecs to shardings."""
        return jax.tree.map(self.sharding, specs, is_leaf=_is_spec)

    def shapes(self, local: Any, specs: Any) -> Any:
        """Returns the global shapes, with shardings, for these local shapes.

        Args:
            specs: A tree of PartitionSpecs, or a prefix of such a tree.
        """

        def whole(spec: PartitionSpec, tree: Any) -> Any:
            sharding = self.sharding(spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    self._global(spec, x.shape), x.dtype, sharding=sharding
                ),
                tree,
            )

        return jax.tree.map(whole, specs, local, is_leaf=_is_spec)

    def step(
        self, step: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any
    ) -> Callable[..., Any]:
        """Returns one program of all GPUs from a step with the shapes of one GPU.

        Args:
            in_specs: The specs of its arguments, as trees of PartitionSpecs or prefixes of them.
        """

        @functools.wraps(step)
        def over_all(*arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            specs = jax.tree.leaves(_spread(in_specs, arguments), is_leaf=_is_spec)
            # Packed parameters have empty arrays. They are created inside, because XLA's
            # partitioner (jax 0.11.2) crashes on them.
            nonempty = [place for place, leaf in enumerate(leaves) if leaf.size]

            def on_each(*arrays: jax.Array) -> Any:
                made = [
                    jnp.zeros(leaf.shape, leaf.dtype) if not leaf.size else None for leaf in leaves
                ]
                for place, leaf in zip(nonempty, arrays, strict=True):
                    made[place] = leaf
                return step(*jax.tree.unflatten(structure, made))

            # Pallas kernels do not declare how their results vary over the mesh.
            return jax.shard_map(
                on_each,
                mesh=self.mesh,
                in_specs=tuple(specs[place] for place in nonempty),
                out_specs=out_specs,
                check_vma=False,
            )(*(leaves[place] for place in nonempty))

        return over_all

    def put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """Puts a host array on the group; every process must have the same array.

        `jax.device_put` would first compare the processes' arrays by a collective.
        """
        return jax.make_array_from_callback(
            array.shape, self.sharding(spec), lambda part: array[part]
        )

    def maker(self, make: Callable[[], Any], specs: Any) -> Callable[[], Any]:
        """Compiles a function with which each GPU makes its part of a tree over the group."""
        return jax.jit(self.step(make, (), specs)).lower().compile()

    def make(self, make: Callable[[], Any], specs: Any) -> Any:
        """Makes a tree over the group, each GPU its own part."""
        return self.maker(make, specs)()

    def join(self, trees: Sequence[Any], specs: Any) -> Any:
        """Joins the trees on the group's devices, in their order, into one tree over the group."""

        def whole(spec: PartitionSpec, *parts: Any) -> Any:
            sharding = self.sharding(spec)

            def array(*leaves: jax.Array) -> jax.Array:
                shape = self._global(spec, leaves[0].shape)
                return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

            return jax.tree.map(array, *parts)

        return jax.tree.map(whole, specs, *trees, is_leaf=_is_spec)

    def split(self, tree: Any) -> list[Any]:
        """The inverse of `join`: returns the arrays of each device of this process."""
        leaves, structure = jax.tree.flatten(tree)
        found = []
        for device in self.local_devices:
            own = [
                next(shard.data for shard in leaf.addressable_shards if shard.device == device)
                for leaf in leaves
            ]
            found.append(jax.tree.unflatten(structure, own))
        return found

    @property
    def local_devices(self) -> list[jax.Device]:
        """The devices of this process, in the group's order."""
        process = jax.process_index()
        return [device for device in self.devices if device.process_index == process]

    def number(self, device: jax.Device) -> int:
        """Returns the index of a device in the group."""
        return self.devices.index(device)

    def _global(self, spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.parallel.mesh_axes
        whole = list(shape)
        for axis, names in enumerate(spec):
            for name in (names,) if isinstance(names, str) else names or ():
                whole[axis] *= sizes[name]
        return tuple(whole)


def _spread(specs: Any, tree: Any) -> Any:
    """Returns the specs with one for each leaf of the tree."""
    return jax.tree.map(
        lambda spec, branch: jax.tree.map(lambda _: spec, branch), specs, tree, is_leaf=_is_spec
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
