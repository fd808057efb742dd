"""The memory plan of an engine, from shapes, or from its executables once they are compiled.

    pool      weights + state (arena, caches) + rows + step inputs and outputs + XLA temp
    outside   XLA's code, the driver's own memory

The executables run one at a time, so the plan counts the largest inputs, outputs and temp of any
executable. The code of all of them is loaded, so the plan counts its sum.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.arena import ArenaSpec
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.engine.startup.executable_memory import ExecutableMemory, from_shapes
from jaxattn.engine.steps.engine_state import (
    arena_spec,
    cache_size,
    kept_checkpoints,
    new_state,
    op_specs,
    row_shapes,
)
from jaxattn.limits import Limits, larger_shares
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryBudget, MemoryPlan, PlanItem, nbytes, solve
from jaxattn.models.caches.layer_cache import CacheSize, LayerCache
from jaxattn.models.interface import Model, overlaid

# JAX's allocator on a GPU rounds a buffer up to BFC_ALIGNMENT bytes. It does not split a free piece
# if less than BFC_REST would be left over and the piece is less than twice as large.
BFC_ALIGNMENT, BFC_REST = 256, 128 * 2**20
RESERVED = "reserved"  # the item of `Limits.reserved_bytes`


def packed_shapes(model: Model) -> Any:
    """Returns the shapes of the parameters as an engine holds them."""
    return jax.eval_shape(model.pack, model.param_shapes())


def page_bytes(caches: Sequence[LayerCache]) -> int:
    """Returns the bytes of a page in all layers of all caches."""
    return sum(_page_bytes_of_arrays(caches))


def _page_bytes_of_arrays(caches: Sequence[LayerCache]) -> list[int]:
    """Returns by how many bytes each array of the caches grows per page, if it grows at all."""
    one, two = (
        [shape for cache in caches for shape in cache.shapes(size).values()]
        for size in (CacheSize(pages=1, slots=1), CacheSize(pages=2, slots=1))
    )
    grown = [nbytes(after) - nbytes(before) for before, after in zip(one, two, strict=True)]
    return [extra for extra in grown if extra]


def fill(
    model: Model,
    limits: Limits,
    memory: DeviceMemory,
    params: Any,
    executables: Mapping[str, ExecutableMemory],
    **other_bytes: Any,
) -> Limits:
    """Returns the limits with the pages that `limits.utilization` leaves room for, at least 1.

    A plan with one page gives the bytes that do not depend on the pages. The arena and the rows
    grow with the longest row that the pages can hold, so `solve` finds them together with the
    pages.
    """
    assert limits.utilization is not None
    one = dataclasses.replace(limits, num_pages=1)
    plan = plan_engine(model, one, memory, params, executables, **other_bytes)
    assert plan.budget is not None
    of_arrays = _page_bytes_of_arrays(model.caches)
    page = sum(of_arrays)
    max_pages = limits.num_pages or limits.wanted_pages
    if not page:  # nothing is cached by page
        return dataclasses.replace(limits, num_pages=max_pages)
    # The allocator rounds arrays of other sizes up differently.
    with_pages = plan["arena"] + plan["rows"]
    fixed = plan.inside - page - with_pages + (2 + len(of_arrays)) * BFC_ALIGNMENT

    def workspace(pages: int) -> int:
        at = dataclasses.replace(limits, num_pages=max(pages, 1))
        return arena_spec(model, at, at.table_width).nbytes + nbytes(row_shapes(at))

    found = solve(
        plan.budget.arrays(plan.outside) - fixed,
        page,
        workspace,
        max_pages=max_pages,
    )
    return dataclasses.replace(limits, num_pages=max(found.pages, 1))


def check_row(
    plan: MemoryPlan,
    limits: Limits,
    advice: Callable[[], tuple[str, ...]],
    *,
    requested_pages: int | None,
) -> None:
    """Refuses a plan that does not fit, or whose cache holds no row at full length.

    Args:
        plan: The plan with `limits.pages`.
        requested_pages: The number of pages that the user gave, which may be fewer than a row
            needs. None means that `fill` found as many as there is room for.

    Raises:
        PlanError: The error has the plan and advice on how to make a row fit.
    """
    plan.check(advice)
    if limits.pages < min(limits.pages_per_row, requested_pages or limits.pages_per_row):
        plan.refuse(
            f"the item that does not fit is the kv cache: {limits.pages:,} pages are left, but "
            f"one row of {limits.max_model_len:,} tokens needs {limits.pages_per_row:,}",
            advice(),
        )


def plan_engine(
    model: Model,
    limits: Limits,
    memory: DeviceMemory | None,
    params: Any,
    executables: Mapping[str, ExecutableMemory],
    *,
    outside: int = 0,
    collectives: int = 0,
    others: int = 0,
    outside_basis: str = "measured",
) -> MemoryPlan:
    """Returns the whole plan of an engine with `limits.pages` pages.

    Args:
        params: The parameters, or their shapes.
        executables: The memory of each executable by name; if empty, the plan omits inputs, temp
            and code.
        outside: The bytes of the driver and of other processes.
        collectives: The bytes of NCCL and of XLA's collective kernels.
        others: The bytes of JAX's pool that other arrays and engines hold.
        outside_basis: The basis of `outside` and `collectives`, see `PlanItem`.
    """
    state = jax.eval_shape(functools.partial(new_state, model, limits))
    items = [*resident_items(model, limits, params), *_step_items(executables)]
    if memory is not None and memory.limit:
        items.append(_rounding([leaf for leaf in jax.tree.leaves((params, state)) if leaf.size]))
    if others:
        why = "arrays and engines that the process already held"
        items.append(PlanItem("others", others, why, basis="measured"))
    if limits.reserved_bytes:
        why = "left free for other users of the device, such as a trainer"
        items.append(PlanItem(RESERVED, limits.reserved_bytes, why, basis="assumed"))
    items += _code_items(executables)
    items += _outside_items(memory, outside, collectives, outside_basis)
    budget = None
    if memory is not None:
        utilization = 1.0 if limits.utilization is None else limits.utilization
        budget = MemoryBudget(memory.name, memory.total, utilization, memory.limit)
    return MemoryPlan(
        tuple(items),
        budget,
        f"{limits.batch} rows of up to {limits.max_model_len:,} tokens ({limits.pages:,} pages, "
        f"{limits.batch} state slots{_checkpoints(limits)})",
        facts=(
            ("cache tokens", f"{limits.pages * limits.page_tokens:,}"),
            ("rows at full length", f"{limits.pages // limits.pages_per_row:,}"),
        ),
        limits=limits,
    )


def _step_items(executables: Mapping[str, ExecutableMemory]) -> list[PlanItem]:
    """Returns the executables' items in the pool: the largest, because they run one at a time."""
    if not executables:
        return []
    basis = _basis(executables)
    in_out = {name: known.in_out for name, known in executables.items()}
    temp = {name: known.temp for name, known in executables.items()}
    inputs = "step inputs and outputs"
    return [
        PlanItem(inputs, max(in_out.values()), _largest(in_out), basis=basis),
        PlanItem("xla temp", max(temp.values()), _largest(temp), basis=basis),
    ]


