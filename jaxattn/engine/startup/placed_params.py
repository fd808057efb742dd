"""Parameters on their way into an engine: checked, put on its devices and packed."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.memory.budget import nbytes_each
from jaxattn.models.interface import Model, check_params
from jaxattn.parallel import DeviceGroup


def checked_params(model: Model, params: Any) -> Any:
    """The packed parameters as shapes.

    Raises:
        ValueError: `params` are neither the model's parameters nor its packed ones.
    """
    packed = packed_shapes(model)
    if str(jax.tree.structure(params)) == str(jax.tree.structure(packed)):
        check_params(packed, params)
    elif not is_placed(model, params):
        check_params(model.whole.param_shapes(), params)
    return packed


def is_placed(model: Model, params: Any) -> bool:
    """Whether the parameters are over a group already, each GPU's share on its device."""
    if model.parallel.gpus == 1:
        return False
    local = model.param_shapes()
    if str(jax.tree.structure(params)) != str(jax.tree.structure(local)):
        return False
    return all(
        isinstance(leaf, jax.Array)
        and len(leaf.sharding.device_set) == model.parallel.gpus
        and leaf.sharding.shard_shape(leaf.shape) == own.shape
        for leaf, own in zip(jax.tree.leaves(params), jax.tree.leaves(local), strict=True)
    )


def on_device(params: Any, devices: Sequence[jax.Device]) -> int:
    """Bytes, on each device, of the arrays among them that lie on these: shapes take none."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    return nbytes_each([leaf for leaf in leaves if leaf.devices() & set(devices)])


def packed_params(model: Model, params: Any, devices: tuple[jax.Device, ...]) -> Any:
    """The parameters on the engine's devices, as its steps read them.

    Raises:
        ValueError: see `placed_params`.
    """
    if len(devices) == 1:
        return model.pack(placed_params(params, devices))
    group = DeviceGroup(model.parallel, devices)
    if not is_placed(model, params):
        params = model.place_params(params, group)
    return group.join([model.pack(own) for own in group.split(params)], model.packed_specs())


def placed_params(params: Any, devices: Sequence[jax.Device]) -> Any:
    """The parameters on the engine's devices: NumPy arrays are put there.

    Raises:
        ValueError: an array lies on another device; it would be copied in every step.
    """

    def placed(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, devices[0])
        if not leaf.devices() <= set(devices):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"parameter {name!r} lies on {', '.join(map(str, leaf.devices()))}, and the engine "
                f"runs on {devices[0]}; move the parameters with jax.device_put"
            )
        return leaf

    return jax.tree.map_with_path(placed, params)
