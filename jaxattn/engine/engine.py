"""Continuous batching over compiled steps: requests in, tokens out as they appear.

    with Engine(model, params, Limits(batch=4)) as engine:
        print(engine.plan.total)
        completions = engine.generate([Request(b"def fib(n):"), Request(b"import ")])

`generate` is a loop over `add` and `step`. Each `step` sends a round of the device's steps, and
gives the events of the round before (loop.py). A row that finishes frees its pages and its slot,
and the next waiting request takes them (scheduler.py). The steps are executables of fixed shapes,
so nothing can be compiled after `start`. State and rows are donated to each step and come back in
the same buffers.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.compiling import OnCompile
from jaxattn.engine.devices import group_of
from jaxattn.engine.endings import Detokenize, Endings
from jaxattn.engine.hosts import Leader, Link, run_as_told
from jaxattn.engine.loop import Loop
from jaxattn.engine.prepare import (
    Prepared,
    checked_params,
    of_this_process,
    packed_params,
    prepare,
)
from jaxattn.engine.process import PROCESS
from jaxattn.engine.request import (
    Clock,
    Completion,
    Event,
    FinishEvent,
    FinishReason,
    GenerationInterrupted,
    Request,
    Stats,
    all_numbered,
    numbered,
)
from jaxattn.engine.runner import Runner
from jaxattn.engine.scheduler import Scheduler
from jaxattn.engine.seal import Seal
from jaxattn.engine.start import allocated, check_arrays, measured, tried
from jaxattn.engine.steps import entry_points
from jaxattn.memory.budget import MemoryPlan
from jaxattn.memory.limits import Limits
from jaxattn.models.base import DecodeState, Model
from jaxattn.parallel import ALONE, Parallel

OnToken = Callable[[Request, int], None]
OnFinish = Callable[[Completion], None]

MOST_IDS = 2**31


class EngineBusyError(RuntimeError):
    """The engine's one state is in use."""