def _code_items(executables: Mapping[str, ExecutableMemory]) -> list[PlanItem]:
    """Returns the executables' items outside of the pool: the sum, because all are loaded."""
    if not executables:
        return []
    code = sum(known.code for known in executables.values())
    why = f"the code of {len(executables)} executables together"
    return [PlanItem("xla code", code, why, basis=_basis(executables), outside=True)]


def _basis(executables: Mapping[str, ExecutableMemory]) -> str:
    """Returns the basis of a sum or maximum, which is "bound" if any value is a bound."""
    return "bound" if any(known.basis == "bound" for known in executables.values()) else "compiled"


def _rounding(arrays: Sequence[Any]) -> PlanItem:
    """Returns the bytes that JAX's allocator takes in addition to the arrays' own."""
    # A step's inputs and results are a dozen buffers of any size.
    lost = sum(-nbytes(leaf) % BFC_ALIGNMENT for leaf in arrays) + 16 * BFC_ALIGNMENT
    why = (
        f"JAX's allocator rounds arrays up to {BFC_ALIGNMENT} bytes, and adds the rest of a free "
        f"block below {BFC_REST // 2**20} MiB: to the temp and to one array"
    )
    return PlanItem("rounding", lost + 2 * BFC_REST, why, basis="bound")


def _outside_items(
    memory: DeviceMemory | None, outside: int, collectives: int, basis: str
) -> list[PlanItem]:
    """Returns the items of the driver, NCCL and other processes; arguments as in `plan_engine`."""
    items = []
    if outside:
        why = "context, modules, libraries"
        if basis == "measured":
            why += ", and the device memory that other processes hold"
        items.append(PlanItem("driver", outside, why, basis=basis, outside=True))
    if collectives:
        why = "NCCL's channels and buffers, and those of XLA's collective kernels"
        items.append(PlanItem("collectives", collectives, why, basis=basis, outside=True))
    if basis != "measured":
        items += held_elsewhere(memory)
    return items


def _checkpoints(limits: Limits) -> str:
    found = {"checkpoints": kept_checkpoints(limits), "for drafts": limits.batch * limits.speculate}
    return "".join(f" and {count} {what}" for what, count in found.items() if count)


def held_elsewhere(memory: DeviceMemory | None) -> list[PlanItem]:
    """Returns an item for the memory of the device that was already taken, if it was measured."""
    if memory is None or not memory.outside:
        return []
    why = "device memory outside of this process's arrays: other processes, the driver"
    return [PlanItem("in use", memory.outside, why, basis="measured", outside=True)]


