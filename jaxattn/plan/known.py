"""The plan of a public model on one or more GPUs, of one of them: all from shapes, on any machine.

What is exact: weights as the checkpoint stores them, cache pages, recurrent states, the arena (from
the ops' own `scratch`). What is a bound: temp, as every activation of a layer at once with nothing
reused. What is assumed: the driver's and the collectives' memory. Each line says which.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn import gdn, mla
from jaxattn.arena import ArenaSpec
from jaxattn.core.formats import PAGE_SIZE
from jaxattn.engine.memory_plan import arena_item, held_elsewhere
from jaxattn.kernels.mla_decode import launch as mla_decode
from jaxattn.memory.bound import LIBRARY_WORKSPACE
from jaxattn.memory.budget import Budget, Item, MemoryPlan, Solution, solve
from jaxattn.memory.device import GIB, MIB, DeviceMemory
from jaxattn.memory.limits import Limits, larger_shares
from jaxattn.models.base import CacheSize, LayerCache, overlaid
from jaxattn.models.known import KnownModel
from jaxattn.plan.activations import activations
from jaxattn.plan.placement import (
    Placement,
    caches,
    check_placement,
    page_bytes,
    weight_items,
)

PREFIX_BLOCK = 1024  # cached tokens that `mla_prefill` reads at a time
# Not in any allocator: seen on one H200 is less (see benchmarks/LOG.md); libraries differ.
DRIVER = 1 * GIB
COLLECTIVES = 1 * GIB  # NCCL's channels and buffers, with more than one GPU
MOST_GPUS = 512  # that advice tries


def plan_known(
    model: KnownModel,
    memory: DeviceMemory,
    limits: Limits,
    placement: Placement | None = None,
) -> MemoryPlan:
    """The plan of one GPU of the group; `limits` are of a GPU ("data") or of the group ("tensor").

    Raises:
        ValueError: the model cannot be divided so, or is shorter than `max_model_len`.
    """
    place = placement or Placement()
    check_placement(model, limits, place)
    weights = weight_items(model, place)
    page = page_bytes(model, place)
    own = caches(model, place)
    temp, temps = _temp(model, limits, place)
    in_out = limits.batch * max(limits.q_lens) * 4 * 2 + limits.batch * 4 * limits.pages_per_row
    utilization = 0.9 if limits.utilization is None else limits.utilization
    budget = Budget(memory.name, memory.total, utilization, memory.limit)
    outside = [Item("driver", DRIVER, "context, loaded code, libraries", (), "assumed", True)]
    if place.gpus > 1:
        outside.append(
            Item("collectives", COLLECTIVES, "NCCL between the GPUs", (), "assumed", True)
        )
    outside += held_elsewhere(memory)
    room = budget.arrays(sum(item.nbytes for item in outside))
    # A page at least, and the slots: what does not depend on the pages.
    held = sum(item.nbytes for item in _cache_items(own, limits, 1)) - page
    fixed = sum(item.nbytes for item in weights) + held + temp + in_out
    solved = pages_and_arena(model, limits, place, room - fixed, page)
    pages = limits.num_pages or solved.pages
    width = min(limits.pages_per_row, max(pages, 1))
    items = (
        *weights,
        arena_item(_scratch(model, limits, place, width), limits.batch),
        *_cache_items(own, limits, pages),
        Item("step inputs and outputs", in_out, "tokens, lengths, block tables", (), "bound"),
        Item("xla temp", temp, temps, (), "bound"),
        *outside,
    )
    return MemoryPlan(
        items,
        budget,
        _title(model, limits, place, memory),
        _facts(pages, limits, place, solved),
        _notes(model, limits, place, utilization),
    )


def pages_and_arena(
    model: KnownModel, limits: Limits, place: Placement, room: int, page: int
) -> Solution:
    """The most pages that fit in `room` together with the arena for rows as long as they allow."""

    def arena(pages: int) -> int:
        return arena_bytes(model, limits, place, min(limits.pages_per_row, max(pages, 1)))

    return solve(room, page, arena, most=limits.wanted_pages)


def arena_bytes(model: KnownModel, limits: Limits, place: Placement, width: int) -> int:
    """The maximum over ops and buckets: layers of all kinds use the same bytes."""
    return overlaid(_scratch(model, limits, place, width)).nbytes


def _scratch(
    model: KnownModel, limits: Limits, place: Placement, width: int
) -> tuple[ArenaSpec, ...]:
    found = []
    for batch in limits.batches:
        for q_len in limits.q_lens:
            if model.is_mla:
                found.append(
                    mla.scratch(
                        batch=batch,
                        q_len=q_len,
                        num_heads=model.config["num_attention_heads"] // place.ways,
                        kv_lora_rank=model.config["kv_lora_rank"],
                        max_pages=width,
                    )
                )
            if model.state_layers:
                found.append(
                    gdn.scratch(
                        batch=batch,
                        q_len=q_len,
                        num_v_heads=model.state_heads // place.ways,
                        head_v_dim=model.state_shape[0],
                    )
                )
    return tuple(found)


def _cache_items(own: Sequence[LayerCache], limits: Limits, pages: int) -> list[Item]:
    size = CacheSize(pages=pages, slots=limits.batch)
    return [item for cache in own for item in cache.items(size)]


def _temp(model: KnownModel, limits: Limits, place: Placement) -> tuple[int, str]:
    """Every activation of the largest layer at once, of the larger of decode and prefill."""
    decode = activations(model, limits.batch * max(limits.q_lens), limits.batch, place, 1)
    chunk = limits.chunks[-1]
    prefill = activations(model, chunk, 1, place, min(PREFIX_BLOCK, limits.max_model_len) + chunk)
    largest = max(decode, prefill) + LIBRARY_WORKSPACE
    return largest, (
        f"all activations of a layer at once, nothing reused: decode {decode:,}, prefill "
        f"{prefill:,}, and {LIBRARY_WORKSPACE // MIB} MiB for the matrix library"
    )


def _title(model: KnownModel, limits: Limits, place: Placement, memory: DeviceMemory) -> str:
    each = "a GPU" if place.attention == "data" and place.gpus > 1 else "in all"
    one = f"{place.gpus} x {memory.name}, one of them" if place.gpus > 1 else memory.name
    return (
        f"{model.name} on {one}: {limits.batch:,} rows {each} of up to "
        f"{limits.max_model_len:,} tokens"
    )


def _facts(
    pages: int, limits: Limits, place: Placement, solved: Solution
) -> tuple[tuple[str, str], ...]:
    times = place.gpus if place.attention == "data" else 1
    tokens = pages * PAGE_SIZE
    steps = " -> ".join(f"{high:,}..{low:,}" for high, low in solved.steps)
    return (
        ("cache tokens a GPU", f"{tokens:,}"),
        ("cache tokens in all", f"{tokens * times:,}"),
        ("rows at full length", f"{pages // limits.pages_per_row * times:,}"),
        ("state slots a GPU", f"{limits.batch:,}"),
        ("pages, bounds by step", steps),
    )


def _notes(
    model: KnownModel, limits: Limits, place: Placement, utilization: float
) -> tuple[str, ...]:
    notes = [
        f"Utilization {utilization:g} is the fraction of the device's total memory for arrays and "
        "XLA's temp; the driver's memory comes on top and must fit in the rest.",
        "Sizes are those of the model's public config.json; weights as the checkpoint stores them.",
    ]
    if place.gpus > 1:
        divided = (
            "attention, dense layers, embedding and head are whole on every GPU, which has rows of "
            "its own"
            if place.attention == "data"
            else "attention, dense layers, embedding and head are divided by heads or columns; all "
            "GPUs have the same rows"
        )
        notes.append(f"Routed experts are divided over {place.gpus} GPUs, whole ones; {divided}.")
        if place.attention == "tensor" and not model.cache_heads:
            notes.append("An MLA cache has no heads: every GPU of the group has all of it.")
    if model.extra and not place.prediction:
        notes.append("Prediction (MTP) layers are not loaded; --prediction counts them.")
    if model.state_layers:
        notes.append(
            "Convolution states are bfloat16, recurrent states float32, one slot a row and layer."
        )
    if not model.is_mla:
        notes.append(
            "jaxattn has no kernel for this model's full-attention layers: their scratch is in "
            "the bound of temp."
        )
    if model.is_mla:
        notes.append(_reader(model, place))
    notes.append(
        "A vision tower, adapters, prefix-cache bookkeeping and expert replicas are not counted."
    )
    return tuple(notes)


def _reader(model: KnownModel, place: Placement) -> str:
    """What decodes from the cache on a Hopper GPU: the kernel says itself what it refuses."""
    config, [latents] = model.config, caches(model, place)[:1]
    cache = latents.shapes(CacheSize(pages=1, slots=1))["kv_cache"]
    heads, width = config["num_attention_heads"] // place.ways, model.cache_width
    q = jax.ShapeDtypeStruct((1, 1, heads, width), jnp.bfloat16)
    try:
        mla_decode.refuse(q, cache, config["kv_lora_rank"])
    except NotImplementedError as refusal:
        return f"XLA reads the {place.cache_dtype} cache: {refusal}."
    token = page_bytes(model, place) // (model.attention_layers * PAGE_SIZE)
    return (
        f"MLA's decode kernel reads the {place.cache_dtype} cache: {token:,} bytes per token and "
        "layer."
    )


def advice(
    model: KnownModel, memory: DeviceMemory, limits: Limits, place: Placement
) -> tuple[str, ...]:
    """What would make it fit with a page at least for one row at full length.

    Each is one change; if none does it alone, the fewest GPUs with what else has to be smaller.
    """

    def fits(changed: Limits, on: Placement) -> bool:
        try:
            plan = plan_known(model, memory, changed, on)
        except ValueError:
            return False
        least = changed.pages_per_row * page_bytes(model, on)
        return plan.reserve is not None and plan.reserve >= 0 and plan["kv cache"] >= least

    def gpus_for(changed: Limits) -> int | None:
        # One after another: the fewest that hold it are the same from wherever one starts.
        sizes = range(place.gpus + 1, MOST_GPUS + 1)
        return next((n for n in sizes if fits(changed, dataclasses.replace(place, gpus=n))), None)

    def smaller(name: str, on: Placement, like: Limits) -> int | None:
        value = getattr(like, name) // 2
        while value and not fits(_with(like, **{name: value}), on):
            value //= 2
        return value or None

    found = []
    for larger in larger_shares(limits.utilization):
        if fits(dataclasses.replace(limits, utilization=larger), place):
            found.append(f"--utilization {larger:g}")
            break
    if gpus := gpus_for(limits):
        found.append(f"{gpus} GPUs (--gpus {gpus})")
    for name in ("batch", "max_model_len", "num_pages", "prefill_chunk"):
        if getattr(limits, name) and (value := smaller(name, place, limits)):
            found.append(f"--{name.replace('_', '-')} {value}")
    if max(limits.q_lens) > 1 and fits(dataclasses.replace(limits, q_lens=(1,)), place):
        found.append("--q-len 1")
    if place.cache_dtype != "float8" and fits(
        limits, dataclasses.replace(place, cache_dtype="float8")
    ):
        found.append("a float8 cache (--cache-dtype float8)")
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


def _with(limits: Limits, **smaller: int) -> Limits:
    """The limits with something smaller, and no buckets that could be larger than the batch."""
    changes: dict[str, Any] = {**smaller, "decode_buckets": (), "prefill_buckets": ()}
    return dataclasses.replace(limits, **changes)


def check_known(
    model: KnownModel, memory: DeviceMemory, limits: Limits, place: Placement
) -> MemoryPlan:
    """The plan, if it fits and its cache holds one row at full length.

    Raises:
        PlanError: otherwise, with the plan and advice.
    """
    plan = plan_known(model, memory, limits, place)
    plan.check(lambda: advice(model, memory, limits, place))
    pages = plan["kv cache"] // page_bytes(model, place)
    if pages < limits.pages_per_row and limits.num_pages is None:
        plan.refuse(
            f"the line that does not fit is the kv cache: {pages:,} pages are left, and one row of "
            f"{limits.max_model_len:,} tokens takes {limits.pages_per_row:,}",
            advice(model, memory, limits, place),
        )
    return plan
