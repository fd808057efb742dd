"""The plan of each GPU of a layout, as the engine makes it, and the best layout of so many GPUs.

All GPUs of a layout run one program with equal shapes, so one plan is that of each. Its temp is
bounded by tracing the step that one of them runs.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import advice, packed_shapes
from jaxattn.memory.budget import MemoryPlan
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.limits import Limits
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.sharding import divided, layouts
from jaxattn.parallel import Parallel
from jaxattn.plan.device_plan import DevicePlan
from jaxattn.plan.group_plan import collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupDevicePlan(DevicePlan):
    """A model on one GPU of a layout: NCCL's memory is beside the driver's.

    Attributes:
        gpus: of the layout.
    """

    gpus: int

    @property
    def beside(self) -> dict[str, Any]:
        return {**super().beside, "collectives": collectives(self.gpus)}


def plan_parallel(
    name: str, model: DecoderModel, memory: DeviceMemory, limits: Limits, parallel: Parallel
) -> MemoryPlan:
    """The plan of each GPU of a layout; the data groups share the batch of `limits`.

    Raises:
        ShardingError: the model has no such layout.
        PlanError: it does not fit, or the cache that is left holds no row at full length.
    """
    one, limits = _one(name, model, memory, limits, parallel)

    def helps(tried: Limits, known: dict[str, ExecutableMemory]) -> tuple[str, ...]:
        return advice(one.model, tried, memory, one.params, known, **one.beside)

    return one.checked(limits, helps)


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
        title = f"{name} on {gpus}, {memory.name}: {limits.batch:,} rows in all"
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


def best_layout(
    model: DecoderModel, memory: DeviceMemory, limits: Limits, gpus: int
) -> Parallel | None:
    """The layout of so many GPUs whose caches hold the most tokens in all; None if none fits.

    Of equal ones the layout with fewer data groups, whose steps wait for one another.
    """
    fitting = list(layouts_that_fit(model, memory, limits, gpus))
    best = max(fitting, key=lambda each: (each[0], -each[1].data), default=None)
    return best and best[1]


def layouts_that_fit(
    model: DecoderModel, memory: DeviceMemory, limits: Limits, gpus: int
) -> Iterator[tuple[int, Parallel]]:
    """Layouts of so many GPUs, each with the tokens that their caches hold in all: of a row at full
    length at least.

    Weights and caches decide, and nothing is traced.
    """
    for parallel in layouts(model, gpus):
        if any(rows % parallel.data for rows in limits.batches):
            continue  # each data group has as many rows
        one, own = _one("", model, memory, limits, parallel)
        own = dataclasses.replace(own, utilization=own.utilization or 0.9, num_pages=None)
        filled = one.filled(own)
        if filled is not None and filled >= own.pages_per_row:
            yield filled * own.page_tokens * parallel.data, parallel
