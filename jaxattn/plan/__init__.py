"""What memory a model takes, to the byte and with the reason, before anything is allocated.

    plan(config, device, limits)      of the hybrid decoder or of a named model; needs no device
    python -m jaxattn.plan NAME       the same as a table

An `Engine` makes the same plan, with what XLA says of its executables in place of upper bounds.
"""

from typing import TYPE_CHECKING, Any

from jaxattn.memory.budget import Budget as Budget
from jaxattn.memory.budget import Item as Item
from jaxattn.memory.budget import MemoryPlan as MemoryPlan
from jaxattn.memory.budget import PlanError as PlanError
from jaxattn.memory.budget import nbytes as nbytes
from jaxattn.memory.budget import solve as solve

if TYPE_CHECKING:
    from jaxattn.memory.device import DeviceMemory
    from jaxattn.memory.limits import Limits
    from jaxattn.models.config import HybridConfig
    from jaxattn.models.known import KnownModel
    from jaxattn.plan.placement import Placement


def plan(
    model: "HybridConfig | KnownModel",
    device: "DeviceMemory | str",
    limits: "Limits",
    *,
    placement: "Placement | None" = None,
) -> MemoryPlan:
    """What one device holds of the model, and how many pages of cache that leaves.

    Allocates nothing and compiles nothing: XLA's temp is an upper bound from shapes, marked as one.
    An `Engine` replaces it by what its executables say (`Engine.plan`).

    Args:
        model: a hybrid decoder's configuration, or `jaxattn.models.known.load(name)`.
        device: its memory, or its name for `known_device` (memory/device.py). What its `free` says
            is in use is left alone.
        limits: without `num_pages` the cache gets what `utilization` (then 0.9, if not given)
            leaves of the device.
        placement: how several GPUs hold a known model.

    Raises:
        PlanError: it does not fit, or the cache that is left holds no row at full length; the error
            has the plan and what would make it fit.
        ValueError: the limits, the device or the placement make no sense for the model.
    """
    import dataclasses

    from jaxattn.engine import memory_plan as hybrid
    from jaxattn.memory.device import known_device
    from jaxattn.models.config import HybridConfig
    from jaxattn.plan import known
    from jaxattn.plan.placement import Placement

    memory = known_device(device) if isinstance(device, str) else device
    if not isinstance(model, HybridConfig):
        return known.check_known(model, memory, limits, placement or Placement())
    if limits.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={limits.max_model_len} is longer than the model's "
            f"max_position_embeddings={model.max_position_embeddings}"
        )
    params = hybrid.packed_shapes(model)
    beside: Any = {"outside": known.DRIVER, "outside_basis": "assumed"}
    asked = limits.num_pages
    if asked is None:
        limits = dataclasses.replace(limits, utilization=limits.utilization or 0.9)
        row = dataclasses.replace(limits, num_pages=limits.pages_per_row)
        bounds = hybrid.from_shapes(model, row, params, None)
        limits = hybrid.fill(model, limits, memory, params, bounds, **beside)
    bounds = hybrid.from_shapes(model, limits, params, None)
    made = hybrid.plan_hybrid(model, limits, memory, params, bounds, **beside)

    def advice() -> tuple[str, ...]:
        return hybrid.advice(model, limits, memory, params, bounds, **beside)

    hybrid.check_row(made, limits, advice, wanted=asked)
    return made
