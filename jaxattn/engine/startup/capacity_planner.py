"""Capacity planning: compiles the steps of some limits, plans their memory, and sizes the cache."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.compiler import CompiledSteps, OnCompile, get_or_compile_steps
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.executable_memory import ExecutableMemory, from_compiled, from_shapes
from jaxattn.engine.startup.memory_plan import advice, check_row, fill, plan_engine
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.engine.steps.step_interface import EngineStep
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.plan import MemoryPlan, PlanError, nbytes
from jaxattn.models.interface import Model

# The fraction of the pages that may stay unused if that avoids compiling steps twice.
SPARE = 0.025


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityPlanner:
    """Compiles and plans limits whose number of pages may still be open.

    Attributes:
        implementation: The implementation of the decode kernels; None is the best for the device.
        on_compile: A function that is called before each compilation with the executable's name and
            None, and after it with the seconds that it took.
        on_steps: A function that is called before compilation with the number of executables.
        workers: The number of executables that are compiled at a time.
        collectives: The bytes of each device that NCCL and XLA's collective kernels have taken.
        choices: The reason of each limit that `choose_limits` chose.
        driver: The bytes that the driver and its libraries take, at most, when steps first run.
    """

    model: Model
    params: Any
    devices: tuple[jax.Device, ...]
    implementation: Implementation | None = None
    on_compile: OnCompile | None = None
    on_steps: Callable[[int], None] | None = None
    workers: int = 1
    collectives: int = 0
    choices: tuple[str, ...] = ()
    driver: int = 0

    def compile(
        self,
        limits: Limits,
        steps: Sequence[EngineStep] | None = None,
        reusable_steps: CompiledSteps | None = None,
    ) -> CompiledSteps:
        """Compiles the executables of these limits, or of some of their steps.

        Args:
            steps: The steps to compile; None compiles all.
            reusable_steps: Executables for another number of pages. Those that do not depend on the
                pages are reused.
        """
        if self.on_steps:
            self.on_steps(len(steps or all_steps(limits)))
        return get_or_compile_steps(
            self.model,
            limits,
            self.params,
            self.devices,
            implementation=self.implementation,
            on_compile=self.on_compile,
            workers=self.workers,
            requested_steps=steps,
            reusable_steps=reusable_steps,
        )

    def known(self, limits: Limits, steps: CompiledSteps) -> dict[str, ExecutableMemory]:
        """Returns XLA's figures of each executable's memory."""
        return {
            str(step): from_compiled(
                steps.executables[str(step)], nbytes(step.given(self.model, limits))
            )
            for step in all_steps(limits)
            if str(step) in steps.executables
        }

    def plan(
        self,
        limits: Limits,
        executables: Mapping[str, ExecutableMemory],
        memory: DeviceMemory | None,
        counted_bytes: int,
        *,
        requested: Limits,
    ) -> MemoryPlan:
        """Returns the plan of these limits.

        Args:
            counted_bytes: The bytes in the device's pool that the plan counts in other items.
            requested: The limits as the user gave them.

        Raises:
            PlanError: The plan does not fit, or the cache holds no row at full length.
        """
        driver = 0 if requested.utilization is None else self.driver
        beside = others(memory, executables, counted_bytes, self.collectives, driver)
        memory_plan = plan_engine(self.model, limits, memory, self.params, executables, **beside)
        memory_plan = dataclasses.replace(memory_plan, choices=self.choices)

        def helps() -> tuple[str, ...]:
            if memory is None:
                return ()
            bounds = executables or from_shapes(
                self.model, limits, self.params, self.implementation
            )
            return advice(self.model, limits, memory, self.params, bounds, **beside)

        if requested.utilization is None:
            memory_plan.check(helps)
        else:
            check_row(memory_plan, limits, helps, requested_pages=requested.num_pages)
        return memory_plan

    def measured(
        self,
        plan: MemoryPlan,
        executables: Mapping[str, ExecutableMemory],
        memory: DeviceMemory | None,
    ) -> MemoryPlan:
        """Returns the plan after every step has run, with the measured bytes of the driver."""
        taken = others(memory, executables, 0, self.collectives)["outside"]
        items = (
            dataclasses.replace(item, nbytes=taken) if item.name == "driver" else item
            for item in plan.items
        )
        return dataclasses.replace(plan, items=tuple(items))

    def fill(
        self,
        requested: Limits,
        executables: Mapping[str, ExecutableMemory],
        memory: DeviceMemory,
        counted_bytes: int,
    ) -> Limits:
        """Returns the limits with as many pages as the device has room for."""
        beside = others(memory, executables, counted_bytes, self.collectives, self.driver)
        return fill(self.model, requested, memory, self.params, executables, **beside)

    def fit(
        self,
        requested: Limits,
        executables: Mapping[str, ExecutableMemory],
        memory: DeviceMemory,
        counted_bytes: int,
        reusable_steps: CompiledSteps | None = None,
    ) -> tuple[Limits, CompiledSteps, dict[str, ExecutableMemory]]:
        """Returns limits with the pages that fit, their executables, and the memory of these.

        Up to a fraction `SPARE` of the pages that fit may stay unused.

        Args:
            executables: The memory of the same steps with another number of pages, or bounds of the
                largest steps.
            reusable_steps: Executables for another number of pages.

        Raises:
            PlanError: Too little memory is left, or XLA's temp keeps growing with the pages.
        """
        for _ in range(3):
            limits, executables, reusable_steps = self._measured(
                requested, executables, memory, counted_bytes, reusable_steps
            )
            self.plan(limits, executables, memory, counted_bytes, requested=requested)
            steps = self.compile(limits, reusable_steps=reusable_steps)
            found = self.known(limits, steps)
            if _peak_bytes(found) <= _peak_bytes(executables):
                return limits, steps, found
            executables, reusable_steps = found, steps
        raise PlanError(
            "XLA's temp grows with the pages, so `utilization` cannot determine their number; "
            "give num_pages instead"
        )

    def _measured(
        self,
        requested: Limits,
        executables: Mapping[str, ExecutableMemory],
        memory: DeviceMemory,
        counted_bytes: int,
        steps: CompiledSteps | None,
    ) -> tuple[Limits, Mapping[str, ExecutableMemory], CompiledSteps | None]:
        """Returns limits with pages, the memory of their steps, and the executables so far.

        A bound is larger than what XLA takes. If the difference may cost more than `SPARE` of the
        pages, the steps with the largest bounds are compiled first, until the largest temp is XLA's
        own figure.
        """
        without_temp = {
            name: dataclasses.replace(each, temp=0) for name, each in executables.items()
        }
        upper_bound = self.fill(requested, without_temp, memory, counted_bytes)
        executables = dict(executables)
        least = min(upper_bound.pages_per_row, upper_bound.pages)
        limits: Limits | None = None
        while True:
            filled = self.fill(requested, executables, memory, counted_bytes)
            if limits is None or not limits.pages <= filled.pages <= limits.pages * (1 + SPARE):
                # At least one row: XLA may need less than bounds that leave no room for it.
                limits = dataclasses.replace(filled, num_pages=max(filled.pages, least))
            name = max(executables, key=lambda each: executables[each].temp)
            fits = filled.pages >= least
            if executables[name].basis == "compiled":
                return limits if fits else filled, executables, steps
            if fits and upper_bound.pages <= limits.pages * (1 + SPARE):
                return limits, executables, steps
            largest = next(each for each in all_steps(limits) if str(each) == name)
            steps = self.compile(limits, [largest], steps)
            executables |= self.known(limits, steps)


def _peak_bytes(executables: Mapping[str, ExecutableMemory]) -> int:
    """Returns the bytes that a plan counts: the largest temp plus the largest in- and outputs."""
    return max(each.temp for each in executables.values()) + max(
        each.in_out for each in executables.values()
    )


def others(
    memory: DeviceMemory | None,
    executables: Mapping[str, ExecutableMemory],
    counted_bytes: int,
    collectives: int = 0,
    driver: int = 0,
) -> dict[str, Any]:
    """Returns the bytes of others that a plan must leave: the driver, other arrays and engines.

    Args:
        executables: The executables whose code is part of the driver's memory.
        counted_bytes: The bytes in the device's pool that the plan counts in other items.
        collectives: The bytes of the driver's memory that have an item of their own.
        driver: The bytes that the driver has not taken yet.
    """
    if memory is None or memory.outside is None:
        return {"outside": 0, "others": 0}
    code = sum(each.code for each in executables.values())
    stepping = sum(engine.plan["xla temp"] for engine in PROCESS_STATE.engines)
    outside = max(memory.outside - code, 0)
    collectives = min(collectives, outside)  # the measurement may include other processes
    return {
        "outside": outside - collectives + driver,
        "collectives": collectives,
        "others": max(memory.in_use - counted_bytes, 0) + stepping,
    }
