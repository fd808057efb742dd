"""The memory plan of a model: bytes with their reasons, before anything is allocated.

    plan(model, device, limits)       for a model or a known public one; needs no device
    python -m jaxattn.plan NAME       the same as a table

An `Engine` makes the same plan, with XLA's figures of its executables instead of upper bounds.
"""

from jaxattn.engine.startup.engine_build import check_arguments
from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import advice, packed_shapes
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory, known_device
from jaxattn.memory.plan import MemoryBudget as MemoryBudget
from jaxattn.memory.plan import MemoryPlan as MemoryPlan
from jaxattn.memory.plan import PlanError as PlanError
from jaxattn.memory.plan import PlanItem as PlanItem
from jaxattn.memory.plan import nbytes as nbytes
from jaxattn.memory.plan import solve as solve
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.models.interface import Model
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.parallel import Parallel
from jaxattn.plan.device_plan import DevicePlan
from jaxattn.plan.layout_search import plan_parallel
from jaxattn.plan.placement import ModelPlacement
from jaxattn.plan.plan_advice import plan_model


def plan(
    model: Model | ModelSizes,
    device: DeviceMemory | str,
    limits: Limits,
    *,
    placement: ModelPlacement | None = None,
    parallel: Parallel | None = None,
) -> MemoryPlan:
    """Plans the memory that one device needs for the model, and the pages that fit.

    It allocates and compiles nothing. XLA's temp is an upper bound from shapes, and its basis says
    so; `prepare` replaces it by the executables' figures.

    Args:
        model: A model such as `jaxattn.models.Hybrid(config)`, or the result of
            `jaxattn.models.catalog.model_resolver.load(name)`.
        device: The device's memory, or its name for `known_device` (memory/device_memory.py). The
            plan does not touch memory that is in use according to `free`.
        limits: The limits of the engine. Without `num_pages` the cache gets what `utilization`
            leaves of the device; the default is then 0.9.
        placement: The placement of a decoder or a known model on several GPUs.
        parallel: The layout of a decoder over several GPUs. Data groups share the batch.

    Raises:
        TypeError: `model` has another type, or it is no decoder and a placement or layout is given.
        PlanError: The plan does not fit, or its cache holds no row at full length. The error has
            the plan and advice.
        ValueError: The model has no cache in `limits.cache_format`, or the limits, the device or
            the placement are invalid for the model.
    """
    memory = known_device(device) if isinstance(device, str) else device
    if parallel is not None and parallel.gpus > 1:
        decoder = model.model if isinstance(model, DecoderSizes) else model
        if not isinstance(decoder, DecoderModel):
            raise TypeError(
                f"parallel needs a jaxattn.models.DecoderModel; got {type(model).__name__}"
            )
        check_arguments(decoder, limits, None)
        name = model.name if isinstance(model, DecoderSizes) else type(model).__name__
        return plan_parallel(name, decoder, memory, limits, parallel)
    if placement is not None and isinstance(model, DecoderModel):
        check_arguments(model, limits, None)
        model = DecoderSizes.of(type(model).__name__, model)
    if isinstance(model, ModelSizes):
        model = model.in_cache_format(limits.cache_format, limits.native_layers)
        return plan_model(model, memory, limits, placement or ModelPlacement())
    check_arguments(model, limits, None)
    if placement is not None:
        raise TypeError(
            "placement needs a jaxattn.models.DecoderModel or a known model; got "
            f"{type(model).__name__}"
        )
    model = model.with_cache_format(limits.cache_format, limits.native_layers)
    one = DevicePlan(model=model, params=packed_shapes(model), traced=model, memory=memory)

    def helps(candidate: Limits, executables: dict[str, ExecutableMemory]) -> tuple[str, ...]:
        return advice(model, candidate, memory, one.params, executables, **one.beside)

    return one.checked(limits, helps)
