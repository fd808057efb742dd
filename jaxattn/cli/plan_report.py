"""The commands' report of a memory plan, on request or because the plan does not fit."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
from rich.console import Console

from jaxattn.cli.options.parser import InputError, in_options
from jaxattn.core.dispatch import Refusal
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import device_memory
from jaxattn.memory.plan import MemoryPlan, PlanError
from jaxattn.models.interface import Model
from jaxattn.plan import plan
from jaxattn.plan.alternative_scratch_designs import ScratchComparison
from jaxattn.plan.plan_display import PlanPlotError, print_plan, save_plot

MIB = 2**20


def show_plan(model: Model, limits: Limits, options: argparse.Namespace) -> int:
    """Prints the plan, computed from shapes, and returns 0.

    Raises:
        InputError: If the plan does not fit, or the size of the device's memory is unknown.
    """
    if limits.utilization is None and jax.devices()[0].platform != "gpu":
        # Like `serve`, which only shrinks the cache if asked to.
        limits = dataclasses.replace(limits, num_pages=limits.pages)
    memory = device_memory(jax.devices()[0])
    if memory is None:
        raise InputError("--plan: this device does not report how much memory it has")
    plan_error = None
    try:
        memory_plan = plan(model, memory, limits)
    except PlanError as error:
        assert error.plan is not None
        memory_plan, plan_error = error.plan, error
    return report_plan(memory_plan, plan_error, options)


def report_plan(
    memory_plan: MemoryPlan,
    plan_error: Exception | None,
    options: argparse.Namespace,
    naive: Sequence[ScratchComparison] = (),
) -> int:
    """Prints a plan to stdout, as a table or as JSON, draws it for --plot, and returns 0.

    Args:
        plan_error: The error of a plan that does not fit; None if it fits.
        naive: The memory of other scratch designs, printed below the plan.

    Raises:
        InputError: If the plan does not fit, or cannot be drawn.
    """
    if options.json:
        result = memory_plan.to_dict() | {"fits": plan_error is None}
        if naive:
            result["naive"] = [vars(each) for each in naive]
        print(json.dumps(result), flush=True)
    else:
        print_plan(_wide(Console(highlight=False)), memory_plan, naive)
    if options.plot:
        try:
            save_plot(memory_plan, options.plot)
        except PlanPlotError as error:
            raise InputError(str(error)) from error
    if plan_error is not None:
        raise InputError(in_options(plan_error))
    return 0


def plan_lines(memory_plan: MemoryPlan) -> Iterable[str]:
    """Yields a summary of the memory plan: the total, its parts, the free memory and choices."""
    yield f"memory plan for {memory_plan.title}: {memory_plan.total:,} bytes in total"
    parts = [f"{item.name} {item.nbytes / MIB:,.2f}" for item in memory_plan.items if item.nbytes]
    yield f"  in MiB: {', '.join(parts)}"
    free_memory = ""
    if memory_plan.budget is not None and memory_plan.reserve is not None:
        free_memory = (
            f"{memory_plan.reserve / MIB:,.2f} MiB of {memory_plan.budget.device} stay free; "
        )
    yield f"  {free_memory}--plan prints every line with its reason"
    if memory_plan.choices:
        chosen = ", ".join(choice.partition(":")[0] for choice in memory_plan.choices)
        yield f"  chosen: {chosen}"


@contextlib.contextmanager
def refused_plan(messages: Console, on_refusal: Callable[[], None]) -> Iterator[None]:
    """A context that prints a plan that does not fit, and raises a one-line error with advice.

    Args:
        on_refusal: Called before the plan is printed.

    Raises:
        InputError: If the plan does not fit, or an implementation refuses the model.
    """
    try:
        yield
    except PlanError as error:
        on_refusal()
        if error.plan is not None:
            print_plan(_wide(messages), error.plan)
        raise InputError(in_options(error)) from error
    except Refusal as error:
        raise InputError(" ".join(str(error).split())) from error


def _wide(console: Console) -> Console:
    """Widens a console that is not a terminal, so that the table fits."""
    if not console.is_terminal:
        console.width = 140
    return console
