"""The life cycle of an engine: creation, start, weight updates, and close."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Self, get_args

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
from jaxattn.engine.startup.memory_profiling import check_room, measured_plan, profile_memory
from jaxattn.engine.startup.placed_params import CheckedParams
from jaxattn.engine.startup.state_allocation import Allocate, allocate_state, allocator
from jaxattn.engine.startup.weight_buffers import WeightBuffers
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import recurrent
from jaxattn.engine.steps.step_catalog import entry_points
from jaxattn.limits import Limits
from jaxattn.memory.plan import MemoryPlan, nbytes_each
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model

InFlight = Literal["finish", "abort", "recompute"]


class EngineLifecycle:
    """The part of an `Engine` that is independent of requests.

    Attributes:
        scheduler: The rows, the waiting requests and the pools.
        seal: The guard that counts compilations and new buffers after the warm-up.
    """

    scheduler: Scheduler
    seal: RecompilationGuard

    def _open(self, build: EngineBuild, strict: bool, detokenize: Detokenize | None) -> None:
        self._weights = WeightBuffers(build.params) if build.params else None
        # The given parameters would stay in memory next to the packed ones.
        self._build = dataclasses.replace(build, params=None)
        self._runner: ModelRunner | None = None
        self._loop: OverlapLoop | None = None
        self._allocate: Allocate | None = None
        self._released = False
        self._owner = ThreadGuard()
        self._next_id = 0
        self.seal = RecompilationGuard(strict=strict)
        self.scheduler = _scheduler(build)
        self._endings = OutputProcessor(self.scheduler, detokenize)
        PROCESS_STATE.opened(self)

    @property
    def model(self) -> Model:
        return self._build.model

    @property
    def limits(self) -> Limits:
        return self._build.limits

    @property
    def plan(self) -> MemoryPlan:
        return self._build.plan

    @property
    def stats(self) -> GenerationStats:
        return self._endings.stats

    @property
    def executables(self) -> dict[str, jax.stages.Compiled]:
        """The compiled steps by name; step_catalog.py lists the arguments of each."""
        return self._build.steps.executables

    @property
    def prefixes(self) -> PrefixCacheStats:
        """The numbers of prompt tokens that the prefix cache was asked for, and that it held."""
        return self.scheduler.prefix_counts

    @property
    def implementations(self) -> dict[str, str]:
        """Each decode op with the implementation that runs it: the one that was requested, or
        else the one that the compiled step contains."""
        named = self._build.compiler.implementation
        text = self.executables[str(entry_points(self.limits)[-1])].as_text() or ""
        calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
        return {
            op: named or ("mosaic_gpu" if any(kernel in call for call in calls) else "xla")
            for op, kernel in self.model.kernels.items()
        }

    @property
    def state(self) -> DecodeState:
        """The arena and the caches, which the first access allocates."""
        with self._exclusive("state", nested=True):
            self._start()
            assert self._runner is not None
            return self._runner.state

    # --- beginning and end

    def start(self, params: Any = None) -> None:
        """Warms up, measures the device's memory, allocates the state, and seals the engine.

        `generate`, `step` and `state` call `start`, which does nothing if the state exists. Call it
        after loading has ended, so that the temporary memory of loading is free again.

        Args:
            params: The parameters, for an engine that was created without.

        Raises:
            TypeError: `params` are shapes.
            ValueError: The engine has no parameters, or they are not the model's.
            PlanError: The device has less memory than planned, or the allocated arrays differ from
                the plan.
            RuntimeError: The engine is closed, or it has already started and `params` is given.
            EngineBusyError: Another thread uses the engine.
        """
        with self._exclusive("start", nested=True):
            if params is not None:
                if self._runner is not None:
                    raise RuntimeError("start: this engine is already running; create another one")
                devices = self._build.devices
                self._weights = WeightBuffers(CheckedParams.of(self.model, params, devices))
            self._start()

    def _start(self) -> None:
        if self._weights is None:
            raise ValueError("this engine has no parameters: pass them to start(params)")
        if self._released:
            raise RuntimeError("the engine's caches are released; call resume() before running it")
        runs = self._runner is not None and not self._runner.lost
        if runs and not self._weights.watched:
            return
        weights = self._weights.leaves  # raises if an update failed midway, or if leaves are gone
        if runs:
            return
        self._end_rows(FinishReason.INTERRUPTED)  # their states are lost
        # The other processes wait for this one, and have lost their states too.
        if isinstance(self._runner, DriverRunner):
            lost = "a step of process 0 failed, and its state is lost; start all processes again"
            self._runner.process_group.end_all(lost)
            raise HostError(lost)
        ran = self._runner is not None
        if self._runner is not None:
            self._runner.delete()
        self._runner = self._loop = None
        with jax.default_device(of_this_process(self._build.devices)[0]):
            PROCESS_STATE.closed(self)  # the plan already counts this engine's own temp
            try:
                self._replan(profile_memory(self._build, weights, ran=ran))
            finally:
                PROCESS_STATE.opened(self)
            devices = self._build.devices
            # Not on virtual CPU devices: there it would take longer than the work they are for.
            if len(devices) == 1 or (self._one_process and devices[0].platform == "gpu"):
                self._weights.compile_own()
            self._allocate = allocator(self._build)
            state, rows = allocate_state(self._build, weights, self._allocate)
            self._build = measured_plan(self._build)
        self._run_with(state, rows)

    def _run_with(self, state: DecodeState, rows: DeviceBatch) -> None:
        """Runs the steps on these buffers from now on, and seals the engine."""
        assert self._weights is not None
        weights, executables = self._weights.leaves, self._build.steps.executables
        group = group_of(self.model, self._build.devices)
        self._runner = ModelRunner(self.limits, executables, weights, state, rows, self.seal, group)
        self._loop = OverlapLoop(self.scheduler, self._runner, self._endings)
        self.seal.hold((state, rows))

    @property
    def _one_process(self) -> bool:
        return len({device.process_index for device in self._build.devices}) == 1

    # --- weight updates, and sharing a device with a trainer

    @property
    def weights_version(self) -> int:
        """The version of the current weights: the number of updates so far."""
        return self._endings.weights_version

    def expect_updates(self, params: Any) -> None:
        """Compiles what `update` needs for parameters with the shardings of these.

        On GPUs, an engine compiles at its start what it needs for parameters with the shardings of
        those from which it was created. Other shardings, such as a trainer's FSDP, need further
        programs: `update` compiles them at the first such update, or this method compiles them
        before the engine is sealed. On several devices of a CPU a start compiles none of these
        programs.

        Args:
            params: Arrays, or shapes with shardings.

        Raises:
            ValueError: `params` are not the model's, the engine has no parameters yet, or its
                devices belong to several processes.
        """
        with self._exclusive("expect_updates"):
            weights = self._updated("expect_updates")
            weights.compile(weights.check(params, shapes=True))

    def update(self, params: Any, *, in_flight: InFlight = "finish", share: bool = False) -> int:
        """Replaces the engine's weights; see docs/rollouts.md.

            version = engine.update(trainer.params)

        Each parameter is copied on the device, into the engine's own buffer. The caller keeps
        `params`, and may donate or delete them as soon as `update` returns. Until the first update
        the engine shares parameters with its creator; that update gives it its own buffers. An
        array that the engine already shares is not copied.

        The update drops what the engine cached with the old weights: prefixes, states, and the
        measurements of speculation. The new weights serve requests that have not begun.

        Args:
            params: The model's parameters in the form that `Engine` or `load` takes: a tree, an nnx
                state, or an nnx module such as `model.bind(params)`. Arrays may have other
                shardings than the engine's, over its devices or over others of this process.
            in_flight: The treatment of requests that have begun. "finish" first serves them to
                their end, and the next `step` returns their events. "abort" ends them. "recompute"
                reads their prompts and tokens again with the new weights, then continues. Between
                `release` and `resume`, or without the old weights, "finish" acts like "recompute".
            share: Whether to use arrays of `params` with the engine's sharding directly, without a
                copy. They must not be donated or deleted before the next update.

        Returns:
            The version of the new weights, which events and completions carry.

        Raises:
            ValueError: `params` are not the model's; the message names all differences, and nothing
                has changed. Or the engine spans several processes, or is strict and not compiled
                for parameters with these shardings.
            EngineBusyError: Another thread uses the engine, or a callback called it.
        """
        if in_flight not in get_args(InFlight):
            names = ", ".join(map(repr, get_args(InFlight)))
            raise ValueError(f"in_flight must be one of {names}; got {in_flight!r}")
        with self._exclusive("update"):
            weights = self._updated("update")
            sealed = self._runner is not None or self._released
            arriving = weights.check(params, strict=sealed and self.seal.strict)
            watched = self.seal.watch(buffers=False) if sealed else contextlib.nullcontext()
            with watched, self.seal.allowed():
                weights.compile(arriving)
            self._settle(in_flight)
            if self._runner is not None:
                self._runner.weights = ()
            watched = self.seal.watch(buffers=False) if sealed else contextlib.nullcontext()
            with watched, self.seal.allowed():
                weights.update(arriving, share=share)
            self._endings.weights_version = weights.version
            self.stats.drafting.clear()
            if self._runner is not None:
                self._runner.weights = weights.leaves
                self._runner.forget()
                self._loop = OverlapLoop(self.scheduler, self._runner, self._endings)
            return weights.version

    def release(self, *, weights: bool = False) -> int:
        """Frees the device memory of the caches and the arena, until `resume`.

        Requests in flight wait, and after `resume` the engine reads their prompts and tokens again.
        Cached prefixes are dropped. An engine that has not started has nothing to free.

        Args:
            weights: Whether to free the engine's own copies of weights too. Then `update` must
                supply new ones before `resume`.

        Returns:
            The number of bytes freed on each device.

        Raises:
            ValueError: The engine spans several processes, or has no parameters yet.
            EngineBusyError: Another thread uses the engine, or a callback called it.
        """
        with self._exclusive("release"):
            buffers, freed = self._updated("release"), 0
            if self._runner is not None:
                with self._ending_rows():
                    self._loop_of().finish()
                self.scheduler.preempt_all()
                freed = nbytes_each((self._runner.state, self._runner.rows))
                self._runner.delete()
                self._runner = self._loop = None
                self._released = True
                PROCESS_STATE.closed(self)
            return freed + (buffers.delete() if weights else 0)

    def resume(self) -> None:
        """Allocates the memory that `release` freed again, by the same plan.

        Raises:
            PlanError: Others hold too much of the device's memory; the engine stays released.
            RuntimeError: `release` also freed the weights, and no `update` has replaced them.
            EngineBusyError: Another thread uses the engine, or a callback called it.
        """
        with self._exclusive("resume"):
            if not self._released:
                return
            assert self._weights is not None and self._allocate is not None
            check_room(self._build, self._weights.leaves)
            state, rows = self._allocate()
            self._released = False
            PROCESS_STATE.opened(self)
            self._run_with(state, rows)

    def _updated(self, method_name: str) -> WeightBuffers:
        """Returns the weights, or raises ValueError if they cannot be changed."""
        if self._weights is None:
            raise ValueError(
                f"{method_name}: this engine has no parameters yet: pass them to start(params)"
            )
        if not self._one_process:
            raise ValueError(
                f"{method_name}: not supported for an engine whose devices belong to several "
                "processes"
            )
        return self._weights

    def _settle(self, in_flight: InFlight) -> None:
        """Clears steps in flight, rows and caches that depend on the outgoing weights."""
        assert self._weights is not None
        if self._loop is not None:
            finishes = in_flight == "finish" and not self._weights.gone
            held = self.scheduler.remove_unstarted() if finishes else []
            try:
                while finishes and self.scheduler.busy:
                    self._start()  # after a failed step, which loses the state
                    with self._ending_rows():
                        self._send_round()
                with self._ending_rows():
                    self._loop.finish()
            finally:
                self.scheduler.requeue_unstarted(held)
        scheduler = self.scheduler
        if in_flight == "abort":
            for row in list(scheduler.rows.values()):
                self._endings.end(row, FinishReason.ABORTED)
            for queued in [each for each in scheduler.waiting if each.admission_time is not None]:
                scheduler.waiting.remove(queued)
                self._endings.finish(queued.request, FinishReason.ABORTED, source=queued)
        scheduler.preempt_all()
        for queued in scheduler.waiting:
            queued.continue_with_new_weights()

    def _loop_of(self) -> OverlapLoop:
        assert self._loop is not None
        return self._loop

    def _send_round(self) -> None:
        """Sends a round. An error of the device marks the runner's state as lost."""
        assert self._loop is not None and self._runner is not None
        try:
            self._loop.round()
        except jax.errors.JaxRuntimeError:
            self._runner.failed = True
            raise

    @contextlib.contextmanager
    def _ending_rows(self) -> Iterator[None]:
        """Ends all rows if an error occurs, because the device may have advanced their states."""
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = FinishReason.INTERRUPTED if interrupted else FinishReason.FAILED
            self._end_rows(reason, str(error) or None)
            raise

    def lead(self, crew: ProcessGroup) -> None:
        """Starts the engine as the leader of the other processes, each of which runs its part.

        Args:
            crew: The group from `ProcessGroup.leading`; `close` ends it.
        """
        with self._exclusive("lead", nested=True):
            self._start()
            assert self._runner is not None
            self._runner = DriverRunner.of(self._runner, crew)
            self._loop = OverlapLoop(self.scheduler, self._runner, self._endings)

    def follow(self, crew: ProcessGroup) -> None:
        """Starts the engine and sends the leader's steps, until the leader closes its engine.

        Args:
            crew: The group from `ProcessGroup.following`.

        Raises:
            HostError: The leader is gone.
        """
        with self._exclusive("follow"):
            self._start()
            assert self._runner is not None
            with self.seal.watch():
                run_worker_loop(self._runner, crew)

    def _replan(self, build: EngineBuild) -> None:
        """Adopts another plan. If it has fewer pages, waiting requests may be refused."""
        before, self._build = self._build, build
        if build.limits != before.limits:
            waiting = self.scheduler.waiting
            self.scheduler = _scheduler(build)
            self._endings.scheduler = self.scheduler
            for queued in waiting:
                self._submit(queued.request)

    def close(self) -> None:
        """Frees the memory of the state, and drops the engine's references to the parameters.

        Unfinished requests are dropped.

        Raises:
            EngineBusyError: Another thread uses the engine, or a callback called it.
        """
        if self._owner.closed:
            return
        with self._exclusive("close"):
            self._owner.closed = True
            PROCESS_STATE.closed(self)
            self._clear()
            if self._runner is not None:
                self._runner.delete()
            self._runner = self._loop = self._weights = self._allocate = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error inside ends all processes of an engine with its message, which needs their links.
        # `close` would tell the others that all is done.
        if kind is None or not isinstance(self._runner, DriverRunner):
            self.close()

    def _exclusive(
        self, method_name: str, *, nested: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Keeps other threads out; a callback of this thread may make `nested` calls."""
        return self._owner.alone(method_name, nested=nested)

    def _submit(self, request: Request) -> None:
        """Queues a request, or refuses it."""
        reason = self.scheduler.refusal(request)
        if reason is None and request.stop_strings and self._endings.detokenize is None:
            reason = "the request has stop strings, but the engine was created without `detokenize`"
        if reason:
            self._endings.finish(request, FinishReason.REFUSED, reason)
        else:
            self.scheduler.submit(request)

    def _end_rows(self, reason: FinishReason, detail: str | None = None) -> None:
        """Ends every row with the tokens that it has generated, and drops steps in flight."""
        self._endings.end_rows(reason, detail)
        if self._loop is not None:
            self._loop.drop()

    def _clear(self) -> None:
        """Drops all waiting and running requests, and steps in flight."""
        self.scheduler.clear()
        self._endings.clear()
        if self._loop is not None:
            self._loop.drop()


def _scheduler(build: EngineBuild) -> Scheduler:
    model = build.model
    return Scheduler(build.limits, model.vocab_size, recurrent=recurrent(model))
