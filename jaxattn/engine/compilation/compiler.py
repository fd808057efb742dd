"""Compilation of an engine's steps, once for all engines of a process that have the same steps.

Two engines of one model share their executables while either is alive, even if several threads
create them. Executables hold no arrays. If JAX's compilation cache is on, the next process reuses
them too (executable_cache.py).
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.executable_cache import (
    ExecutableCache,
    UnstableReprError,
    disable_compilation_cache,
    folder_of_cache,
)
from jaxattn.engine.compilation.sharded_step import arguments, group_of, jitted_step, model_step
from jaxattn.engine.compilation.step_export import DecodeStepExporter
from jaxattn.engine.runtime.gc_pause import gc_paused
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.kernels.hopper.build.kernel_hash import unify_kernels
from jaxattn.kernels.hopper.build.parallel_compilation import Compiling, ParallelCompiler
from jaxattn.kernels.hopper.build.trace_cache import Shared, share_launches
from jaxattn.limits import Limits
from jaxattn.models.interface import Model

OnCompile = Callable[[str, float | None], None]


class CompiledSteps:
    """Compiled steps, as a mapping from name to executable.

    Attributes:
        limits: The limits for which the steps were compiled; None if no engine shares them.
        allocate: A function that allocates state and rows for them, once an engine has started.
    """

    allocate: Callable[[], Any] | None = None

    def __init__(
        self, executables: Mapping[str, jax.stages.Compiled], limits: Limits | None = None
    ):
        self.executables, self.limits = dict(executables), limits

    def shared(self, model: Model, limits: Limits, params: Any) -> dict[str, jax.stages.Compiled]:
        """Returns the executables that limits with another `num_pages` can reuse, because their
        arguments have the same shapes."""
        if self.limits is None:
            return {}

        def shapes(step: EngineStep, step_limits: Limits) -> Any:
            leaves, tree = jax.tree.flatten(step.arguments(model, step_limits, params))
            return [(leaf.shape, leaf.dtype) for leaf in leaves], tree

        return {
            str(step): self.executables[str(step)]
            for step in all_steps(limits)
            if str(step) in self.executables and shapes(step, limits) == shapes(step, self.limits)
        }


def get_or_compile_steps(
    model: Model,
    limits: Limits,
    params: Any,
    devices: tuple[jax.Device, ...],
    *,
    implementation: Implementation | None = None,
    on_compile: OnCompile | None = None,
    workers: int = 1,
    requested_steps: Sequence[EngineStep] | None = None,
    reusable_steps: CompiledSteps | None = None,
) -> CompiledSteps:
    """Returns every step, compiled, or shares the steps of a living engine that has the same.

    Args:
        params: The packed parameters, or their shapes.
        devices: The devices that run the steps.
        on_compile: A function that is called before each compilation with the name and None, and
            after it with the seconds that it took (0 if the executable existed). With several
            workers it is called from their threads.
        workers: The number of executables that are compiled at a time.
        requested_steps: The steps to compile, in addition to existing ones; None means all.
        reusable_steps: Steps of limits that differ only in `num_pages`, some of which can be
            reused.
    """
    avals = jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)
    leaves, tree = jax.tree.flatten(avals, is_leaf=lambda x: isinstance(x, tuple))
    x64 = bool(jax.config.jax_enable_x64)
    shape = dataclasses.replace(
        limits,
        utilization=None,
        num_pages=limits.pages,
        steps_per_round=limits.round_steps,
        reserved_bytes=0,
    )
    key = (model, shape, implementation, tuple(leaves), tree, devices, x64)
    engine_steps = all_steps(limits)
    with PROCESS_STATE.lock(key):
        steps = PROCESS_STATE.steps.get(key)
        if steps is None:
            steps = CompiledSteps({}, limits)
        executables = dict(steps.executables)
        if (
            reusable_steps is not None
            and reusable_steps is not steps
            and len(executables) < len(engine_steps)
        ):
            executables = reusable_steps.shared(model, limits, params) | executables
        missing = [step for step in requested_steps or engine_steps if str(step) not in executables]
        if on_compile:
            for step in requested_steps or engine_steps:
                if str(step) in executables:
                    on_compile(str(step), None)
                    on_compile(str(step), 0.0)
        if missing:
            kept = None
            if any(each.process_index != jax.process_index() for each in devices):
                disable_compilation_cache()
            if len(devices) == 1:
                decides = (model, shape, implementation, leaves, str(tree), x64)
                kept = _open_executable_cache(devices[0], decides)
            executables |= _compile(
                missing, model, limits, params, devices, implementation, on_compile, workers, kept
            )
        # An engine never uses an incomplete set of steps.
        steps.executables = {
            str(step): executables[str(step)] for step in engine_steps if str(step) in executables
        }
        PROCESS_STATE.steps[key] = steps
    return steps


def _compile(
    steps: Sequence[EngineStep],
    model: Model,
    limits: Limits,
    params: Any,
    devices: tuple[jax.Device, ...],
    implementation: Implementation | None,
    on_compile: OnCompile | None,
    workers: int,
    executable_cache: ExecutableCache | None,
) -> dict[str, jax.stages.Compiled]:
    # Use shapes, because no executable may hold an array.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tree, group = jax.tree.structure(shapes), group_of(model, devices)
    local_device = next(each for each in devices if each.process_index == jax.process_index())
    backend = devices[0].platform
    shared: Shared = {}

    def decode(entry: ModelStep) -> tuple[Callable, tuple[Any, ...]]:
        function = model_step(entry, model, limits, tree, implementation, group)
        return function, arguments(entry, model, limits, shapes, group)

    lowered = DecodeStepExporter(decode, backend)

    def lower(step: EngineStep) -> jax.stages.Lowered:
        with jax.default_device(local_device), share_launches(shared):
            jitted = jitted_step(step, model, limits, tree, implementation, backend, group, lowered)
            given = arguments(step, model, limits, shapes, group)
            text = jitted.lower(*(_placed(given, local_device) if group is None else given))
        if backend == "gpu":
            unify_kernels(text)
        return text

    def compiled(step: EngineStep, text: jax.stages.Lowered) -> jax.stages.Compiled:
        with jax.default_device(local_device):
            return (
                executable_cache.compiled(str(step), text) if executable_cache else text.compile()
            )

    # Processes of one engine tune programs together, and would wait for each other here.
    kernels_for = local_device if backend == "gpu" and jax.process_count() == 1 else None
    longest_first = sorted(steps, key=_model_tokens, reverse=True)
    return _compile_steps(
        longest_first, executable_cache, lower, compiled, on_compile, workers, kernels_for
    )


def _compile_steps(
    steps: Sequence[EngineStep],
    executable_cache: ExecutableCache | None,
    lower: Callable[[EngineStep], jax.stages.Lowered],
    compiled: Callable[[EngineStep, jax.stages.Lowered], jax.stages.Compiled],
    on_compile: OnCompile | None,
    workers: int,
    kernels_for: jax.Device | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Returns steps by name: loads stored ones, and lowers and compiles the others.

    Lowering is Python code, which one thread runs at a time; two at once would both reach XLA late.
    The kernels of a lowered step compile in parallel, then the step. `on_compile` gets the step's
    own seconds, without the time that it waits for other steps.

    Args:
        kernels_for: The device that runs the kernels; None if there are no kernels.
    """
    report = on_compile or (lambda name, seconds: None)

    def load(step: EngineStep) -> jax.stages.Compiled | None:
        start = time.perf_counter()
        executable = executable_cache.load(str(step)) if executable_cache else None
        if executable is not None:
            report(str(step), None)
            report(str(step), time.perf_counter() - start)
        return executable

    def finish(
        step: EngineStep, text: jax.stages.Lowered, kernels: Sequence[Compiling], lowering: float
    ) -> jax.stages.Compiled:
        start = time.perf_counter()
        concurrent.futures.wait(kernels)
        executable = compiled(step, text)
        report(str(step), lowering + time.perf_counter() - start)
        return executable

    with gc_paused(), concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            loaded = dict(zip(steps, pool.map(load, steps), strict=True))
            beside = kernels_for and ParallelCompiler(pool, kernels_for)
            waited = {}
            with PROCESS_STATE.lowering:
                for step in (each for each in steps if loaded[each] is None):
                    report(str(step), None)
                    start = time.perf_counter()
                    text = lower(step)
                    kernels = beside.compile(text) if beside else ()
                    lowering = time.perf_counter() - start
                    waited[step] = pool.submit(finish, step, text, kernels, lowering)
            return {str(step): loaded[step] or waited[step].result() for step in steps}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _model_tokens(step: EngineStep) -> int:
    """Returns the tokens of a model step; XLA takes longest for steps with the most tokens."""
    entry = step.decode if isinstance(step, FusedDecodeStep) else step
    return entry.size if isinstance(entry, ModelStep) else 0


def _placed(shapes: Any, device: jax.Device) -> Any:
    """Returns shapes that are placed on a device, so that the results of all steps are too."""
    where = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)


def _open_executable_cache(
    device: jax.Device, key_parts: tuple[Any, ...]
) -> ExecutableCache | None:
    """Returns the cache for one device's steps, if JAX's cache is on and `key_parts` has a text."""
    folder = folder_of_cache()
    if folder is None:
        return None
    try:
        return ExecutableCache(folder, device, key_parts)
    except UnstableReprError:
        return None
