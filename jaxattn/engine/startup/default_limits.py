"""The limits that the user left open, chosen from the model and the device's memory.

    choice = choose_limits(model, Limits(), memory, platform="gpu")
    choice.limits     all sizes fixed
    choice.reasons    the reason of each chosen size

A GPU gets limits that serve many requests fast: the model's own context, the largest cache that
fits, and 8,192 prompt tokens per step. If these do not fit, the search lowers first the context,
then the batch, the chunk and the prompt tokens of a step. A CPU gets small sizes, which compile
quickly. Given limits never change: if they do not fit, `prepare` raises a PlanError.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxattn.engine.startup.limits_search import (
    DRIVER,
    Bounds,
    LimitsChoice,
    LimitsSearch,
    limit_reason,
)
from jaxattn.engine.startup.memory_plan import packed_shapes
from jaxattn.engine.steps.model_steps import ModelStep
from jaxattn.engine.steps.pooling_step import PoolingStep
from jaxattn.engine.steps.score_step import GatherStep
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.models.interface import Model


def choose_limits(
    model: Model,
    limits: Limits,
    memory: DeviceMemory | None,
    *,
    platform: str,
    params: Any = None,
    bounds: Bounds | None = None,
    other_bytes: Mapping[str, Any] | None = None,
) -> LimitsChoice:
    """Returns limits with a size for each of `limits.unset`, which fit if any do.

    Args:
        model: The model of one GPU, with the caches that the engine serves.
        memory: The device's memory; with None, which means unknown, the sizes are those of a CPU.
        platform: The platform of the steps, "gpu" or "cpu".
        params: The packed parameters, or their shapes; None derives them from the model.
        bounds: A function that traces the steps of some limits (`largest_steps`) and returns bounds
            of their memory. None counts no memory for steps.
        other_bytes: The bytes of the driver, of collectives and of other engines, as in
            `plan_engine`.
    """
    if platform != "gpu" or memory is None:
        return _small(model, limits, platform)
    outside = dict(other_bytes or {})
    outside["outside"] = max(outside.get("outside", 0), DRIVER)
    return LimitsSearch(
        requested=limits,
        model=model,
        memory=memory,
        params=packed_shapes(model) if params is None else params,
        other_bytes=outside,
        bounds=bounds or (lambda _: {}),
    ).choose()


def largest_steps(limits: Limits) -> tuple[EngineStep, ...]:
    """Returns the steps that take the most memory: those of a whole batch, or with most tokens."""
    steps = all_steps(limits)
    prefills = [s for s in steps if isinstance(s, ModelStep) and s.kind == "prefill"]
    most = max(step.size for step in prefills)
    read = max(step.tokens for step in prefills) * limits.groups
    whole = [
        step
        for step in steps
        if step not in prefills and getattr(step, "rows", limits.batch) == limits.batch
        if not isinstance(step, GatherStep | PoolingStep) or step.tokens == read
    ]
    return (*(step for step in prefills if step.size == most), *whole)


def _small(model: Model, limits: Limits, platform: str) -> LimitsChoice:
    """Returns the small default sizes, adapted to the model's length and to the given limits."""
    chosen: dict[str, Any] = {}
    for name in limits.unset - {"utilization"}:
        value = getattr(limits, name)
        chosen[name] = tuple(value) if isinstance(value, tuple) else int(value)
    _at_least(chosen, "batch", limits.decode_buckets)
    _at_least(chosen, "prefill_chunk", limits.prefill_buckets)
    if "max_model_len" in chosen:
        chosen["max_model_len"] = min(chosen["max_model_len"], model.max_position_embeddings)
    why = "small, so that a CPU compiles quickly"
    if platform == "gpu":
        why = "small, because several hosts run the engine or the GPU's memory is unknown"
    shown = ("batch", "max_model_len", "prefill_chunk", "prefill_rows")
    return LimitsChoice(
        dataclasses.replace(limits, **chosen),
        tuple(limit_reason(name, chosen[name], why) for name in shown if name in chosen),
    )


def _at_least(chosen: dict[str, Any], name: str, parts: Iterable[int]) -> None:
    """Raises a chosen size to the largest of the buckets that the user gave for it."""
    if name in chosen:
        chosen[name] = max(chosen[name], *parts, 1)
