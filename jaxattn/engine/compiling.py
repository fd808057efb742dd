"""Compiles the steps of an engine, once for all engines of a process that have the same.

Two engines of one model share their executables while either lives, however many threads build
them, so that nothing is compiled twice. Executables hold no arrays.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.process import PROCESS
from jaxattn.engine.steps import EntryPoint, Step, all_steps
from jaxattn.memory.limits import Limits
from jaxattn.models.base import Model, compiler_options, jit_step

OnCompile = Callable[[str, float | None], None]


class Steps:
    """Compiled steps, as a mapping from name to executable."""

    def __init__(self, executables: Mapping[str, jax.stages.Compiled]):
        self.executables = dict(executables)


def compiled_steps(
    model: Model,
    limits: Limits,
    params: Any,
    devices: tuple[jax.Device, ...],
    *,
    implementation: Implementation | None = None,
    on_compile: OnCompile | None = None,
    workers: int = 1,
) -> Steps:
    """Every step, compiled, or those of an engine alive that has the same.

    Args:
        params: the packed parameters, or their shapes.
        devices: that run them.
        on_compile: called with each name and None before it is compiled, and with the seconds
            that it took after that (0 if it was there already). With several workers from their
            threads.
        workers: how many are compiled at a time.
    """
    avals = jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)
    leaves, tree = jax.tree.flatten(avals, is_leaf=lambda x: isinstance(x, tuple))
    x64 = bool(jax.config.jax_enable_x64)
    shape = dataclasses.replace(limits, utilization=None, num_pages=limits.pages)
    key = (model, shape, implementation, tuple(leaves), tree, devices, x64)
    with PROCESS.lock(key):
        steps = PROCESS.steps.get(key)
        if steps is None:
            steps = _compile(model, limits, params, devices, implementation, on_compile, workers)
            PROCESS.steps[key] = steps
        elif on_compile:
            for name in steps.executables:
                on_compile(name, None)
                on_compile(name, 0.0)
    return steps


def _compile(
    model: Model,
    limits: Limits,
    params: Any,
    devices: tuple[jax.Device, ...],
    implementation: Implementation | None,
    on_compile: OnCompile | None,
    workers: int,
) -> Steps:
    # As shapes: no executable may keep an array.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tree = jax.tree.structure(shapes)

    def build(step: Step) -> jax.stages.Compiled:
        if on_compile:
            on_compile(str(step), None)
        start = time.perf_counter()
        jitted = jitted_step(step, model, limits, tree, implementation, devices[0].platform)
        with jax.default_device(devices[0]):
            executable = jitted.lower(*step.arguments(model, limits, shapes)).compile()
        if on_compile:
            on_compile(str(step), time.perf_counter() - start)
        return executable

    steps = all_steps(limits)
    if workers == 1:
        return Steps({str(step): build(step) for step in steps})
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return Steps(dict(zip(map(str, steps), pool.map(build, steps), strict=True)))


def jitted_step(
    step: Step,
    model: Model,
    limits: Limits,
    tree: Any,
    implementation: Implementation | None,
    backend: str,
) -> Any:
    """The step's function, jitted as the engine compiles it."""
    function = step.function(model, limits, tree)
    if isinstance(step, EntryPoint):
        chosen = implementation_of(step, implementation)
        return jit_step(function, implementation=chosen, backend=backend)
    return jax.jit(
        function, donate_argnums=step.donated, compiler_options=compiler_options(backend)
    )


def implementation_of(
    entry: EntryPoint, implementation: Implementation | None
) -> Implementation | None:
    """What runs a step. What is named is for decoding: prefill's kernels refuse other models.

    Unless XLA is named, prefill takes the best there is.
    """
    return implementation if entry.kind == "decode" or implementation == "xla" else None
