"""The warm-up of an engine: the last measurement of memory, its state, and two runs per step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxattn.engine.compilation.sharded_step import (
    allocator_over,
    device_put_inputs,
    group_of,
)
from jaxattn.engine.execution.model_runner import in_turn
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.engine_build import EngineBuild, smallest_memory
from jaxattn.engine.startup.memory_plan import RESERVED
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import new_rows, new_state
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.memory.engine_limits import Limits
from jaxattn.memory.plan import PlanError, check_allocated, nbytes_each
from jaxattn.models.caches.layer_cache import DecodeState, line_name
from jaxattn.models.interface import Model
from jaxattn.parallel import DeviceGroup

Weights = tuple[jax.Array, ...]  # the leaves of packed parameters
Allocate = Callable[[], tuple[DecodeState, DeviceBatch]]


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


def allocator(prepared: EngineBuild) -> Allocate:
    """Returns a function that allocates state and rows; it compiles only once."""
    model, limits, steps = prepared.model, prepared.limits, prepared.steps
    group = group_of(model, prepared.devices)
    with PROCESS_STATE.lock((allocator, steps)):
        if steps.allocate is None and group is not None:
            steps.allocate = allocator_over(model, limits, group)
        elif steps.allocate is None:
            # One program for all arrays, because compiling one per array takes half a second.
            made = jax.jit(lambda: (new_state(model, limits), new_rows(limits)))
            steps.allocate = made.lower().compile()
        return steps.allocate


def allocate_state(
    prepared: EngineBuild, weights: Weights, allocate: Allocate
) -> tuple[DecodeState, DeviceBatch]:
    """Allocates state and rows as planned, and runs every step on them.

    Raises:
        PlanError: The allocated bytes differ from the plan.
    """
    limits, plan = prepared.limits, prepared.plan
    group = group_of(prepared.model, prepared.devices)
    state, rows = allocate()
    check_allocated("arena", state.arena, plan["arena"])
    check_allocated("rows", rows, plan["rows"])
    for arrays in state.caches.values():
        for name, array in arrays.items():
            check_allocated(line_name(name), array, plan[line_name(name)])
    executables = prepared.steps.executables
    return warm_up(prepared.model, limits, executables, weights, state, rows, group)


def warm_up(
    model: Model,
    limits: Limits,
    executables: Mapping[str, Any],
    weights: Weights,
    state: DecodeState,
    rows: DeviceBatch,
    group: DeviceGroup | None = None,
) -> tuple[DecodeState, DeviceBatch]:
    """Runs each step twice, on padding, and returns state and rows, to which no step writes.

    On a GPU the first two runs are special: one loads the modules, the other records the command
    buffer.
    """
    for step in all_steps(limits) * 2:
        given, executable = step.padding(model, limits), executables[str(step)]
        if group is not None:
            given = device_put_inputs(step, given, model, group)
            executable = functools.partial(in_turn, executable)
        state, rows, told = step.call(executable, given, weights, state, rows)
        jax.block_until_ready((told, rows))
    return state, rows
