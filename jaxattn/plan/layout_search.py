"""The plan of each GPU of a layout, as the engine makes it, and the choice of a layout.

All GPUs of a layout run one program with equal shapes, so one plan holds for each. Tracing the step
of one GPU gives a bound on temp.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import advice, packed_shapes
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.engine_limits import Limits
from jaxattn.memory.plan import MemoryBudget, MemoryPlan, nbytes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.sharding import divided, layouts
from jaxattn.parallel import Parallel
from jaxattn.plan.device_plan import DevicePlan
from jaxattn.plan.estimated_plan import collectives

MOST_GPUS = 512  # the maximum that advice tries
# The defaults for a group of GPUs.
GROUP_BATCH, GROUP_LENGTH, GROUP_CHUNK = 128, 32768, 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupDevicePlan(DevicePlan):
    """The plan of a model on one GPU of a layout, with NCCL's memory next to the driver's.

    Attributes:
        gpus: The number of GPUs of the layout.
    """

    gpus: int

    @property
    def beside(self) -> dict[str, Any]:
        return {**super().beside, "collectives": collectives(self.gpus)}


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
    one, own = _one(name, model, memory, limits, parallel)

    def helps(tried: Limits, known: dict[str, ExecutableMemory]) -> tuple[str, ...]:
        found = advice(one.model, tried, memory, one.params, known, **one.beside)
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
        parallel: nbytes(_one("", model, memory, limits, parallel)[0].params)
        for parallel in _possible(model, limits, gpus)
    }
    if sizes:
        return min(sizes, key=lambda each: sizes[each])
    numbers = range(gpus + 1, 2 * gpus + 1)
    more = next((each for n in numbers for each in _possible(model, limits, n)), None)
    there = f"; for {more.gpus} GPUs, use {more.flags}" if more else ""
    raise ValueError(f"{name} has no layout for {gpus} GPUs{there}")


def _one(
    name: str, model: DecoderModel, memory: DeviceMemory, limits: Limits, parallel: Parallel
) -> tuple[DevicePlan, Limits]:
    own: Any = divided(model.with_cache_format(limits.cache_format, limits.native_layers), parallel)
    limits = dataclasses.replace(limits, spread=parallel.context, groups=parallel.data)

    def dress(made: MemoryPlan, tried: Limits) -> MemoryPlan:
        pages, groups = tried.pages, parallel.data
        tokens = pages * tried.page_tokens
        facts = (
            ("layout", parallel.flags),
            ("cache tokens of a data group", f"{tokens:,}"),
            ("cache tokens in all", f"{tokens * groups:,}"),
            ("rows at full length", f"{pages // tried.pages_per_row * groups:,}"),
        )
        gpus = f"each of {parallel.gpus} GPUs ({parallel.flags})"
        title = f"{name} on {gpus}, {memory.name}: {tried.batch:,} rows in all"
        return dataclasses.replace(made, title=title, facts=facts)

    one = GroupDevicePlan(
        model=own,
        params=packed_shapes(own),
        traced=own,
        memory=memory,
        dress=dress,
        gpus=parallel.gpus,
    )
    return one, limits


def fewest_gpus(
    model: DecoderModel, memory: DeviceMemory, limits: Limits, least: int
) -> Parallel | None:
    """Returns a layout that fits, with the fewest GPUs, at least `least`; None if there is none."""
    room = MemoryBudget("", memory.total, limits.utilization or 0.9, memory.limit).arrays()
    # Fewer GPUs have no room for the weights, however these are divided.
    least = max(least, -(-nbytes(model.param_shapes()) // max(room, 1)))
    numbers = range(least, MOST_GPUS + 1)
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
        one, own = _one("", model, memory, limits, parallel)
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


def group_limits(model: DecoderModel | ModelSizes, limits: Limits) -> Limits:
    """Fixes the open limits of a group of GPUs, for which no engine chooses them."""
    batch = max(GROUP_BATCH, 0, *limits.decode_buckets)
    values: dict[str, Any] = {
        "batch": -(-batch // limits.groups) * limits.groups,
        "max_model_len": min(GROUP_LENGTH, model.max_position_embeddings),
        "prefill_chunk": max(GROUP_CHUNK, 0, *limits.prefill_buckets),
        "prefill_rows": 1,
        "checkpoints": 0,
        "decode_buckets": tuple(limits.decode_buckets),
        "prefill_buckets": tuple(limits.prefill_buckets),
    }
    fixed = {name: value for name, value in values.items() if name in limits.unset}
    found = dataclasses.replace(limits, **fixed)
    if "prefill_chunk" not in fixed or found.prefill_buckets:
        return found
    chunk = min(found.prefill_chunk, found.max_model_len)
    return dataclasses.replace(found, prefill_chunk=chunk)
