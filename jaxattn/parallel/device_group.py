"""A group of devices: its mesh, and trees of arrays over it.

A tree over a group is one of global arrays, with a tree of PartitionSpecs beside it. What one GPU
has of it is a tree of local arrays; their addresses, and no copies, go from one to the other.
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
    """Devices in the order of `Parallel`'s numbers.

    Raises:
        ValueError: there are more or fewer devices than GPUs, or of several kinds.
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
        """Of an array that each GPU has its own of: one after another along the first axis."""
        return PartitionSpec(self.parallel.axes("all"))

    @property
    def rows(self) -> PartitionSpec:
        """Of an array of rows, the batch: those of the data groups one after another."""
        return PartitionSpec(self.parallel.axes("data"))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """A tree of PartitionSpecs as one of shardings."""
        return jax.tree.map(self.sharding, specs, is_leaf=_is_spec)

    def shapes(self, local: Any, specs: Any) -> Any:
        """The global shapes, with their shardings, of what each GPU has in these local ones.

        Args:
            specs: a tree of PartitionSpecs, or of the first of its branches.
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
        """A step of one GPU's shapes as one program of all GPUs.

        Args:
            in_specs: of its arguments, trees of PartitionSpecs or the first of their branches.
        """

        @functools.wraps(step)
        def over_all(*arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            specs = jax.tree.leaves(_spread(in_specs, arguments), is_leaf=_is_spec)
            # Empty arrays, which packed parameters have, are made inside: XLA's partitioner (jax
            # 0.11.2) ends the process where it meets one.
            full = [place for place, leaf in enumerate(leaves) if leaf.size]

            def on_each(*given: jax.Array) -> Any:
                made = [
                    jnp.zeros(leaf.shape, leaf.dtype) if not leaf.size else None for leaf in leaves
                ]
                for place, leaf in zip(full, given, strict=True):
                    made[place] = leaf
                return step(*jax.tree.unflatten(structure, made))

            # A Pallas kernel does not say how what it returns varies over the mesh.
            return jax.shard_map(
                on_each,
                mesh=self.mesh,
                in_specs=tuple(specs[place] for place in full),
                out_specs=out_specs,
                check_vma=False,
            )(*(leaves[place] for place in full))

        return over_all

    def put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """An array of the host's over the group; every process has to have the same.

        `jax.device_put` compares the processes' arrays first, by a collective of its own.
        """
        return jax.make_array_from_callback(
            array.shape, self.sharding(spec), lambda part: array[part]
        )

    def maker(self, make: Callable[[], Any], specs: Any) -> Callable[[], Any]:
        """Compiled: what each GPU makes for itself, as one tree over the group."""
        return jax.jit(self.step(make, (), specs)).lower().compile()

    def make(self, make: Callable[[], Any], specs: Any) -> Any:
        """What each GPU makes for itself, as one tree over the group."""
        return self.maker(make, specs)()

    def join(self, trees: Sequence[Any], specs: Any) -> Any:
        """One tree over the group of what lies on each of its devices, in their order."""

        def whole(spec: PartitionSpec, *parts: Any) -> Any:
            sharding = self.sharding(spec)

            def array(*leaves: jax.Array) -> jax.Array:
                shape = self._global(spec, leaves[0].shape)
                return jax.make_array_from_single_device_arrays(shape, sharding, list(leaves))

            return jax.tree.map(array, *parts)

        return jax.tree.map(whole, specs, *trees, is_leaf=_is_spec)

    def split(self, tree: Any) -> list[Any]:
        """The inverse of `join`: for each device of this process its own arrays."""
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
        """Those of this process, in the group's order."""
        process = jax.process_index()
        return [device for device in self.devices if device.process_index == process]

    def number(self, device: jax.Device) -> int:
        """The number of a device in the group."""
        return self.devices.index(device)

    def _global(self, spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.parallel.mesh_axes
        whole = list(shape)
        for axis, names in enumerate(spec):
            for name in (names,) if isinstance(names, str) else names or ():
                whole[axis] *= sizes[name]
        return tuple(whole)


def _spread(specs: Any, tree: Any) -> Any:
    """The specs with one for each leaf of the tree."""
    return jax.tree.map(
        lambda spec, branch: jax.tree.map(lambda _: spec, branch), specs, tree, is_leaf=_is_spec
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
