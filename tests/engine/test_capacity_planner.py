"""Which steps are compiled, and for how many pages, until a share of a device is filled."""

import dataclasses
import types

import jax
import pytest

from jaxattn.engine.compilation.compiler import CompiledSteps
from jaxattn.engine.startup import capacity_planner
from jaxattn.engine.startup.capacity_planner import CapacityPlanner
from jaxattn.engine.startup.executable_memory import ExecutableMemory
from jaxattn.engine.startup.memory_plan import packed_shapes, page_bytes, plan_engine
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import PlanError, nbytes
from jaxattn.models import Hybrid
from tests.helpers.engine_cases import LIMITS, SMALLEST

MODEL = Hybrid(SMALLEST)
FILLED = dataclasses.replace(
    LIMITS, batch=64, max_model_len=SMALLEST.max_position_embeddings, num_pages=None, utilization=1
)
PAGES = 200
LARGEST = "prefill of 16 tokens beside 64 rows"


def compiled(temp):
    """An executable of which XLA says that it takes so much."""
    stats = types.SimpleNamespace(
        argument_size_in_bytes=1, output_size_in_bytes=0, alias_size_in_bytes=0,
        temp_size_in_bytes=temp, generated_code_size_in_bytes=0,
    )  # fmt: skip
    return types.SimpleNamespace(memory_analysis=lambda: stats)


@pytest.fixture
def fit(monkeypatch):
    """Fits a device with room for PAGES beside nothing else; gives (limits, what was compiled).

    Its arguments are the bounds of steps that have one above a page, in pages, and what XLA says
    of a step with its limits, in pages too."""
    params, calls = packed_shapes(MODEL), []
    page = page_bytes(MODEL.caches)

    def compile(model, limits, *_, requested_steps, reusable_steps, **__):
        steps = requested_steps or all_steps(limits)
        calls.append((limits.pages, [str(step) for step in steps]))
        return CompiledSteps({str(s): compiled(int(taken(s, limits) * page)) for s in steps})

    monkeypatch.setattr(capacity_planner, "get_or_compile_steps", compile)
    planner = CapacityPlanner(model=MODEL, params=params, devices=(jax.devices()[0],))

    def run(bounds, says):
        nonlocal taken
        taken = says
        one = plan_engine(MODEL, dataclasses.replace(FILLED, num_pages=PAGES), None, params, {})
        known = {}
        for step in all_steps(FILLED):
            given, temp = nbytes(step.given(MODEL, FILLED)), bounds.get(str(step), 1) * page
            known[str(step)] = ExecutableMemory(given, temp, 0, "bound")
        beside = page // 2 + max(each.in_out for each in known.values())
        memory = DeviceMemory("a GPU", one.total + beside)
        found, _, _ = planner.fit(FILLED, known, memory, 0)
        return found.pages, calls

    taken = None
    return run


def test_bounds_that_cost_few_pages_are_not_looked_into(fit):
    """Each step is compiled once."""
    pages, calls = fit({LARGEST: 4, "mask of 64 rows": 1}, lambda step, limits: 1)
    assert calls == [(pages, [str(step) for step in all_steps(FILLED)])]
    assert PAGES * 0.975 <= pages < PAGES


def test_the_largest_bound_is_compiled_first_and_its_pages_are_kept_where_it_was_nearly_right(fit):
    bounds = {"mask of 64 rows": 40, LARGEST: 100}
    pages, calls = fit(bounds, lambda step, limits: 99 if str(step) == LARGEST else 1)
    assert [count for count, _ in calls] == [pages, pages]
    assert calls[0][1] == [LARGEST] and len(calls[1][1]) == len(all_steps(FILLED))
    assert 95 <= pages <= 100


def test_the_pages_that_a_bound_cost_are_given_to_the_cache(fit):
    """The mask's bound is the largest once XLA has said what prompts take, and is looked into."""
    bounds = {"mask of 64 rows": 40, LARGEST: 100}
    pages, calls = fit(bounds, lambda step, limits: 20 if str(step) == LARGEST else 1)
    first, second, third = calls
    assert (first[1], second[1]) == ([LARGEST], ["mask of 64 rows"])
    assert first[0] < second[0] < third[0] == pages
    assert PAGES - 25 <= pages <= PAGES - 20


def test_temp_that_grows_with_the_pages_ends_with_an_error(fit):
    with pytest.raises(PlanError, match="XLA's temp grows with the pages"):
        fit({LARGEST: 1}, lambda step, limits: 250 - limits.pages)


def test_a_row_is_tried_although_a_bound_leaves_no_room_for_it(fit):
    pages, calls = fit({LARGEST: 10 * PAGES}, lambda step, limits: 3)
    row = dataclasses.replace(FILLED, num_pages=PAGES).pages_per_row
    assert calls[0] == (row, [LARGEST]) and pages >= PAGES - 5


def test_what_does_not_depend_on_the_pages_is_compiled_for_one_number_of_them():
    params, made = packed_shapes(MODEL), dataclasses.replace(FILLED, num_pages=300)
    names = {str(step): object() for step in all_steps(made)}
    kept = CompiledSteps(names, made).shared(
        MODEL, dataclasses.replace(FILLED, num_pages=200), params
    )
    with_caches = {n for n in names if n.startswith(("prefill", "decode", "round"))}
    assert set(kept) == set(names) - with_caches and len(with_caches) == 4
    assert all(kept[name] is names[name] for name in kept)
    shorter = CompiledSteps(names, made).shared(
        MODEL, dataclasses.replace(FILLED, num_pages=1), params
    )
    assert "update of rows" not in shorter  # whose block tables are narrower
