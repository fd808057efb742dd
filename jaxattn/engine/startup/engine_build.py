"""The parts of an engine that need no memory: limits, executables and plan.

    prepared = prepare(model, model.param_shapes(), Limits(batch=8, utilization=0.9))
    print(prepared.plan.total)
    engine = Engine.of(prepared)
    engine.start(params)            # loaded after `prepare` has measured the device

`prepare` compiles and plans. It takes parameters or their shapes, and allocates nothing. Give
weights that are already on the device as arrays, so that the plan counts them once.

Loading may run while `prepare` compiles, if it begins when `on_fits` is called. The plan does not
mistake the loaded weights for other arrays, because it has measured the device before.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.compiler import CompiledSteps, OnCompile
from jaxattn.engine.compilation.sharded_step import group_of
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.capacity_planner import CapacityPlanner, others
from jaxattn.engine.startup.decode_step_count import choose_decode_steps
from jaxattn.engine.startup.default_limits import choose_limits, largest_steps
from jaxattn.engine.startup.executable_memory import ExecutableMemory, bound_of
from jaxattn.engine.startup.limits_search import DRIVER, LimitsChoice
from jaxattn.engine.startup.placed_params import CheckedParams
from jaxattn.limits import Limits
from jaxattn.memory import device_memory
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryPlan
from jaxattn.models import divided
from jaxattn.models.caches.layer_cache import check_caches
from jaxattn.models.interface import Model
from jaxattn.parallel import ALONE, Parallel
from jaxattn.parallel.nccl_memory import collectives_bytes
from jaxattn.parallel.peer_access import peers_reach


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngineBuild:
    """A compiled and planned engine that holds no device memory yet.

    Attributes:
        limits: The limits. With `utilization` they have the pages that fit, and if `prepare` chose
            several steps per round, they have these.
        steps: The executables; `step_catalog.all_steps` lists their names.
        executable_memory: XLA's figures of each executable's memory.
        plan: The device memory that the engine will take, with a reason for each item.
        devices: The devices that will run the steps.
        requested_limits: The limits before the cache is sized, with the steps of a call and the
            layout.
        params: The loaded parameters, which `Engine` places on the devices.
    """

    model: Model
    limits: Limits
    steps: CompiledSteps
    executable_memory: dict[str, ExecutableMemory]
    plan: MemoryPlan
    devices: tuple[jax.Device, ...]
    requested_limits: Limits
    compiler: "CapacityPlanner"
    params: CheckedParams | None = None


def prepare(
    model: Model,
    params: Any,
    limits: Limits | None = None,
    devices: Sequence[jax.Device] | jax.Device | None = None,
    *,
    implementation: Implementation | None = None,
    on_compile: OnCompile | None = None,
    on_fits: Callable[[], None] | None = None,
    on_steps: Callable[[int], None] | None = None,
    workers: int | None = None,
    parallel: Parallel = ALONE,
    loaded: bool = False,
) -> EngineBuild:
    """Compiles and plans an engine, without allocating anything on the device.

    Args:
        params: The parameters, or their shapes (`jax.ShapeDtypeStruct`), packed or not.
        limits: The limits of batch, lengths and cache. `prepare` chooses those that are left open
            (default_limits.py).
        devices: The devices that will run the steps. None means JAX's default device, or the first
            of JAX's devices if `parallel` needs several.
        implementation: The implementation of the decode kernels; None is the best for the device.
        on_compile: A function that is called before each compilation with the executable's name and
            None, and after it with the seconds that it took.
        on_fits: A function that is called once, before compilation, when the device is measured and
            the plan from shapes fits. Parameters given as shapes may be loaded from then on.
        on_steps: A function that is called before compilation with the number of executables. With
            `utilization` it may be called several times.
        workers: The number of executables that are compiled at a time. None means 16 for a GPU, and
            1 for a CPU, which uses all cores for one compilation.
        parallel: The layout of the model over several devices; the plan is then per device.
        loaded: Whether to refuse shapes, and to keep the parameters in `EngineBuild.params`.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: The model has no cache in `limits.cache_format`, or `params` are not those of
            the model with such a cache. Or `loaded` parameters lie on another device,
            `max_model_len` exceeds the model's `max_position_embeddings`, or `utilization` is given
            for a device of unknown memory.
        CollectiveError: The devices of a group cannot send to each other.
        PlanError: The device has too little memory, or with `utilization` the cache that is left
            holds no row at full length.
        Refusal: The requested implementation does not support the model; the message says why.
    """
    limits = Limits() if limits is None else limits
    check_arguments(model, limits, implementation)
    if limits.speculate and parallel.gpus > 1:
        raise ValueError(
            f"speculate={limits.speculate} needs a single GPU, but parallel has {parallel.gpus}; "
            "use speculate=0"
        )
    if limits.uses_draft_head and not model.has_draft_head:
        raise ValueError(
            f"speculate_by={limits.speculate_by!r} needs a model with a draft head, and "
            f"{type(model).__name__} was made without one; use load(folder, draft_head=True), or "
            "speculate_by='lookup'"
        )
    if limits.round_steps > 1 and parallel.gpus > 1:
        raise ValueError(
            f"steps_per_round={limits.steps_per_round} needs a single GPU, but parallel has "
            f"{parallel.gpus}; use steps_per_round=1"
        )
    model = model.with_cache_format(limits.cache_format, limits.native_layers)
    if limits.reproducible:
        model = model.with_batch_invariance()
        parallel = dataclasses.replace(parallel, ordered=parallel.gpus > 2)
    own_devices = _devices(devices, parallel)
    if own_devices[0].platform == "cpu" and implementation in (None, "xla"):
        model = model.for_cpu()
    whole, limits = model, _apply_layout(limits, parallel)
    model = divided(whole, parallel)
    if not peers_reach(own_devices):
        model = divided(whole.without_peer_memory(), parallel)
    checked = CheckedParams.of(model, params, own_devices, loaded=loaded)
    gpu = own_devices[0].platform == "gpu"
    collectives = collectives_of(model, own_devices)
    memory, counted_bytes = smallest_memory(own_devices), checked.nbytes
    beside = others(memory, {}, counted_bytes, collectives)
    choice = _choose_limits(model, limits, checked, memory, own_devices, implementation, beside)
    limits = choose_decode_steps(choice.limits, checked.packed, gpu=gpu, gpus=parallel.gpus)
    compiler = CapacityPlanner(
        model=model,
        params=checked.packed,
        devices=own_devices,
        collectives=collectives,
        implementation=implementation,
        on_compile=on_compile,
        on_steps=on_steps,
        workers=workers or (16 if gpu else 1),
        choices=choice.reasons,
        driver=DRIVER if gpu else 0,
    )
    if limits.utilization is None:
        filled = limits
        # Fails before minutes of compilation.
        compiler.plan(filled, {}, memory, counted_bytes, requested=limits)
        if on_fits:
            on_fits()
        steps = compiler.compile(filled)
        executable_memory = compiler.known(filled, steps)
    else:
        if memory is None:
            raise ValueError(
                f"utilization={limits.utilization} needs a device that reports its memory, and "
                f"{compiler.devices[0]} does not; give num_pages"
            )
        filled = compiler.fill(limits, {}, memory, counted_bytes)
        compiler.plan(filled, {}, memory, counted_bytes, requested=limits)
        if on_fits:
            on_fits()
        bounds = choice.bounds or _bounds(model, limits, checked, implementation)
        filled, steps, executable_memory = compiler.fit(limits, bounds, memory, counted_bytes)
    return EngineBuild(
        model=model,
        limits=filled,
        steps=steps,
        executable_memory=executable_memory,
        plan=compiler.plan(filled, executable_memory, memory, counted_bytes, requested=limits),
        devices=own_devices,
        requested_limits=limits,
        compiler=compiler,
        params=checked if loaded else None,
    )


def _choose_limits(
    model: Model,
    limits: Limits,
    params: CheckedParams,
    memory: DeviceMemory | None,
    devices: tuple[jax.Device, ...],
    implementation: Implementation | None,
    other_bytes: Mapping[str, int],
) -> LimitsChoice:
    """Chooses the limits that are left open. With several hosts the device's memory does not count,
    because all hosts need the same limits."""
    hosts = len({each.process_index for each in devices})

    return choose_limits(
        model,
        limits,
        memory if hosts == 1 else None,
        platform=devices[0].platform,
        params=params.packed,
        bounds=lambda tried: _bounds(model, tried, params, implementation),
        other_bytes=other_bytes,
    )


def _bounds(
    model: Model, limits: Limits, params: CheckedParams, implementation: Implementation | None
) -> dict[str, ExecutableMemory]:
    """Returns upper bounds of the largest steps' memory, from their shapes."""
    return {
        str(step): bound_of(model, step, limits, params.packed, implementation)
        for step in largest_steps(limits)
    }


