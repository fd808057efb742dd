"""The allocation of an engine's state and rows as planned, and the warm-up of its steps."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxattn.engine.compilation.sharded_step import (
    allocator_over,
    device_put_inputs,
    group_of,
)
from jaxattn.engine.execution.model_runner import call_serialized
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.engine_build import EngineBuild
from jaxattn.engine.startup.memory_profiling import Weights
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import new_rows, new_state
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.limits import Limits
from jaxattn.memory.plan import check_allocated
from jaxattn.models.caches.layer_cache import DecodeState, line_name
from jaxattn.models.interface import Model
from jaxattn.parallel import DeviceGroup

Allocate = Callable[[], tuple[DecodeState, DeviceBatch]]


def allocator(build: EngineBuild) -> Allocate:
    """Returns a function that allocates state and rows; it compiles only once."""
    model, limits, steps = build.model, build.limits, build.steps
    group = group_of(model, build.devices)
    with PROCESS_STATE.lock((allocator, steps)):
        if steps.allocate is None and group is not None:
            steps.allocate = allocator_over(model, limits, group)
        elif steps.allocate is None:
            # One program for all arrays, because compiling one per array takes half a second.
            made = jax.jit(lambda: (new_state(model, limits), new_rows(limits)))
            steps.allocate = made.lower().compile()
        return steps.allocate


def allocate_state(
    build: EngineBuild, weights: Weights, allocate: Allocate
) -> tuple[DecodeState, DeviceBatch]:
    """Allocates state and rows as planned, and runs every step on them.

    Raises:
        PlanError: The allocated bytes differ from the plan.
    """
    limits, plan = build.limits, build.plan
    group = group_of(build.model, build.devices)
    state, rows = allocate()
    check_allocated("arena", state.arena, plan["arena"])
    check_allocated("rows", rows, plan["rows"])
    for arrays in state.caches.values():
        for name, array in arrays.items():
            check_allocated(line_name(name), array, plan[line_name(name)])
    executables = build.steps.executables
    return warm_up(build.model, limits, executables, weights, state, rows, group)


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
            executable = functools.partial(call_serialized, executable)
        state, rows, told = step.call(executable, given, weights, state, rows)
        jax.block_until_ready((told, rows))
    return state, rows