class Engine:
    """A model compiled for `Limits`. One thread at a time; another gets an `EngineBusyError`.

    Args:
        model: a `jaxattn.models.Model`, such as `jaxattn.models.Hybrid(config)`.
        params: its parameters; an argument of the steps, never captured.
        limits, devices, implementation, on_compile, workers, parallel: see `prepare`.
        strict: a trace, a compilation or a new buffer after the warm-up raises SealError; otherwise
            it is counted in `seal`.
        detokenize: tokens to text, for requests with stop strings.

    Attributes:
        model, limits: as given; with `utilization`, the limits have the pages that fit.
        plan: what memory the engine takes and why.
        scheduler: rows, waiting requests and pools.
        seal: what was compiled or allocated after the warm-up.
        stats: of the last `generate`, or of what was added since.

    Raises:
        TypeError, ValueError, PlanError, NotImplementedError: see `prepare`.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        limits: Limits | None = None,
        devices: Sequence[jax.Device] | jax.Device | None = None,
        *,
        implementation: Implementation | None = None,
        on_compile: OnCompile | None = None,
        strict: bool = False,
        workers: int = 1,
        detokenize: Detokenize | None = None,
        parallel: Parallel = ALONE,
    ):
        check_arrays(params)
        prepared = prepare(
            model,
            params,
            limits,
            devices,
            implementation=implementation,
            on_compile=on_compile,
            workers=workers,
            parallel=parallel,
        )
        packed = packed_params(prepared.model, params, prepared.devices)
        self._open(prepared, packed, strict, detokenize)

    @classmethod
    def of(
        cls, prepared: Prepared, *, strict: bool = False, detokenize: Detokenize | None = None
    ) -> Self:
        """An engine of what `prepare` made; `start(params)` gives it its parameters."""
        engine = cls.__new__(cls)
        engine._open(prepared, None, strict, detokenize)
        return engine

    def _open(
        self, prepared: Prepared, params: Any, strict: bool, detokenize: Detokenize | None
    ) -> None:
        self._prepared, self._params = prepared, params
        self._runner: Runner | None = None
        self._loop: Loop | None = None
        self._owner: int | None = None
        self._busy = threading.Lock()
        self._next_id = 0
        self.seal = Seal(strict=strict)
        self.scheduler = Scheduler(prepared.limits, prepared.model.vocab_size)
        self._endings = Endings(self.scheduler, detokenize)
        self._closed = False
        PROCESS.opened(self)

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
    def stats(self) -> Stats:
        return self._endings.stats

    @property
    def executables(self) -> dict[str, jax.stages.Compiled]:
        """Name -> compiled step; steps.py says what each takes."""
        return self._prepared.steps.executables

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
                check_arrays(params)
                checked_params(self.model, params)
                self._params = packed_params(self.model, params, self._prepared.devices)
            self._start()

    def _start(self) -> None:
        if self._params is None:
            raise ValueError("this engine has no parameters: give them to start(params)")
        if self._runner is not None and not self._runner.lost:
            return
        self._end_rows(FinishReason.INTERRUPTED)  # their states are gone
        self._runner = self._loop = None
        with jax.default_device(of_this_process(self._prepared.devices)[0]):
            self._prepared = tried(self._prepared, self._params)
            PROCESS.closed(self)  # its own temp is a line of its plan
            try:
                self._replan(measured(self._prepared, self._params))
            finally:
                PROCESS.opened(self)
            state, rows = allocated(self._prepared, self._params)
        weights = tuple(jax.tree.leaves(self._params))
        executables = self._prepared.steps.executables
        group = group_of(self.model, self._prepared.devices)
        self._runner = Runner(self.limits, executables, weights, state, rows, self.seal, group)
        self._loop = Loop(self.scheduler, self._runner, self._endings)
        self.seal.hold((state, rows))

    def lead(self, links: Sequence[Link]) -> None:
        """Starts the engine, of which other processes run a part, and leads them from here on.

        Args:
            links: of `jaxattn.engine.hosts.lead`; they end with `close`.
        """
        with self._alone("lead", nested=True):
            self._start()
            assert self._runner is not None
            self._runner = Leader.of(self._runner, links)
            self._loop = Loop(self.scheduler, self._runner, self._endings)

    def follow(self, link: Link) -> None:
        """Starts the engine and sends the leader's steps, until the leader closes its engine.

        Args:
            link: of `jaxattn.engine.hosts.follow`.

        Raises:
            HostError: the leader is gone.
        """
        with self._alone("follow"):
            self._start()
            assert self._runner is not None
            with self.seal.watch():
                run_as_told(self._runner, link)

    def _replan(self, prepared: Prepared) -> None:
        """Goes on with another plan; with fewer pages, requests that wait may be refused."""
        before, self._prepared = self._prepared, prepared
        if prepared.limits != before.limits:
            waiting = self.scheduler.waiting
            self.scheduler = Scheduler(prepared.limits, prepared.model.vocab_size)
            self._endings.scheduler = self.scheduler
            for queued in waiting:
                self._submit(queued.request)

    def close(self) -> None:
        """Gives the state's memory back. The parameters stay with whoever else holds them.

        Requests that are not done are dropped.

        Raises:
            EngineBusyError: another thread uses the engine, or a callback called it.
        """
        if self._closed:
            return
        with self._alone("close"):
            self._closed = True
            PROCESS.closed(self)
            self._clear()
            if self._runner is not None:
                self._runner.delete()
            self._runner = self._loop = self._params = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests in, events out

    def add(self, request: Request) -> int:
        """Queues a request and returns its id. One that can never be served is refused.

        The refusal comes as a `FinishEvent` of the next `step`.

        Raises:
            TypeError: it is no `Request`.
            ValueError: a request with its id is running or waiting.
            EngineBusyError: another thread uses the engine.
            RuntimeError: the engine is closed.
        """
        with self._alone("add", nested=True):
            return self._add(request)

    def abort(self, id: int) -> bool:
        """Ends a request, running or waiting; False if there is none with this id.

        What it generated comes as a `FinishEvent` of the next `step`.

        Raises:
            EngineBusyError: another thread uses the engine.
        """
        with self._alone("abort", nested=True):
            row = next((r for r in self.scheduler.rows.values() if r.request.id == id), None)
            if row is not None:
                self._endings.end(row, FinishReason.ABORTED)
            elif queued := self.scheduler.withdraw(id):
                self._endings.finish(queued.request, FinishReason.ABORTED, of=queued)
            else:
                return False
            return True

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        flying = self._loop is not None and self._loop.in_flight
        return self.scheduler.busy or bool(self._endings.events) or flying

    def step(self) -> list[Event]:
        """Sends a round: at most one prefill step, and one token for each row that decodes.

        Returns:
            What the round before told. The round that is sent is read by the next call.

        Raises:
            EngineBusyError: another thread uses the engine, or a callback called it.
            SealError: the engine is strict and something was compiled or allocated. After this and
                any other error, Ctrl-C too, the rows have ended: their states may have gone on
                without them. Requests that wait are served by the next `step`.
        """
        with self._alone("step"):
            self._start()
            try:
                return self._step()
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                reason = FinishReason.INTERRUPTED if interrupted else FinishReason.FAILED
                self._end_rows(reason, str(error) or None)
                raise

    def generate(
        self,
        requests: Iterable[Request],
        *,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[Completion]:
        """Serves all requests; the completions are in the requests' order.

        A request that can never be served is refused, and the others are served. A request
        without an id gets its place in the list.

        Args:
            on_token: called with each token as soon as it is known, stop tokens aside.
            on_finish: called when a request is done or refused.

        Raises:
            TypeError: one of them is no `Request`.
            ValueError: two requests have the same id.
            GenerationInterrupted: Ctrl-C, at any time. It holds what was generated, and the engine
                stays usable.
            EngineBusyError: another thread uses the engine, a callback called it, or requests that
                were added are not done.
            SealError: the engine is strict and something was compiled or allocated.
        """
        with self._alone("generate"):
            if self.busy:
                raise EngineBusyError(
                    "generate: requests that were added are not done; call step() until the engine "
                    "is not busy"
                )
            return self._generate(all_numbered(requests), on_token, on_finish)

    def _generate(
        self, requests: list[Request], on_token: OnToken | None, on_finish: OnFinish | None
    ) -> list[Completion]:
        self._endings.stats, started = Stats(), time.perf_counter()
        done: dict[int | None, Completion] = {}
        try:
            self._start()
            started = time.perf_counter()
            for request in requests:
                self._add(request)
            while self.busy:
                events = self._step()
                for event in events:  # before a callback can be interrupted
                    if isinstance(event, FinishEvent):
                        done.setdefault(event.completion.request.id, event.completion)
                for event in events:
                    if isinstance(event, FinishEvent):
                        if on_finish:
                            on_finish(event.completion)
                    elif on_token:
                        on_token(event.request, event.token)
        except KeyboardInterrupt as interrupt:
            self._interrupt(requests, done)
            completions = [done[request.id] for request in requests]
            raise GenerationInterrupted(completions) from interrupt
        finally:
            self._clear()
            self.stats.seconds = time.perf_counter() - started
        return [done[request.id] for request in requests]

    def _interrupt(self, requests: list[Request], done: dict[int | None, Completion]) -> None:
        """Ends what is not done: rows with what they generated, the rest with nothing."""
        self._end_rows(FinishReason.INTERRUPTED)
        for event in self._endings.events:
            if isinstance(event, FinishEvent):
                done.setdefault(event.completion.request.id, event.completion)
        for request in requests:
            if request.id not in done:
                done[request.id] = Completion(request, (), FinishReason.INTERRUPTED)

    @contextlib.contextmanager
    def _alone(self, what: str, *, nested: bool = False) -> Iterator[None]:
        """Keeps other threads out; `nested` calls may come from a callback of this thread."""
        me = threading.get_ident()
        if self._owner == me:
            if not nested:
                raise EngineBusyError(f"{what} was called by a callback of this engine")
            yield
            return
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")
        held = False
        try:
            held = self._busy.acquire(blocking=False)
            if not held:
                raise EngineBusyError(
                    f"{what}: another thread uses this engine, which has one state; give each "
                    "thread an engine of its own (they share executables)"
                )
            self._owner = me
            yield
        finally:
            if held:
                self._owner = None
                self._busy.release()

    # --- one round

    def _add(self, request: Request) -> int:
        while self._next_id in self._endings.clocks:
            self._next_id += 1
        request = numbered(request, self._next_id)
        assert request.id is not None
        if request.id in self._endings.clocks:
            raise ValueError(f"a request with id {request.id} is running or waiting")
        self._next_id = (request.id + 1) % MOST_IDS
        self._endings.clocks[request.id] = Clock(time.perf_counter())
        self._submit(request)
        return request.id

    def _submit(self, request: Request) -> None:
        """Queues a request, or refuses it."""
        reason = self.scheduler.refusal(request)
        if reason is None and request.stop_strings and self._endings.detokenize is None:
            reason = "it has stop strings, and the engine was made without `detokenize`"
        if reason:
            self._endings.finish(request, FinishReason.REFUSED, reason)
        else:
            self.scheduler.submit(request)

    def _step(self) -> list[Event]:
        assert self._loop is not None
        if self.scheduler.busy or self._loop.in_flight:
            self._loop.round()
        events, self._endings.events = self._endings.events, []
        return events

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
