"""The plan of a known model that is checked, and what would make it fit where it does not."""

import dataclasses
from typing import Any

from jaxattn.memory.budget import MemoryPlan
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.limits import Limits, UnsetInt, larger_shares
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.plan.device_plan import single
from jaxattn.plan.group_plan import plan_group
from jaxattn.plan.layout_plan import best_layout, layouts_that_fit
from jaxattn.plan.placement import ModelPlacement, check_placement, page_bytes

MOST_GPUS = 512  # that advice tries
# Of a group of GPUs, where nothing else is given.
GROUP_BATCH, GROUP_LENGTH, GROUP_CHUNK = 128, 32768, 512


def plan_model(
    model: ModelSizes,
    memory: DeviceMemory,
    limits: Limits,
    place: ModelPlacement,
    *,
    advised: bool = True,
) -> MemoryPlan:
    """The plan of a known model, if it fits and its cache holds one row at full length.

    Args:
        advised: whether a refusal says what would make it fit.

    Raises:
        PlanError: it does not, with the plan and advice.
        ValueError: the model cannot be divided so, or is shorter than `max_model_len`.
    """
    if "max_model_len" in limits.unset:  # a small value until it is chosen
        small = min(limits.max_model_len, model.max_position_embeddings)
        limits = dataclasses.replace(limits, max_model_len=UnsetInt(small))
    check_placement(model, limits, place)
    limits = dataclasses.replace(limits, utilization=limits.utilization or 0.9)

    def helps(*_: Any) -> tuple[str, ...]:
        return advice(model, memory, group_limits(model, limits), place) if advised else ()

    if isinstance(model, DecoderSizes) and place.gpus == 1:
        return single(model, memory, place).checked(limits, helps)
    made = plan_group(model, memory, limits, place)
    made.check(helps)
    pages = made["kv cache"] // page_bytes(model, place)
    if pages < limits.pages_per_row and limits.num_pages is None:
        made.refuse(
            f"the line that does not fit is the kv cache: {pages:,} pages are left, and one row of "
            f"{limits.max_model_len:,} tokens takes {limits.pages_per_row:,}",
            helps(),
        )
    return made


def group_limits(model: ModelSizes, limits: Limits) -> Limits:
    """The limits of a group of GPUs, for which no engine chooses what they leave open."""
    values: dict[str, Any] = {
        "batch": max(GROUP_BATCH, 0, *limits.decode_buckets),
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


def advice(
    model: ModelSizes, memory: DeviceMemory, limits: Limits, place: ModelPlacement
) -> tuple[str, ...]:
    """What would make it fit with a page at least for one row at full length.

    Each is one change; if none does it alone, the fewest GPUs with what else has to be smaller.
    """

    def holds_a_row(changed: Limits, on: ModelPlacement) -> bool:
        """As far as weights and state alone say; tracing takes seconds, and comes after it."""
        if not isinstance(model, DecoderSizes) or on.gpus > 1 or changed.num_pages is not None:
            return True
        check_placement(model, changed, on)
        whole = dataclasses.replace(changed, utilization=changed.utilization or 0.9)
        pages = single(model, memory, on).filled(whole)
        return pages is not None and pages >= changed.pages_per_row

    def fits(changed: Limits, on: ModelPlacement) -> bool:
        try:
            if not holds_a_row(changed, on):
                return False
            made = plan_model(model, memory, changed, on, advised=False)
        except ValueError:
            return False
        return made["kv cache"] >= changed.pages_per_row * page_bytes(model, on)

    def gpus_for(changed: Limits) -> int | None:
        # One after another: the fewest that hold it are the same from wherever one starts.
        sizes = range(place.gpus + 1, MOST_GPUS + 1)
        return next((n for n in sizes if fits(changed, dataclasses.replace(place, gpus=n))), None)

    def smaller(name: str, on: ModelPlacement, like: Limits) -> int | None:
        value = getattr(like, name) // 2
        while value and not fits(_with(like, **{name: value}), on):
            value //= 2
        return value or None

    found = []
    if isinstance(model, DecoderSizes) and place.gpus > 1:
        best = best_layout(model.model, memory, limits, place.gpus)
        if best is not None:
            found.append(f"a layout of {place.gpus} GPUs that jaxattn serves ({best.flags})")
    for larger in larger_shares(limits.utilization):
        if fits(dataclasses.replace(limits, utilization=larger), place):
            found.append(f"--utilization {larger:g}")
            break
    if gpus := gpus_for(limits):
        found.append(f"{gpus} GPUs (--gpus {gpus}){_served(model, memory, limits, gpus)}")
    for name in ("batch", "max_model_len", "num_pages", "prefill_chunk"):
        if getattr(limits, name) and (value := smaller(name, place, limits)):
            found.append(f"--{name.replace('_', '-')} {value}")
    if max(limits.q_lens) > 1 and fits(dataclasses.replace(limits, q_lens=(1,)), place):
        found.append("--q-len 1")
    # What the package serves, and for a model that it only counts the smallest.
    narrow = "uint8" if isinstance(model, DecoderSizes) else "float8"
    if place.cache_dtype not in ("float8", "uint8") and fits(
        limits, dataclasses.replace(place, cache_dtype=narrow)
    ):
        found.append(f"a {narrow} cache (--cache-dtype {narrow})")
    if place.attention == "data" and place.gpus > 1:
        if fits(limits, dataclasses.replace(place, attention="tensor")):
            found.append("attention divided by heads (--attention tensor)")
    if found:
        return tuple(found)
    plain = dataclasses.replace(limits, num_pages=None, q_lens=(1,))
    one_row = _with(plain, batch=1)
    gpus = place.gpus if fits(one_row, place) else gpus_for(one_row)
    if gpus is None:
        return (f"a larger device (--device): up to {MOST_GPUS} of these do not hold it",)
    on = dataclasses.replace(place, gpus=gpus)
    changes = [f"--gpus {gpus}"] if gpus != place.gpus else []
    if not fits(plain, on):
        changes.append(f"--batch {smaller('batch', on, plain)}")
    if max(limits.q_lens) > 1:
        changes.append("--q-len 1")
    if limits.num_pages:
        changes.append("no --num-pages")
    return (" with ".join(changes),)


def _served(model: ModelSizes, memory: DeviceMemory, limits: Limits, gpus: int) -> str:
    """What is added where no layout of so many GPUs serves the model, and one of more does."""
    if not isinstance(model, DecoderSizes):
        return ""
    for n in range(gpus, 2 * gpus + 1):
        if next(layouts_that_fit(model.model, memory, limits, n), None):
            return f", or {n} for a layout that jaxattn serves" if n != gpus else ""
    return ""


def _with(limits: Limits, **smaller: int) -> Limits:
    """The limits with something smaller, and no buckets that could be larger than the batch."""
    changes: dict[str, Any] = {**smaller, "decode_buckets": (), "prefill_buckets": ()}
    return dataclasses.replace(limits, **changes)
