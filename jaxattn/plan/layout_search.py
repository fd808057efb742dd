"""The search for a layout of GPUs in which a model fits, and the checked plan of a layout."""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import advice
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryBudget, MemoryPlan, nbytes
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.sharding import layouts
from jaxattn.parallel import Parallel
from jaxattn.plan.group_device_plan import group_device_plan, group_limits

MOST_GPUS = 512  # the maximum that advice tries


def plan_parallel(
    name: str,
    model: DecoderModel,
    memory: DeviceMemory,
    limits: Limits,
    parallel: Parallel,
) -> MemoryPlan:
    """Returns the plan of each GPU of a layout; the data groups share the batch of `limits`.

    Raises:
        ShardingError: The model does not support this layout.
        PlanError: The plan does not fit, or its cache holds no row at full length.
    """
    one, own = group_device_plan(name, model, memory, limits, parallel)

    def helps(candidate: Limits, executables: dict[str, ExecutableMemory]) -> tuple[str, ...]:
        found = advice(one.model, candidate, memory, one.params, executables, **one.beside)
        more = fewest_gpus(model, memory, limits, parallel.gpus + 1)
        return (f"{more.gpus} GPUs (--gpus {more.gpus})", *found) if more else found

    return one.checked(own, helps)


def best_layout(
    name: str, model: DecoderModel, memory: DeviceMemory, limits: Limits, gpus: int
) -> Parallel:
    """Returns the layout of `gpus` GPUs that fits and whose caches hold the most tokens in all.

    Ties go to the layout with fewer data groups, whose steps wait for one another. If no layout
    fits, the result is the one with the fewest bytes of weights per GPU.

    Raises:
        ValueError: The model has no layout for this number of GPUs.
    """
    fitting = list(layouts_that_fit(model, memory, limits, gpus))
    best = max(fitting, key=lambda each: (each[0], -each[1].data), default=None)
    return best[1] if best else _least_weights(name, model, memory, limits, gpus)


def _least_weights(
    name: str, model: DecoderModel, memory: DeviceMemory, limits: Limits, gpus: int
) -> Parallel:
    """Returns the layout with the fewest bytes of weights per GPU."""
    sizes = {
        parallel: nbytes(group_device_plan("", model, memory, limits, parallel)[0].params)
        for parallel in _possible(model, limits, gpus)
    }
    if sizes:
        return min(sizes, key=lambda each: sizes[each])
    numbers = range(gpus + 1, 2 * gpus + 1)
    more = next((each for n in numbers for each in _possible(model, limits, n)), None)
    there = f"; for {more.gpus} GPUs, use {more.flags}" if more else ""
    raise ValueError(f"{name} has no layout for {gpus} GPUs{there}")


def fewest_gpus(
    model: DecoderModel, memory: DeviceMemory, limits: Limits, min_gpus: int
) -> Parallel | None:
    """Returns a layout that fits, with the fewest GPUs, at least `min_gpus`; None if none fits."""
    room = MemoryBudget("", memory.total, limits.utilization or 0.9, memory.limit).arrays()
    # Fewer GPUs have no room for the weights, however these are divided.
    min_gpus = max(min_gpus, -(-nbytes(model.param_shapes()) // max(room, 1)))
    numbers = range(min_gpus, MOST_GPUS + 1)
    fitting = itertools.chain.from_iterable(
        layouts_that_fit(model, memory, limits, n) for n in numbers
    )
    return next((parallel for _, parallel in fitting), None)


def layouts_that_fit(
    model: DecoderModel, memory: DeviceMemory, limits: Limits, gpus: int
) -> Iterator[tuple[int, Parallel]]:
    """Yields the layouts of `gpus` GPUs whose caches hold at least a row at full length, each with
    the tokens that all caches hold.

    Only weights and caches count, so that nothing is traced.
    """
    for parallel in _possible(model, limits, gpus):
        one, own = group_device_plan("", model, memory, limits, parallel)
        own = group_limits(model, own)
        own = dataclasses.replace(own, utilization=own.utilization or 0.9, num_pages=None)
        filled = one.filled(own)
        if filled is not None and filled >= own.pages_per_row:
            yield filled * own.page_tokens * parallel.data, parallel


def _possible(model: DecoderModel, limits: Limits, gpus: int) -> Iterator[Parallel]:
    """Yields the layouts of `gpus` GPUs whose data groups have equally many rows."""
    for parallel in layouts(model, gpus):
        given = (limits.batch, *limits.decode_buckets)
        if "batch" in limits.unset or not any(rows % parallel.data for rows in given):
            yield parallel