def _apply_layout(limits: Limits, parallel: Parallel) -> Limits:
    """Returns the limits with the settings that follow from the layout."""
    # Each data group has pages of its own, which the other groups cannot read.
    shared = limits.prefix_cache and parallel.data == 1
    return dataclasses.replace(
        limits, spread=parallel.context, groups=parallel.data, prefix_cache=shared
    )


def check_arguments(model: Any, limits: Any, implementation: Any) -> None:
    """Raises TypeError or ValueError for invalid arguments; the message names the argument."""
    if not isinstance(model, Model):
        raise TypeError(
            "model must be a jaxattn.models.Model, such as jaxattn.models.Hybrid(config); got "
            f"{type(model).__name__}"
        )
    if not isinstance(limits, Limits):
        raise TypeError(f"limits must be a jaxattn.Limits, got {type(limits).__name__}")
    names = get_args(Implementation)
    if implementation is not None and implementation not in names:
        raise ValueError(
            f"implementation must be one of {', '.join(map(repr, names))} or None; got "
            f"{implementation!r}"
        )
    if jax.config.jax_disable_jit:
        raise ValueError(
            "an engine runs only compiled steps, but JAX_DISABLE_JIT is set; unset it, or call "
            "the model's own prefill and decode"
        )
    check_caches(model.caches)
    own = "max_model_len" not in limits.unset
    if own and limits.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={limits.max_model_len} exceeds the model's "
            f"max_position_embeddings={model.max_position_embeddings}"
        )


