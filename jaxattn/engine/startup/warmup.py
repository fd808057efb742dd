"""Warm-up of an engine: the last reading of memory, its state, and two runs of each step."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jaxattn.engine.compilation.sharded_step import (
    device_put_inputs,
    group_of,
    new_rows_over,
    new_state_over,
)
from jaxattn.engine.execution.model_runner import in_turn
from jaxattn.engine.startup.engine_build import EngineBuild, smallest_memory
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import new_rows, new_state
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.memory.budget import check_allocated, nbytes_each
from jaxattn.memory.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState, line_name
from jaxattn.models.interface import Model
from jaxattn.parallel import DeviceGroup

Weights = tuple[jax.Array, ...]  # the leaves of packed parameters


def profile_memory(prepared: EngineBuild, weights: Weights, *, ran: bool = False) -> EngineBuild:
    """Plans again with what the device has now; fewer pages are found where it has less.

    Args:
        ran: whether the steps have run before, so that the driver has what it takes.

    Raises:
        PlanError: it does not fit.
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


def measured_plan(prepared: EngineBuild) -> EngineBuild:
    """With a plan that says what the driver has taken, since every step has run."""
    memory = smallest_memory(prepared.devices)
    plan = prepared.compiler.measured(prepared.plan, prepared.known, memory)
    return dataclasses.replace(prepared, plan=plan)


def allocate_state(prepared: EngineBuild, weights: Weights) -> tuple[DecodeState, DeviceBatch]:
    """State and rows, as they were planned, beside which every step has run.

    Raises:
        PlanError: what was allocated is not what was planned.
    """
    limits, plan = prepared.limits, prepared.plan
    group = group_of(prepared.model, prepared.devices)
    state, rows = _new(prepared.model, limits, group)
    check_allocated("arena", state.arena, plan["arena"])
    check_allocated("rows", rows, plan["rows"])
    for arrays in state.caches.values():
        for name, array in arrays.items():
            check_allocated(line_name(name), array, plan[line_name(name)])
    executables = prepared.steps.executables
    return warm_up(prepared.model, limits, executables, weights, state, rows, group)


def _new(
    model: Model, limits: Limits, group: DeviceGroup | None
) -> tuple[DecodeState, DeviceBatch]:
    if group is None:  # in one program: to compile one for each array takes half a second
        return jax.jit(lambda: (new_state(model, limits), new_rows(limits)))()
    return new_state_over(model, limits, group), new_rows_over(limits, group)


def warm_up(
    model: Model,
    limits: Limits,
    executables: Mapping[str, Any],
    weights: Weights,
    state: DecodeState,
    rows: DeviceBatch,
    group: DeviceGroup | None = None,
) -> tuple[DecodeState, DeviceBatch]:
    """State and rows after each step has run twice beside them, on padding: nothing is written.

    The first two runs are special on a GPU: one loads the modules, one records the command
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
