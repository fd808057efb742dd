"""The plan of one GPU, as the engine makes it: traces of the model's steps give a bound on temp."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jaxattn.core.dispatch import traced_for_hopper
from jaxattn.core.validation.arguments import MOST
from jaxattn.engine.startup.decode_step_count import choose_decode_steps
from jaxattn.engine.startup.default_limits import choose_limits, largest_steps
from jaxattn.engine.startup.executable_memory import ExecutableMemory, bound_of
from jaxattn.engine.startup.limits_search import LimitsChoice
from jaxattn.engine.startup.memory_plan import check_row, fill, packed_shapes, plan_engine
from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep, SpeculativeDecodeStep
from jaxattn.engine.steps.sampling_steps import SampleStep
from jaxattn.engine.steps.step_catalog import all_steps, entry_points
from jaxattn.engine.steps.step_interface import EngineStep, sampled_rows
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryPlan
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.param_roles import with_local_heads
from jaxattn.models.interface import Model
from jaxattn.plan.estimated_plan import DRIVER
from jaxattn.plan.placement import CACHE_DTYPES, ModelPlacement, weight_items
from jaxattn.plan.plan_notes import notes, title

MOST_TRACED = 16  # tracing a step takes a second

type Helps = Callable[[Limits, dict[str, ExecutableMemory]], tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The plan of a model on one GPU.

    Attributes:
        model: The model with the planned caches.
        params: The shapes of its packed parameters, as stored in memory.
        traced: The model whose steps are traced for the bound on temp.
        dress: A function that completes a plan with its title, notes and weight items.
        choices: The reason of each limit that `choose_limits` chose.
    """

    model: Model
    params: Any
    traced: Model
    memory: DeviceMemory
    dress: Callable[[MemoryPlan, Limits], MemoryPlan] = lambda made, _: made
    choices: tuple[str, ...] = ()

    @property
    def on_hopper(self) -> bool:
        """Whether the planned device runs the kernels, whatever device makes the plan."""
        return self.memory.name != "cpu"

    @property
    def beside(self) -> dict[str, Any]:
        """The items of a plan besides arrays and executables: the driver's memory."""
        driver = DRIVER if self.on_hopper else 0
        return {"outside": driver, "outside_basis": "assumed"}

    def checked(self, limits: Limits, advise: Helps = lambda *_: ()) -> MemoryPlan:
        """Returns the plan, with the pages that fit if `limits` leave their number open.

        Args:
            advise: A function that returns advice if the plan does not fit. Its arguments are the
                limits and the memory of their executables.

        Raises:
            PlanError: The plan does not fit, or its cache holds no row at full length.
        """
        choice = self.chosen(limits)
        limits = choose_decode_steps(choice.limits, self.params, gpu=self.on_hopper)
        return dataclasses.replace(self, choices=choice.reasons)._checked(limits, advise)

    def _checked(self, limits: Limits, advise: Helps) -> MemoryPlan:
        """`checked` for limits that leave only the number of pages open."""
        requested_pages = limits.num_pages
        if requested_pages is None:
            limits = dataclasses.replace(limits, utilization=limits.utilization or 0.9)
        # Check the plan without executables first, since tracing is slow. Temp grows with the
        # pages.
        least = limits if requested_pages else dataclasses.replace(limits, num_pages=1)
        self._plan(least, {}).check(lambda: advise(least, {}))
        if requested_pages is None:
            for known in () if self.choices else self._growing(least):
                self._plan(least, known).check(functools.partial(advise, least, known))
            row = dataclasses.replace(limits, num_pages=limits.pages_per_row)
            known = self._bounds(row)
            limits = fill(self.model, limits, self.memory, self.params, known, **self.beside)
        known = self._bounds(limits)
        made = self._plan(limits, known)
        check_row(made, limits, lambda: advise(limits, known), requested_pages=requested_pages)
        return made

    def chosen(self, limits: Limits) -> LimitsChoice:
        """Chooses the limits that are left open, as an engine does."""

        def bounds(candidate: Limits) -> dict[str, ExecutableMemory]:
            steps = largest_steps(candidate)
            return {
                str(each): _bound_in(self.traced, each, candidate, self.on_hopper) for each in steps
            }

        beside = {key: value for key, value in self.beside.items() if key != "outside_basis"}
        return choose_limits(
            self.model,
            limits,
            self.memory,
            platform="gpu" if self.on_hopper else "cpu",
            params=self.params,
            bounds=bounds,
            other_bytes=beside,
        )

    def filled(self, limits: Limits) -> int | None:
        """Returns the pages that weights and state leave room for, without tracing; None if none.

        Args:
            limits: Limits with `utilization`, and without `num_pages`.
        """
        least = self._plan(dataclasses.replace(limits, num_pages=1), {})
        if least.reserve is None or least.reserve < 0:
            return None
        return fill(self.model, limits, self.memory, self.params, {}, **self.beside).pages

    def _growing(self, limits: Limits) -> Iterator[dict[str, ExecutableMemory]]:
        """Yields the memory of a growing set of executables, beginning with the largest."""
        known: dict[str, ExecutableMemory] = {}
        entries = entry_points(limits)
        for entry in sorted(entries, key=lambda each: -each.size):
            known[str(entry)] = _bound_in(self.traced, entry, limits, self.on_hopper)
            yield dict(known)
        yield self._bounds(limits)

    def _bounds(self, limits: Limits) -> dict[str, ExecutableMemory]:
        return traced_bounds(self.traced, limits, self.on_hopper)

    def _plan(self, limits: Limits, executables: dict[str, ExecutableMemory]) -> MemoryPlan:
        made = plan_engine(self.model, limits, self.memory, self.params, executables, **self.beside)
        return dataclasses.replace(self.dress(made, limits), choices=self.choices)


