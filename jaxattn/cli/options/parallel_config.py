"""The layout of a model over several GPUs, from the options of `serve` and `plan`."""

import argparse

import jax

from jaxattn.cli.options.parser import InputError
from jaxattn.memory.engine_limits import Limits
from jaxattn.models import divided
from jaxattn.models.interface import Model
from jaxattn.parallel import DeviceGroup, Parallel


def read_layout(options: argparse.Namespace) -> Parallel:
    """Returns the layout over GPUs.

    Raises:
        InputError: If the numbers do not form a valid layout.
    """
    try:
        return Parallel(
            data=options.data,
            tensor=options.tensor,
            context=options.context,
            expert=options.expert,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def shard_over_devices(
    model: Model, limits: Limits, parallel: Parallel
) -> tuple[Model, DeviceGroup | None]:
    """Returns one GPU's shard of the model, and the group of devices or None for a single GPU.

    Raises:
        InputError: If the model does not support the layout, or there are fewer devices.
    """
    if parallel.gpus == 1:
        return model, None
    devices = tuple(jax.devices())
    if len(devices) < parallel.gpus:
        raise InputError(
            f"{parallel.flags} takes {parallel.gpus} devices, and JAX sees {len(devices)}"
        )
    try:
        served = model.with_cache_format(limits.cache_format, limits.native_layers)
        return divided(served, parallel), DeviceGroup(parallel, devices[: parallel.gpus])
    except ValueError as error:
        raise InputError(str(error)) from error
