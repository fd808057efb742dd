"""Limits that fit a device: executables are compiled for some, planned, and the cache filled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compilation.compiler import CompiledSteps, OnCompile, get_or_compile_steps
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.startup.executable_memory import ExecutableMemory, from_compiled, from_shapes
from jaxattn.engine.startup.memory_plan import advice, check_row, fill, plan_engine
from jaxattn.engine.steps.step_catalog import all_steps
from jaxattn.memory.budget import MemoryPlan, PlanError, nbytes
from jaxattn.memory.device_memory import DeviceMemory
from jaxattn.memory.limits import Limits
from jaxattn.models.interface import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityPlanner:
    """What is compiled, for limits that are still open.

    Attributes:
        implementation: of the decode kernels; None is the best for the device.
        on_compile: called with each executable's name and None before it is compiled, and with the
            seconds that it took after that.
        on_steps: called before executables are compiled, with how many.
        workers: executables that are compiled at a time.
        collectives: bytes of each device that NCCL and XLA's collective kernels have taken.
        choices: why each limit that was chosen is what it is.
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

    def compile(self, limits: Limits) -> CompiledSteps:
        if self.on_steps:
            self.on_steps(len(all_steps(limits)))
        return get_or_compile_steps(
            self.model,
            limits,
            self.params,
            self.devices,
            implementation=self.implementation,
            on_compile=self.on_compile,
            workers=self.workers,
        )

    def known(self, limits: Limits, steps: CompiledSteps) -> dict[str, ExecutableMemory]:
        """What XLA says of each executable's memory."""
        return {
            str(step): from_compiled(
                steps.executables[str(step)], nbytes(step.given(self.model, limits))
            )
            for step in all_steps(limits)
        }

    def plan(
        self,
        limits: Limits,
        known: dict[str, ExecutableMemory],
        memory: DeviceMemory | None,
        own: int,
        *,
        wanted: Limits,
    ) -> MemoryPlan:
        """The plan of these limits.

        Args:
            own: bytes in the device's pool that the plan counts in other lines.
            wanted: the limits as they were asked for.

        Raises:
            PlanError: it does not fit, or the cache holds no row at full length.
        """
        beside = others(memory, known, own, self.collectives)
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

    def fill(
        self,
        wanted: Limits,
        known: dict[str, ExecutableMemory],
        memory: DeviceMemory,
        own: int,
    ) -> Limits:
        """The limits with the pages that the device has room for."""
        beside = others(memory, known, own, self.collectives)
        return fill(self.model, wanted, memory, self.params, known, **beside)

    def fit(
        self,
        wanted: Limits,
        known: dict[str, ExecutableMemory],
        memory: DeviceMemory,
        own: int,
    ) -> tuple[Limits, CompiledSteps, dict[str, ExecutableMemory]]:
        """Limits with the most pages that fit, and their executables.

        Args:
            known: of the same steps beside another number of pages.

        Raises:
            PlanError: too little is left, or XLA's temp grows with the pages again and again.
        """
        for _ in range(3):
            limits = self.fill(wanted, known, memory, own)
            self.plan(limits, known, memory, own, wanted=wanted)
            steps = self.compile(limits)
            found = self.known(limits, steps)
            if all(found[name].temp <= known[name].temp for name in known):
                return limits, steps, found
            known = found
        raise PlanError(
            "XLA's temp grows with the pages, so `utilization` finds no number of them; give "
            "num_pages instead"
        )


def others(
    memory: DeviceMemory | None, known: dict[str, ExecutableMemory], own: int, collectives: int = 0
) -> dict[str, Any]:
    """Bytes that a plan has to leave alone: the driver's, and those of other arrays and engines.

    Args:
        known: executables whose code lies among what the driver holds.
        own: bytes in the device's pool that the plan counts in other lines.
        collectives: bytes among the driver's that have a line of their own.
    """
    if memory is None or memory.outside is None:
        return {"outside": 0, "others": 0}
    code = sum(each.code for each in known.values())
    stepping = sum(engine.plan["xla temp"] for engine in PROCESS_STATE.engines)
    outside = max(memory.outside - code, 0)
    collectives = min(collectives, outside)  # other processes may have begun while they ran
    return {
        "outside": outside - collectives,
        "collectives": collectives,
        "others": max(memory.in_use - own, 0) + stepping,
    }
