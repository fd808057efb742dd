"""The life of an engine: what it is made of, how it starts, and how it ends."""

import contextlib
import dataclasses
from typing import Any, Self

import jax

from jaxattn.engine.compilation.sharded_step import group_of
from jaxattn.engine.distributed.driver import DriverRunner, run_worker_loop
from jaxattn.engine.distributed.process_group import ProcessGroup
from jaxattn.engine.distributed.transport import HostError
from jaxattn.engine.execution.model_runner import ModelRunner
from jaxattn.engine.execution.output_processor import Detokenize, OutputProcessor
from jaxattn.engine.execution.overlap_loop import OverlapLoop
from jaxattn.engine.requests.outputs import FinishReason
from jaxattn.engine.requests.request import Request
from jaxattn.engine.requests.stats import GenerationStats
from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.runtime.recompilation_guard import RecompilationGuard
from jaxattn.engine.runtime.thread_guard import ThreadGuard
from jaxattn.engine.scheduling.prefix_cache import PrefixCacheStats
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.startup.engine_build import EngineBuild, of_this_process
from jaxattn.engine.startup.placed_params import CheckedParams
from jaxattn.engine.startup.warmup import allocate_state, measured_plan, profile_memory
from jaxattn.engine.steps.engine_state import recurrent
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.memory.budget import MemoryPlan
from jaxattn.memory.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model