def advice(
    model: Model,
    limits: Limits,
    memory: DeviceMemory,
    params: Any,
    executables: Mapping[str, ExecutableMemory],
    **other_bytes: Any,
) -> tuple[str, ...]:
    """Returns single changes that would make the plan fit, with the whole cache of every row.

    Args:
        executables: The memory of the executables in the plan that does not fit, as in
            `plan_engine`. Smaller steps take no more. If that is still too much, the smaller steps
            are traced for their own bound.
    """

    def left(
        candidate: Limits, step_memory: Mapping[str, ExecutableMemory], device: DeviceMemory
    ) -> bool:
        plan = plan_engine(model, candidate, device, params, step_memory, **other_bytes)
        return plan.reserve is not None and plan.reserve >= 0

    def fits(candidate: Limits, device: DeviceMemory = memory) -> bool:
        if executables and left(candidate, executables, device):
            return True
        # Tracing takes a second, so it comes after the plan of only weights and state.
        return left(candidate, {}, device) and left(candidate, bounds(candidate), device)

    traced: dict[Any, dict[str, ExecutableMemory]] = {}

    def bounds(candidate: Limits) -> dict[str, ExecutableMemory]:
        """Traces limits once, even if they differ in pages, since more pages raise no bound."""
        shape = (
            dataclasses.replace(candidate, utilization=None, num_pages=None),
            candidate.table_width,
        )
        if shape not in traced:
            traced[shape] = from_shapes(model, candidate, params, None)
        return traced[shape]

    suggestions = []
    for larger in larger_shares(limits.utilization):
        device, how = memory, f"utilization {larger:g}"
        if memory.limit is not None:  # JAX's allocator got its limit when it began
            device = dataclasses.replace(memory, limit=int(larger * memory.total))
            how += " with the same XLA_PYTHON_CLIENT_MEM_FRACTION"
        candidate = dataclasses.replace(limits, utilization=larger, num_pages=None)
        filled = fill(model, candidate, device, params, executables, **other_bytes)
        if filled.pages >= limits.pages_per_row and fits(filled, device):
            suggestions.append(how)
            break
    one_row = dataclasses.replace(limits, utilization=limits.utilization or 1.0, num_pages=None)
    pages = fill(model, one_row, memory, params, executables, **other_bytes).pages
    if pages < limits.pages and fits(dataclasses.replace(limits, num_pages=pages)):
        suggestions.append(f"at most {pages:,} pages")
    sizes = (("batch", limits.groups), ("max_model_len", PAGE_SIZE), ("prefill_chunk", 1))
    for name, least in sizes:
        step = limits.groups if name == "batch" else 1  # as many rows in each data group
        value = getattr(limits, name) // 2 // step * step
        while value >= least:
            smaller = dataclasses.replace(
                limits, **{name: value}, num_pages=None, decode_buckets=(), prefill_buckets=()
            )
            if fits(smaller):
                suggestions.append(f"{name} {value:,} with {smaller.pages:,} pages")
                break
            value = value // 2 // step * step
    return tuple(suggestions) or ("a device with more memory",)


def resident_items(model: Model, limits: Limits, params: Any) -> tuple[PlanItem, ...]:
    """Returns the items of weights, rows, arena and caches, from arrays or from their shapes."""
    weights = jax.tree.leaves(params)
    twice = sum(leaf.size for leaf in jax.tree.leaves(model.copies(params)))
    why = f"{sum(leaf.size for leaf in weights) - twice:,} parameters"
    if twice:
        why += f", {twice:,} more numbers for decoding,"
    dtypes = "/".join(sorted({jnp.dtype(leaf.dtype).name for leaf in weights}))
    size = cache_size(limits)
    return (
        PlanItem("weights", nbytes(params), f"{why} in {dtypes}, read only"),
        rows_item(limits),
        arena_item(op_specs(model, limits, limits.table_width), limits.batch),
        *(item for cache in model.caches for item in cache.items(size)),
    )


def rows_item(limits: Limits) -> PlanItem:
    """Returns the item of the rows' arrays that stay on the device between steps."""
    shapes = row_shapes(limits)
    arrays = {field.name: getattr(shapes, field.name) for field in dataclasses.fields(shapes)}
    parts = tuple(
        PlanItem(f"rows {name}", nbytes(shape), f"int32{list(shape.shape)}")
        for name, shape in arrays.items()
    )
    why = f"the device's data of {limits.batch:,} rows between steps"
    return PlanItem("rows", nbytes(shapes), why, parts)


def arena_item(specs: Sequence[ArenaSpec], rows: int) -> PlanItem:
    """Returns the item of these ops' overlaid scratch; its parts are the largest of each name."""
    parts: dict[str, PlanItem] = {}
    for spec in specs:
        for name, region in (*spec.regions, *spec.persistent):
            part = PlanItem(
                f"{spec.op} {name}", region.nbytes, f"{region}, shares memory with other ops"
            )
            if part.name not in parts or parts[part.name].nbytes < part.nbytes:
                parts[part.name] = part
    why = f"scratch of {rows:,} rows, shared by all layers"
    return PlanItem("arena", overlaid(specs).nbytes, why, tuple(parts.values()))


def _largest(sizes: Mapping[str, int]) -> str:
    return "the largest of " + ", ".join(f"{name}: {size:,}" for name, size in sizes.items())
