"""The measurements of device memory at an engine's start, and the plans made from them."""

import dataclasses

import jax

from jaxattn.engine.startup.engine_build import EngineBuild, smallest_memory
from jaxattn.engine.startup.memory_plan import RESERVED
from jaxattn.memory.plan import PlanError, nbytes_each

Weights = tuple[jax.Array, ...]  # the leaves of packed parameters


def profile_memory(prepared: EngineBuild, weights: Weights, *, ran: bool = False) -> EngineBuild:
    """Plans again with the device's current memory. If there is less, the engine gets fewer pages.

    Args:
        ran: Whether the steps have run before, so that the driver already has its memory.

    Raises:
        PlanError: The plan does not fit.
    """
    compiler, known = prepared.compiler, prepared.known
    if ran:
        compiler = dataclasses.replace(compiler, driver=0)
    memory = smallest_memory(prepared.devices)
    own = nbytes_each(weights)
    if prepared.wanted.utilization is not None and memory is not None:
        filled = compiler.fill(prepared.wanted, known, memory, own)
        if filled.pages < prepared.limits.pages:
            limits, steps, known = compiler.fit(prepared.wanted, known, memory, own, prepared.steps)
            prepared = dataclasses.replace(prepared, limits=limits, steps=steps, known=known)
    plan = compiler.plan(prepared.limits, known, memory, own, wanted=prepared.wanted)
    return dataclasses.replace(prepared, plan=plan)


def check_room(prepared: EngineBuild, weights: Weights) -> None:
    """Checks that the plan still fits next to the memory that others hold on the device now.

    Raises:
        PlanError: The plan does not fit.
    """
    plan, memory = prepared.plan, smallest_memory(prepared.devices)
    if memory is None or plan.budget is None:
        return
    held = max(memory.in_use - nbytes_each(weights), 0)
    others = sum(item.nbytes for item in plan.items if item.name in ("others", RESERVED))
    own = plan.inside - others
    if held + own > (room := plan.budget.arrays(plan.outside)):
        raise PlanError(
            f"the engine needs {own:,} bytes by its plan, but other arrays hold {held:,} of the "
            f"available {room:,}; delete some of these arrays, such as a trainer's",
            plan,
        )


def measured_plan(prepared: EngineBuild) -> EngineBuild:
    """Returns the build with the measured bytes of the driver in its plan, after all steps ran."""
    memory = smallest_memory(prepared.devices)
    plan = prepared.compiler.measured(prepared.plan, prepared.known, memory)
    return dataclasses.replace(prepared, plan=plan)