class EngineLifecycle:
    """What of an `Engine` is there between requests.

    Attributes:
        scheduler: rows, waiting requests and pools.
        seal: what was compiled or allocated after the warm-up.
    """

    scheduler: Scheduler
    seal: RecompilationGuard

    def _open(self, prepared: EngineBuild, strict: bool, detokenize: Detokenize | None) -> None:
        self._weights = prepared.params.place() if prepared.params else None
        # Without what was given: it would stay in memory beside what is packed.
        self._prepared = dataclasses.replace(prepared, params=None)
        self._runner: ModelRunner | None = None
        self._loop: OverlapLoop | None = None
        self._owner = ThreadGuard()
        self._next_id = 0
        self.seal = RecompilationGuard(strict=strict)
        self.scheduler = _scheduler(prepared)
        self._endings = OutputProcessor(self.scheduler, detokenize)
        PROCESS_STATE.opened(self)

    @property
    def model(self) -> Model:
        return self._prepared.model

    @property
    def limits(self) -> Limits:
        return self._prepared.limits

    @property
    def plan(self) -> MemoryPlan:
        return self._prepared.plan

    @property
    def stats(self) -> GenerationStats:
        return self._endings.stats

    @property
    def executables(self) -> dict[str, jax.stages.Compiled]:
        """Name -> compiled step; step_catalog.py says what each takes."""
        return self._prepared.steps.executables

    @property
    def prefixes(self) -> PrefixCacheStats:
        """Tokens of prompts that were looked up in the cache of prefixes, and found there."""
        return self.scheduler.prefix_counts

    @property
    def implementations(self) -> dict[str, str]:
        """Decode op -> what runs it: as it was named, or else as the compiled step shows."""
        named = self._prepared.compiler.implementation
        text = self.executables[str(entry_points(self.limits)[-1])].as_text() or ""
        calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
        return {
            op: named or ("mosaic_gpu" if any(kernel in call for call in calls) else "xla")
            for op, kernel in self.model.kernels.items()
        }

    @property
    def state(self) -> DecodeState:
        """The arena and the caches; allocated when they are first asked for."""
        with self._alone("state", nested=True):
            self._start()
            assert self._runner is not None
            return self._runner.state

    # --- beginning and end

    def start(self, params: Any = None) -> None:
        """Warms up, measures the device's memory, allocates the state, and seals the engine.

        Does nothing if the state is there; `generate`, `step` and `state` call it. Call it after
        loading has ended, so that the memory which loading took for a while is free again.

        Args:
            params: the parameters, for an engine that was made without.

        Raises:
            TypeError: `params` are shapes.
            ValueError: the engine has no parameters, or they are not the model's.
            PlanError: the device has less memory than was planned, or what was allocated is not
                what was planned.
            RuntimeError: the engine is closed, or has its state and is given parameters.
            EngineBusyError: another thread uses the engine.
        """
        with self._alone("start", nested=True):
            if params is not None:
                if self._runner is not None:
                    raise RuntimeError("start: this engine runs already; make another one")
                devices = self._prepared.devices
                self._weights = CheckedParams.of(self.model, params, devices).place()
            self._start()

    def _start(self) -> None:
        if self._weights is None:
            raise ValueError("this engine has no parameters: give them to start(params)")
        if self._runner is not None and not self._runner.lost:
            return
        self._end_rows(FinishReason.INTERRUPTED)  # their states are gone
        if isinstance(
            self._runner, DriverRunner
        ):  # and so are those of the others, which wait for it
            lost = "a step of process 0 failed, and its state is lost; start all processes again"
            self._runner.crew.end_all(lost)
            raise HostError(lost)
        ran = self._runner is not None
        if self._runner is not None:
            self._runner.delete()
        self._runner = self._loop = None
        with jax.default_device(of_this_process(self._prepared.devices)[0]):
            PROCESS_STATE.closed(self)  # its own temp is a line of its plan
            try:
                self._replan(profile_memory(self._prepared, self._weights, ran=ran))
            finally:
                PROCESS_STATE.opened(self)
            state, rows = allocate_state(self._prepared, self._weights)
            self._prepared = measured_plan(self._prepared)
        weights, executables = self._weights, self._prepared.steps.executables
        group = group_of(self.model, self._prepared.devices)
        self._runner = ModelRunner(self.limits, executables, weights, state, rows, self.seal, group)
        self._loop = OverlapLoop(self.scheduler, self._runner, self._endings)
        self.seal.hold((state, rows))

    def lead(self, crew: ProcessGroup) -> None:
        """Starts the engine, of which other processes run a part, and leads them from here on.

        Args:
            crew: `ProcessGroup.leading`'s; it ends with `close`.
        """
        with self._alone("lead", nested=True):
            self._start()
            assert self._runner is not None
            self._runner = DriverRunner.of(self._runner, crew)
            self._loop = OverlapLoop(self.scheduler, self._runner, self._endings)

    def follow(self, crew: ProcessGroup) -> None:
        """Starts the engine and sends the leader's steps, until the leader closes its engine.

        Args:
            crew: `ProcessGroup.following`'s.

        Raises:
            HostError: the leader is gone.
        """
        with self._alone("follow"):
            self._start()
            assert self._runner is not None
            with self.seal.watch():
                run_worker_loop(self._runner, crew)

    def _replan(self, prepared: EngineBuild) -> None:
        """Goes on with another plan; with fewer pages, requests that wait may be refused."""
        before, self._prepared = self._prepared, prepared
        if prepared.limits != before.limits:
            waiting = self.scheduler.waiting
            self.scheduler = _scheduler(prepared)
            self._endings.scheduler = self.scheduler
            for queued in waiting:
                self._submit(queued.request)

    def close(self) -> None:
        """Gives the state's memory back. The parameters stay with whoever else holds them.

        Requests that are not done are dropped.

        Raises:
            EngineBusyError: another thread uses the engine, or a callback called it.
        """
        if self._owner.closed:
            return
        with self._alone("close"):
            self._owner.closed = True
            PROCESS_STATE.closed(self)
            self._clear()
            if self._runner is not None:
                self._runner.delete()
            self._runner = self._loop = self._weights = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _alone(self, what: str, *, nested: bool = False) -> contextlib.AbstractContextManager[None]:
        """Keeps other threads out; `nested` calls may come from a callback of this thread."""
        return self._owner.alone(what, nested=nested)

    def _submit(self, request: Request) -> None:
        """Queues a request, or refuses it."""
        reason = self.scheduler.refusal(request)
        if reason is None and request.stop_strings and self._endings.detokenize is None:
            reason = "it has stop strings, and the engine was made without `detokenize`"
        if reason:
            self._endings.finish(request, FinishReason.REFUSED, reason)
        else:
            self.scheduler.submit(request)

    def _end_rows(self, reason: FinishReason, detail: str | None = None) -> None:
        """Ends every row with what it generated, and forgets what is in flight."""
        self._endings.end_rows(reason, detail)
        if self._loop is not None:
            self._loop.drop()

    def _clear(self) -> None:
        """Drops all that waits, runs and is in flight."""
        self.scheduler.clear()
        self._endings.clear()
        if self._loop is not None:
            self._loop.drop()


def _scheduler(prepared: EngineBuild) -> Scheduler:
    model = prepared.model
    return Scheduler(prepared.limits, model.vocab_size, recurrent=recurrent(model))
