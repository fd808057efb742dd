"""The plan of each GPU of a layout, as the engine makes it.

All GPUs of a layout run one program with equal shapes, so one plan holds for each. Tracing the step
of one GPU gives a bound on temp.
"""

import dataclasses
from typing import Any

from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryPlan
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.sharding import divided
from jaxattn.parallel import Parallel
from jaxattn.plan.device_plan import DevicePlan
from jaxattn.plan.estimated_plan import collectives

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


def group_device_plan(
    name: str, model: DecoderModel, memory: DeviceMemory, limits: Limits, parallel: Parallel
) -> tuple[DevicePlan, Limits]:
    """Returns the plan of one GPU of a layout, and the limits with the layout's data groups."""
    local_model: Any = divided(
        model.with_cache_format(limits.cache_format, limits.native_layers), parallel
    )
    limits = dataclasses.replace(limits, spread=parallel.context, groups=parallel.data)

    def dress(plan: MemoryPlan, candidate: Limits) -> MemoryPlan:
        pages, groups = candidate.pages, parallel.data
        tokens = pages * candidate.page_tokens
        facts = (
            ("layout", parallel.flags),
            ("cache tokens of a data group", f"{tokens:,}"),
            ("cache tokens in all", f"{tokens * groups:,}"),
            ("rows at full length", f"{pages // candidate.pages_per_row * groups:,}"),
        )
        gpus = f"each of {parallel.gpus} GPUs ({parallel.flags})"
        title = f"{name} on {gpus}, {memory.name}: {candidate.batch:,} rows in all"
        return dataclasses.replace(plan, title=title, facts=facts)

    one = GroupDevicePlan(
        model=local_model,
        params=packed_shapes(local_model),
        traced=local_model,
        memory=memory,
        dress=dress,
        gpus=parallel.gpus,
    )
    return one, limits


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
