"""The plan of one GPU of a group, or of a model that jaxattn cannot run, only from shapes.

The weights as the loader stores them, cache pages, recurrent states and the arena (from the ops'
own `scratch`) are exact. Temp is a bound: every activation of a layer at once, with no reuse. The
memory of the driver and of collectives is assumed. Each item names its basis.
"""

from collections.abc import Sequence

from jaxattn.arena import ArenaSpec
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.engine.startup.memory_plan import arena_item, held_elsewhere
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import GIB, MIB, DeviceMemory
from jaxattn.memory.plan import CapacitySolution, MemoryBudget, MemoryPlan, PlanItem, solve
from jaxattn.memory.temp_bound import LIBRARY_WORKSPACE
from jaxattn.models.caches.layer_cache import CacheSize, LayerCache
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.models.interface import overlaid
from jaxattn.plan.activation_bound import activations
from jaxattn.plan.placement import ModelPlacement, caches, page_bytes, weight_items
from jaxattn.plan.plan_notes import notes, title

PREFIX_BLOCK = 1024  # cached tokens that `mla_prefill` reads at a time
# No allocator counts it. One H200 needs less (see benchmarks/LOG.md); libraries differ.
DRIVER = 1 * GIB
MOST_PEERS = 8  # GPUs per host


def plan_group(
    model: ModelSizes, memory: DeviceMemory, limits: Limits, place: ModelPlacement
) -> MemoryPlan:
    """Returns the plan of one GPU; `limits` are per GPU ("data") or for the group ("tensor").

    The caller has checked the placement (`check_placement`), and checks whether the plan fits.
    """
    weights = weight_items(model, place)
    page = page_bytes(model, place)
    layer_caches = caches(model, place)
    temp, temps = _temp(model, limits, place)
    in_out = limits.batch * max(limits.q_lens) * 4 * 2 + limits.batch * 4 * limits.pages_per_row
    utilization = 0.9 if limits.utilization is None else limits.utilization
    budget = MemoryBudget(memory.name, memory.total, utilization, memory.limit)
    outside = [PlanItem("driver", DRIVER, "context, loaded code, libraries", (), "assumed", True)]
    if place.gpus > 1:
        taken = collectives(place.gpus)
        outside.append(PlanItem("collectives", taken, "NCCL between the GPUs", (), "assumed", True))
    outside += held_elsewhere(memory)
    room = budget.arrays(sum(item.nbytes for item in outside))
    # The bytes that do not depend on the pages: at least one page, and the slots.
    held = sum(item.nbytes for item in _cache_items(layer_caches, limits, 1)) - page
    fixed = sum(item.nbytes for item in weights) + held + temp + in_out
    solved = pages_and_arena(model, limits, place, room - fixed, page)
    pages = limits.num_pages or solved.pages
    width = min(limits.pages_per_row, max(pages, 1))
    items = (
        *weights,
        arena_item(_scratch(model, limits, place, width), limits.batch),
        *_cache_items(layer_caches, limits, pages),
        PlanItem("step inputs and outputs", in_out, "tokens, lengths, block tables", (), "bound"),
        PlanItem("xla temp", temp, temps, (), "bound"),
        *outside,
    )
    return MemoryPlan(
        items,
        budget,
        title(model, limits, place, memory),
        _facts(pages, limits, place, solved),
        notes(model, limits, place),
    )


def collectives(gpus: int) -> int:
    """Returns an upper bound of NCCL's buffers and XLA's collective kernels, in bytes per GPU.

    Two H100s take 1,342 MiB each, and four H200s 2,082 MiB. Larger groups were not measured.
    """
    return 768 * MIB + min(gpus, MOST_PEERS) * 384 * MIB


def pages_and_arena(
    model: ModelSizes, limits: Limits, place: ModelPlacement, room: int, page: int
) -> CapacitySolution:
    """Finds the most pages that fit in `room` together with the arena for the longest row."""

    def arena(pages: int) -> int:
        width = min(limits.pages_per_row, max(pages, 1))
        return overlaid(_scratch(model, limits, place, width)).nbytes

    return solve(room, page, arena, max_pages=limits.wanted_pages)


def _scratch(
    model: ModelSizes, limits: Limits, place: ModelPlacement, width: int
) -> tuple[ArenaSpec, ...]:
    # If each GPU has its own rows, all of them may choose the experts of one GPU.
    gathered = place.gpus if place.attention == "data" else 1
    sizes = {"max_pages": width, "num_shards": place.ways, "gathered": gathered}
    return tuple(
        spec
        for batch in limits.batches
        for q_len in limits.q_lens
        for spec in model.scratch(batch, q_len=q_len, **sizes)
    )


def _cache_items(layer_caches: Sequence[LayerCache], limits: Limits, pages: int) -> list[PlanItem]:
    size = CacheSize(pages=pages, slots=limits.batch)
    return [item for cache in layer_caches for item in cache.items(size)]


def _temp(model: ModelSizes, limits: Limits, place: ModelPlacement) -> tuple[int, str]:
    """Returns the activations of the largest layer, for the larger of decode and prefill."""
    sizes, chunk = model.sizes, limits.chunks[-1]
    decode = activations(sizes, limits.batch * max(limits.q_lens), limits.batch, place, 1)
    prefill = activations(sizes, chunk, 1, place, min(PREFIX_BLOCK, limits.max_model_len) + chunk)
    largest = max(decode, prefill) + LIBRARY_WORKSPACE
    return largest, (
        f"all activations of a layer at once, without reuse: decode {decode:,}, prefill "
        f"{prefill:,}, and {LIBRARY_WORKSPACE // MIB} MiB for the matrix library"
    )


def _facts(
    pages: int, limits: Limits, place: ModelPlacement, solved: CapacitySolution
) -> tuple[tuple[str, str], ...]:
    times = place.gpus if place.attention == "data" else 1
    tokens = pages * PAGE_SIZE
    steps = " -> ".join(f"{high:,}..{low:,}" for high, low in solved.steps)
    return (
        ("cache tokens per GPU", f"{tokens:,}"),
        ("cache tokens in all", f"{tokens * times:,}"),
        ("rows at full length", f"{pages // limits.pages_per_row * times:,}"),
        ("state slots per GPU", f"{limits.batch:,}"),
        ("pages, bounds by step", steps),
    )