def traced_bounds(model: Model, limits: Limits, on_hopper: bool) -> dict[str, ExecutableMemory]:
    """Returns upper bounds of the executables' memory like `from_shapes`, for Hopper or for XLA.

    If there are many executables, only the largest are traced, because the others are the same with
    fewer rows or tokens.
    """
    steps = all_steps(limits)
    if len(steps) > MOST_TRACED:
        steps = largest_steps(limits)
    return {str(step): _bound_in(model, step, limits, on_hopper) for step in steps}


def _bound_in(model: Model, step: EngineStep, limits: Limits, on_hopper: bool) -> ExecutableMemory:
    """Returns an upper bound of the memory of one executable of an engine with these limits."""
    rows, longest = limits.batch, limits.max_model_len
    prefills = isinstance(step, ModelStep) and step.kind == "prefill"
    if isinstance(step, ModelStep | FusedDecodeStep | SampleStep) and not prefills:
        rows = sampled_rows(limits, step.rows)
    # Only the table's width matters, so that advice with many lengths hits the cache of `_bound`.
    # Prompt lookup reads whole rows, so there the length matters.
    if isinstance(step, ModelStep | FusedDecodeStep) and not isinstance(
        step, SpeculativeDecodeStep
    ):
        # A chunk may be longer than a table of few pages: the step has room for whole chunks.
        longest = max(min(limits.table_width * limits.page_tokens, MOST), limits.chunks[-1])
    prompts = limits.chunks[-1], limits.prompt_rows * limits.groups
    drafts = step.drafts if isinstance(step, SpeculativeDecodeStep) else 0, "lookup"
    if limits.uses_draft_head:  # other steps keep the head's inputs, too
        drafts = limits.speculate, limits.speculate_by
    return _bound(model, step, rows, limits.table_width, longest, prompts, drafts, on_hopper)


@functools.lru_cache(maxsize=256)
def _bound(
    model: Model,
    step: EngineStep,
    rows: int,
    width: int,
    longest: int,
    prompts: tuple[int, int],
    drafts: tuple[int, str],
    on_hopper: bool,
) -> ExecutableMemory:
    """Returns an upper bound of a step's memory; cached, because advice asks repeatedly.

    Args:
        rows: The number of rows.
        width: The pages per block table.
        longest: The maximum length of a row.
        prompts: The maximum tokens of a prompt's chunk, and the maximum number of prompts.
        drafts: The number of draft tokens, and their source.
    """
    (chunk, prompt_rows), (speculate, speculate_by) = prompts, drafts
    decodes = isinstance(step, ModelStep) and step.kind == "decode"
    tokens = step.tokens if isinstance(step, ModelStep) and decodes else 1
    limits = Limits(
        batch=rows,
        max_model_len=longest,
        num_pages=width,
        prefill_chunk=chunk,
        prefill_rows=prompt_rows,
        q_lens=tuple(sorted({1, tokens})),
        speculate=speculate,
        speculate_by=speculate_by,
        spread=model.parallel.context,
        groups=model.parallel.data,
    )
    with traced_for_hopper(on_hopper):
        return bound_of(model, step, limits, _packed(model, on_hopper), None)


@functools.lru_cache(maxsize=16)
def _packed(model: Model, on_hopper: bool) -> Any:
    """Returns `packed_shapes`, traced once for all steps of a model."""
    return packed_shapes(model)


def single(model: DecoderSizes, memory: DeviceMemory, place: ModelPlacement) -> DevicePlan:
    """Returns the plan of a known model on one GPU."""
    local_model = with_local_heads(model.model, 1, place.stored_dtype)

    def dress(plan: MemoryPlan, limits: Limits) -> MemoryPlan:
        weights = weight_items(model, place)
        rest = [item for item in plan.items if item.name != "weights"]
        return dataclasses.replace(
            plan,
            items=(*weights, *rest),
            title=title(model, limits, place, memory),
            notes=notes(model, limits, place),
        )

    return DevicePlan(
        model=local_model,
        params=packed_shapes(local_model),
        # A float8 cache needs scales, which no model's steps take.
        traced=model.model if place.stored_dtype == CACHE_DTYPES["float8"] else local_model,
        memory=memory,
        dress=dress,
    )
