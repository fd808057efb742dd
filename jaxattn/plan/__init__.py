"""What memory a model takes, to the byte and with the reason, before anything is allocated.

    plan(model, device, limits)       of a model or of a named public one; needs no device
    python -m jaxattn.plan NAME       the same as a table

An `Engine` makes the same plan, with what XLA says of its executables in place of upper bounds.
"""

import dataclasses
from typing import Any

from jaxattn.engine.memory_plan import (
    advice,
    check_row,
    fill,
    from_shapes,
    packed_shapes,
    plan_engine,
)
from jaxattn.engine.prepare import check_arguments
from jaxattn.memory.budget import Budget as Budget
from jaxattn.memory.budget import Item as Item
from jaxattn.memory.budget import MemoryPlan as MemoryPlan
from jaxattn.memory.budget import PlanError as PlanError
from jaxattn.memory.budget import nbytes as nbytes
from jaxattn.memory.budget import solve as solve
from jaxattn.memory.device import DeviceMemory, known_device
from jaxattn.memory.limits import Limits
from jaxattn.models.base import Model
from jaxattn.models.known import KnownModel
from jaxattn.plan import known
from jaxattn.plan.placement import Placement


def plan(
    model: Model | KnownModel,
    device: DeviceMemory | str,
    limits: Limits,
    *,
    placement: Placement | None = None,
) -> MemoryPlan:
    """What one device holds of the model, and how many pages of cache that leaves.

    Allocates nothing and compiles nothing: XLA's temp is an upper bound from shapes, marked as one.
    `prepare` replaces it by what the executables say.

    Args:
        model: such as `jaxattn.models.Hybrid(config)`, or `jaxattn.models.known.load(name)`.
        device: its memory, or its name for `known_device` (memory/device.py). What its `free` says
            is in use is left alone.
        limits: without `num_pages` the cache gets what `utilization` (then 0.9, if not given)
            leaves of the device.
        placement: how several GPUs hold a known model.

    Raises:
        TypeError: the model is neither.
        PlanError: it does not fit, or the cache that is left holds no row at full length; the error
            has the plan and what would make it fit.
        ValueError: the limits, the device or the placement make no sense for the model.
    """
    memory = known_device(device) if isinstance(device, str) else device
    if isinstance(model, KnownModel):
        return known.check_known(model, memory, limits, placement or Placement())
    check_arguments(model, limits, None)
    params = packed_shapes(model)
    driver = 0 if memory.name == "cpu" else known.DRIVER
    beside: Any = {"outside": driver, "outside_basis": "assumed"}
    asked = limits.num_pages
    if asked is None:
        limits = dataclasses.replace(limits, utilization=limits.utilization or 0.9)
    # If weights and state alone do not fit, nothing is traced.
    least = limits if asked else dataclasses.replace(limits, num_pages=1)
    plan_engine(model, least, memory, params, {}, **beside).check(
        lambda: advice(model, least, memory, params, {}, **beside)
    )
    if asked is None:
        row = dataclasses.replace(limits, num_pages=limits.pages_per_row)
        bounds = from_shapes(model, row, params, None)
        limits = fill(model, limits, memory, params, bounds, **beside)
    bounds = from_shapes(model, limits, params, None)
    made = plan_engine(model, limits, memory, params, bounds, **beside)

    def helps() -> tuple[str, ...]:
        return advice(model, limits, memory, params, bounds, **beside)

    check_row(made, limits, helps, wanted=asked)
    return made