def of_this_process(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns the devices that belong to this process."""
    return [each for each in devices if each.process_index == jax.process_index()]


def smallest_memory(devices: Sequence[jax.Device]) -> DeviceMemory | None:
    """Returns the memory of the device with the least free memory, which limits the whole group."""
    memories = [device_memory.device_memory(each) for each in of_this_process(devices)]
    known = [memory for memory in memories if memory is not None]
    if len(known) < len(memories):
        return None
    return min(known, key=lambda memory: (memory.free or memory.total) - memory.in_use)


def collectives_of(model: Model, devices: tuple[jax.Device, ...]) -> int:
    """Returns the bytes of each device that collectives take, after running them once.

    Raises:
        CollectiveError: The devices cannot send to each other.
    """
    group = group_of(model, devices)
    if group is None or devices[0].platform != "gpu":
        return 0  # a CPU's collectives take nothing that a plan counts
    with PROCESS_STATE.sending:  # a second thread at the same time would measure no increase
        taken = PROCESS_STATE.collectives.setdefault(devices, {})
        if group.parallel not in taken:
            taken[group.parallel] = collectives_bytes(group)
        return sum(taken.values())


def _devices(devices: Any, parallel: Parallel) -> tuple[jax.Device, ...]:
    if devices is None:
        found = tuple(jax.devices()[: parallel.gpus])
    elif isinstance(devices, jax.Device):
        found = (devices,)
    else:
        found = () if isinstance(devices, str) else tuple(devices)
        if isinstance(devices, str) or not all(isinstance(d, jax.Device) for d in found):
            raise TypeError(
                "devices must be a jax.Device or a sequence of them, such as "
                f"jax.devices('gpu')[0]; got {devices!r}"
            )
    parallel.check_devices(found)
    return found
