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
        earlier: CompiledSteps | None = None,
    ) -> CompiledSteps:
        """Compiles the executables of these limits, or of some of their steps.

        Args:
            steps: The steps to compile; None compiles all.
            earlier: Executables for another number of pages. Those that do not depend on the pages
                are reused.
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
            wanted=steps,
            earlier=earlier,
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
        known: Mapping[str, ExecutableMemory],
        memory: DeviceMemory | None,
        own: int,
        *,
        wanted: Limits,
    ) -> MemoryPlan:
        """Returns the plan of these limits.

        Args:
            own: The bytes in the device's pool that the plan counts in other items.
            wanted: The limits as the user gave them.

        Raises:
            PlanError: The plan does not fit, or the cache holds no row at full length.
        """
        driver = 0 if wanted.utilization is None else self.driver
        beside = others(memory, known, own, self.collectives, driver)
        made = plan_engine(self.model, limits, memory, self.params, known, **beside)
        made = dataclasses.replace(made, choices=self.choices)

        def helps() -> tuple[str, ...]:
            if memory is None:
                return ()
            bounds = known or from_shapes(self.model, limits, self.params, self.implementation)
            return advice(self.model, limits, memory, self.params, bounds, **beside)

        if wanted.utilization is None:
            made.check(helps)
        else:
            check_row(made, limits, helps, wanted=wanted.num_pages)
        return made

    def measured(
        self, plan: MemoryPlan, known: Mapping[str, ExecutableMemory], memory: DeviceMemory | None
    ) -> MemoryPlan:
        """Returns the plan after every step has run, with the measured bytes of the driver."""
        taken = others(memory, known, 0, self.collectives)["outside"]
        items = (
            dataclasses.replace(item, nbytes=taken) if item.name == "driver" else item
            for item in plan.items
        )
        return dataclasses.replace(plan, items=tuple(items))

    def fill(
        self,
        wanted: Limits,
        known: Mapping[str, ExecutableMemory],
        memory: DeviceMemory,
        own: int,
    ) -> Limits:
        """Returns the limits with as many pages as the device has room for."""
        beside = others(memory, known, own, self.collectives, self.driver)
        return fill(self.model, wanted, memory, self.params, known, **beside)

    def fit(
        self,
        wanted: Limits,
        known: Mapping[str, ExecutableMemory],
        memory: DeviceMemory,
        own: int,
        earlier: CompiledSteps | None = None,
    ) -> tuple[Limits, CompiledSteps, dict[str, ExecutableMemory]]:
        """Returns limits with the pages that fit, their executables, and the memory of these.

        Up to a fraction `SPARE` of the pages that fit may stay unused.

        Args:
            known: The memory of the same steps with another number of pages, or bounds of the
                largest steps.
            earlier: Executables for another number of pages.

        Raises:
            PlanError: Too little memory is left, or XLA's temp keeps growing with the pages.
        """
        for _ in range(3):
            limits, known, earlier = self._measured(wanted, known, memory, own, earlier)
            self.plan(limits, known, memory, own, wanted=wanted)
            steps = self.compile(limits, earlier=earlier)
            found = self.known(limits, steps)
            if _peak_bytes(found) <= _peak_bytes(known):
                return limits, steps, found
            known, earlier = found, steps
        raise PlanError(
            "XLA's temp grows with the pages, so `utilization` cannot determine their number; "
            "give num_pages instead"
        )

    def _measured(
        self,
        wanted: Limits,
        known: Mapping[str, ExecutableMemory],
        memory: DeviceMemory,
        own: int,
        steps: CompiledSteps | None,
    ) -> tuple[Limits, Mapping[str, ExecutableMemory], CompiledSteps | None]:
        """Returns limits with pages, the memory of their steps, and the executables so far.

        A bound is larger than what XLA takes. If the difference may cost more than `SPARE` of the
        pages, the steps with the largest bounds are compiled first, until the largest temp is XLA's
        own figure.
        """
        without_temp = {name: dataclasses.replace(each, temp=0) for name, each in known.items()}
        whole, known = self.fill(wanted, without_temp, memory, own), dict(known)
        least = min(whole.pages_per_row, whole.pages)
        limits: Limits | None = None
        while True:
            filled = self.fill(wanted, known, memory, own)
            if limits is None or not limits.pages <= filled.pages <= limits.pages * (1 + SPARE):
                # At least one row: XLA may need less than bounds that leave no room for it.
                limits = dataclasses.replace(filled, num_pages=max(filled.pages, least))
            name = max(known, key=lambda each: known[each].temp)
            fits = filled.pages >= least
            if known[name].basis == "compiled":
                return limits if fits else filled, known, steps
            if fits and whole.pages <= limits.pages * (1 + SPARE):
                return limits, known, steps
            largest = next(each for each in all_steps(limits) if str(each) == name)
            steps = self.compile(limits, [largest], steps)
            known |= self.known(limits, steps)


def _peak_bytes(known: Mapping[str, ExecutableMemory]) -> int:
    """Returns the bytes that a plan counts: the largest temp plus the largest in- and outputs."""
    return max(each.temp for each in known.values()) + max(each.in_out for each in known.values())


def others(
    memory: DeviceMemory | None,
    known: Mapping[str, ExecutableMemory],
    own: int,
    collectives: int = 0,
    driver: int = 0,
) -> dict[str, Any]:
    """Returns the bytes of others that a plan must leave: the driver, other arrays and engines.

    Args:
        known: The executables whose code is part of the driver's memory.
        own: The bytes in the device's pool that the plan counts in other items.
        collectives: The bytes of the driver's memory that have an item of their own.
        driver: The bytes that the driver has not taken yet.
    """
    if memory is None or memory.outside is None:
        return {"outside": 0, "others": 0}
    code = sum(each.code for each in known.values())
    stepping = sum(engine.plan["xla temp"] for engine in PROCESS_STATE.engines)
    outside = max(memory.outside - code, 0)
    collectives = min(collectives, outside)  # the measurement may include other processes
    return {
        "outside": outside - collectives + driver,
        "collectives": collectives,
        "others": max(memory.in_use - own, 0) + stepping,
    }
