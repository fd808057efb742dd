"""Parameters for an engine: checked once, then placed on its devices and packed."""

import dataclasses
from typing import Any, Self

import jax

from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.memory.plan import nbytes_each
from jaxattn.models.interface import Model, check_params
from jaxattn.parallel import DeviceGroup


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedParams:
    """A model's parameters, or their shapes, for an engine on these devices.

    Attributes:
        params: The parameters in the caller's form.
        packed: The shapes of the packed parameters.
        sharded: Whether each GPU's share already lies on its device.
    """

    model: Model
    devices: tuple[jax.Device, ...]
    params: Any
    packed: Any
    sharded: bool

    @classmethod
    def of(
        cls, model: Model, params: Any, devices: tuple[jax.Device, ...], *, loaded: bool = True
    ) -> Self:
        """Checks parameters.

        Args:
            loaded: Whether to refuse shapes, and arrays on a device that is not the engine's.

        Raises:
            TypeError: `params` are shapes.
            ValueError: `params` are neither the model's parameters nor its packed ones. Or an array
                lies on another device, so that every step would copy it.
        """
        for path, leaf in jax.tree.leaves_with_path(params) if loaded else ():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    "params are shapes, but an engine needs arrays. To compile before the "
                    "parameters are loaded, use Engine.of(prepare(model, shapes, limits)) and "
                    "start(params)"
                )
            on = leaf.devices() if isinstance(leaf, jax.Array) else set()
            if len(devices) == 1 and not on <= set(devices):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(
                    f"parameter {name!r} is on {', '.join(map(str, on))}, but the engine runs on "
                    f"{devices[0]}; move the parameters with jax.device_put"
                )
        packed = packed_shapes(model)
        is_packed = str(jax.tree.structure(params)) == str(jax.tree.structure(packed))
        sharded = not is_packed and _is_sharded(model, params)
        if not sharded:
            check_params(packed if is_packed else model.whole.param_shapes(), params)
        return cls(model, devices, params, packed, sharded)

    @property
    def nbytes(self) -> int:
        """The bytes, per device, of the parameters that are already there; shapes take none."""
        arrays = [leaf for leaf in jax.tree.leaves(self.params) if isinstance(leaf, jax.Array)]
        return nbytes_each([leaf for leaf in arrays if leaf.devices() & set(self.devices)])

    def place(self) -> tuple[jax.Array, ...]:
        """Returns the leaves of the packed parameters on the devices, as the steps take them."""
        model, devices = self.model, self.devices
        if len(devices) > 1:
            group = DeviceGroup(model.parallel, devices)
            over = self.params if self.sharded else model.place_params(self.params, group)
            shares = [model.pack(own) for own in group.split(over)]
            return tuple(jax.tree.leaves(group.join(shares, model.packed_specs())))

        def put(leaf: Any) -> jax.Array:
            return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, devices[0])

        return tuple(jax.tree.leaves(model.pack(jax.tree.map(put, self.params))))


def _is_sharded(model: Model, params: Any) -> bool:
    """Whether each GPU's share already lies on its device."""
    gpus, local = model.parallel.gpus, model.param_shapes()
    if gpus == 1 or str(jax.tree.structure(params)) != str(jax.tree.structure(local)):
        return False
    return all(
        isinstance(leaf, jax.Array)
        and len(leaf.sharding.device_set) == gpus
        and leaf.sharding.shard_shape(leaf.shape) == own.shape
        for leaf, own in zip(jax.tree.leaves(params), jax.tree.leaves(local), strict=True)
    )
