"""The checked plan of a public model, with advice if it does not fit."""

import bisect
import dataclasses
from typing import Any, cast

from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.limits import Limits, UnsetInt, larger_shares
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryPlan
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.plan.device_plan import single
from jaxattn.plan.estimated_plan import plan_group
from jaxattn.plan.group_device_plan import group_limits
from jaxattn.plan.layout_search import MOST_GPUS, fewest_gpus
from jaxattn.plan.placement import ModelPlacement, check_placement, page_bytes


def plan_model(
    model: ModelSizes,
    memory: DeviceMemory,
    limits: Limits,
    place: ModelPlacement,
    *,
    advised: bool = True,
) -> MemoryPlan:
    """Returns the plan of a known model, if it fits and its cache holds one row at full length.

    Args:
        advised: Whether an error has advice on how to make the plan fit.

    Raises:
        PlanError: The plan does not fit; the error has the plan and advice.
        ValueError: The model cannot be divided in this way, or `max_model_len` exceeds its length.
    """
    if "max_model_len" in limits.unset:  # a small value until it is chosen
        small = min(limits.max_model_len, model.max_position_embeddings)
        limits = dataclasses.replace(limits, max_model_len=UnsetInt(small))
    check_placement(model, limits, place)
    limits = dataclasses.replace(limits, utilization=limits.utilization or 0.9)

    def helps(candidate: Limits, *_: Any) -> tuple[str, ...]:
        return advice(model, memory, limits, place, candidate) if advised else ()

    if isinstance(model, DecoderSizes) and place.gpus == 1:
        return single(model, memory, place).checked(limits, helps)
    limits = group_limits(model, limits)
    made = plan_group(model, memory, limits, place)
    made.check(lambda: helps(limits))
    pages = made["kv cache"] // page_bytes(model, place)
    if pages < limits.pages_per_row and limits.num_pages is None:
        made.refuse(
            f"the item that does not fit is the kv cache: {pages:,} pages are left, but one row "
            f"of {limits.max_model_len:,} tokens needs {limits.pages_per_row:,}",
            helps(limits),
        )
    return made


def advice(
    model: ModelSizes, memory: DeviceMemory, limits: Limits, place: ModelPlacement, resolved: Limits
) -> tuple[str, ...]:
    """Returns changes that make the plan fit, with at least the pages of one row at full length.

    Each is a single change. If no single change is enough, the result is the fewest GPUs, combined
    with the limits that must be smaller.

    Args:
        limits: The limits as given. What they leave open stays open in each plan that is tried,
            because it is open if the user follows the advice.
        resolved: The limits that do not fit, with a value for what `limits` leave open.
    """

    def holds_a_row(candidate: Limits, placement: ModelPlacement) -> bool:
        """Checks by weights and state only, because tracing takes seconds and comes later."""
        if (
            not isinstance(model, DecoderSizes)
            or placement.gpus > 1
            or candidate.num_pages is not None
        ):
            return True
        check_placement(model, candidate, placement)
        whole = dataclasses.replace(candidate, utilization=candidate.utilization or 0.9)
        pages = single(model, memory, placement).filled(whole)
        return pages is not None and pages >= candidate.pages_per_row

    def fits(candidate: Limits, placement: ModelPlacement) -> bool:
        try:
            if not holds_a_row(candidate, placement):
                return False
            made = plan_model(model, memory, candidate, placement, advised=False)
        except ValueError:
            return False
        return made["kv cache"] >= candidate.pages_per_row * page_bytes(model, placement)

    def gpus_for(candidate: Limits) -> int | None:
        if isinstance(model, DecoderSizes) and place.gpus == 1:  # an engine can serve a layout
            # Without a batch, layouts for any number of rows count, and the search takes minutes.
            fixed = group_limits(model.model, candidate)
            layout = fewest_gpus(model.model, memory, fixed, 2)
            return layout.gpus if layout else None
        # Count up by one, so that the result does not depend on the current number of GPUs.
        sizes = range(place.gpus + 1, MOST_GPUS + 1)
        return next((n for n in sizes if fits(candidate, dataclasses.replace(place, gpus=n))), None)

    def smaller(name: str, placement: ModelPlacement, base: Limits) -> int | None:
        """Finds the largest value that fits, of those that halving the limit gives.

        If a value fits, smaller ones do too, down to the least that can. So bisection plans few.
        """

        def changed(value: int) -> Limits | None:
            try:
                return dataclasses.replace(base, **cast(Any, {name: value}))
            except ValueError:  # smaller than a given bucket
                return None

        whole = getattr(resolved if name in base.unset else base, name)
        least = {"max_model_len": PAGE_SIZE, "num_pages": base.pages_per_row}.get(name, 1)
        values = [whole >> halvings for halvings in range(1, whole.bit_length())]
        allowed = [(v, made) for v in values if v >= least and (made := changed(v))]
        if not allowed or not fits(allowed[-1][1], placement):
            return None
        first = bisect.bisect_left(
            allowed, True, hi=len(allowed) - 1, key=lambda each: fits(each[1], placement)
        )
        return allowed[first][0]

    suggestions = []
    for larger in larger_shares(limits.utilization):
        if fits(dataclasses.replace(limits, utilization=larger), place):
            suggestions.append(f"--utilization {larger:g}")
            break
    if gpus := gpus_for(limits):
        suggestions.append(f"{gpus} GPUs (--gpus {gpus})")
    for name in ("batch", "max_model_len", "num_pages", "prefill_chunk", "prefill_rows"):
        if getattr(limits, name) and (value := smaller(name, place, limits)):
            suggestions.append(f"--{name.replace('_', '-')} {value}")
    if max(limits.q_lens) > 1 and fits(dataclasses.replace(limits, q_lens=(1,)), place):
        suggestions.append("--q-len 1")
    # The package serves uint8. For a model that it only counts, use the smallest format.
    narrow = "uint8" if isinstance(model, DecoderSizes) else "float8"
    if place.cache_dtype not in ("float8", "uint8") and fits(
        limits, dataclasses.replace(place, cache_dtype=narrow)
    ):
        suggestions.append(f"a {narrow} cache (--cache-dtype {narrow})")
    if place.attention == "data" and place.gpus > 1:
        if fits(limits, dataclasses.replace(place, attention="tensor")):
            suggestions.append("attention divided by heads (--attention tensor)")
    if suggestions:
        return tuple(suggestions)
    buckets = ("decode_buckets", "prefill_buckets")
    set_buckets = [name for name in buckets if name not in limits.unset and getattr(limits, name)]
    without = cast(Any, dict.fromkeys(set_buckets, ()))
    plain = dataclasses.replace(limits, num_pages=None, q_lens=(1,), **without)
    one_row = dataclasses.replace(plain, batch=1)
    gpus = place.gpus if fits(one_row, place) else gpus_for(one_row)
    if gpus is None:
        return (f"a larger device (--device): {MOST_GPUS} of these are not enough",)
    placement = dataclasses.replace(place, gpus=gpus)
    changes = [f"--gpus {gpus}"] if gpus != place.gpus else []
    if not fits(plain, placement) and (rows := smaller("batch", placement, plain)):
        changes.append(f"--batch {rows}")
    if max(limits.q_lens) > 1:
        changes.append("--q-len 1")
    if limits.num_pages:
        changes.append("no --num-pages")
    changes += [f"no --{name.replace('_', '-')}" for name in set_buckets]
    return (" with ".join(changes),)
