"""The measurements of device memory at an engine's start, and the plans made from them."""

import dataclasses

import jax

from jaxattn.engine.startup.engine_build import EngineBuild, smallest_memory
from jaxattn.engine.startup.memory_plan import RESERVED
from jaxattn.memory.plan import PlanError, nbytes_each

Weights = tuple[jax.Array, ...]  # the leaves of packed parameters


def profile_memory(build: EngineBuild, weights: Weights, *, ran: bool = False) -> EngineBuild:
    """Plans again with the device's current memory. If there is less, the engine gets fewer pages.

    Args:
        ran: Whether the steps have run before, so that the driver already has its memory.

    Raises:
        PlanError: The plan does not fit.
    """
    compiler, executable_memory = build.compiler, build.executable_memory
    if ran:
        compiler = dataclasses.replace(compiler, driver=0)
    memory = smallest_memory(build.devices)
    own = nbytes_each(weights)
    if build.requested_limits.utilization is not None and memory is not None:
        filled = compiler.fill(build.requested_limits, executable_memory, memory, own)
        if filled.pages < build.limits.pages:
            limits, steps, executable_memory = compiler.fit(
                build.requested_limits, executable_memory, memory, own, build.steps
            )
            build = dataclasses.replace(
                build, limits=limits, steps=steps, executable_memory=executable_memory
            )
    plan = compiler.plan(
        build.limits, executable_memory, memory, own, requested=build.requested_limits
    )
    return dataclasses.replace(build, plan=plan)


def check_room(build: EngineBuild, weights: Weights) -> None:
    """Checks that the plan still fits next to the memory that others hold on the device now.

    Raises:
        PlanError: The plan does not fit.
    """
    plan, memory = build.plan, smallest_memory(build.devices)
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


def measured_plan(build: EngineBuild) -> EngineBuild:
    """Returns the build with the measured bytes of the driver in its plan, after all steps ran."""
    memory = smallest_memory(build.devices)
    plan = build.compiler.measured(build.plan, build.executable_memory, memory)
    return dataclasses.replace(build, plan=plan)
