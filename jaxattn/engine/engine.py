"""Continuous batching over one compiled decode step: requests in, tokens out as they appear.

    with Engine(model, params, Limits(batch=4)) as engine:
        print(engine.plan.total)
        completions = engine.generate([Request(b"def fib(n):"), Request(b"import ")])

`generate` is a loop over `add` and `step`. Each round of `step` reads one chunk of a prompt, then
decodes the rows that have read theirs, one token each. A row that finishes frees its pages and its
slot, and the next waiting request takes them (scheduler.py). The steps are executables of fixed
shapes, so nothing can be compiled after `start`. The state is donated to each step and comes back
in the same buffers.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxattn.core.dispatch import Implementation
from jaxattn.engine.batches import decode_batch, padding, prefill_batch
from jaxattn.engine.prepare import (
    Prepared,
    checked_params,
    on_device,
    packed_params,
    prepare,
    smallest_memory,
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
    TokenEvent,
    all_numbered,
    numbered,
)
from jaxattn.engine.sampling import NOT_FINITE
from jaxattn.engine.scheduler import Row, Scheduler
from jaxattn.engine.seal import Seal
from jaxattn.engine.steps import EntryPoint, OnCompile, allocated_state, entry_points
from jaxattn.memory.budget import MemoryPlan, check_allocated
from jaxattn.memory.limits import Limits
from jaxattn.models.base import DecodeState, Model, line_name
from jaxattn.parallel import ALONE, Parallel

OnToken = Callable[[Request, int], None]
OnFinish = Callable[[Completion], None]
Detokenize = Callable[[Sequence[int]], str]


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
        _check_arrays(params)
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
        self._prepared, self._params, self._detokenize = prepared, params, detokenize
        self._state: DecodeState | None = None
        self._owner: int | None = None
        self._busy = threading.Lock()
        self._events: list[Event] = []
        self._clocks: dict[int, Clock] = {}
        self._next_id = 0
        self.stats, self.seal = Stats(), Seal(strict=strict)
        self.scheduler = Scheduler(prepared.limits, prepared.model.vocab_size)
        self._closed = False
        PROCESS.opened(self)

    def _replan(self, prepared: Prepared) -> None:
        """Goes on with another plan; with fewer pages, requests that wait may be refused."""
        before, self._prepared = self._prepared, prepared
        if prepared.limits != before.limits:
            waiting = list(self.scheduler.waiting)
            self.scheduler = Scheduler(prepared.limits, prepared.model.vocab_size)
            for request in waiting:
                self._submit(request)

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
    def executables(self) -> dict[str, jax.stages.Compiled]:
        """Name -> compiled step (params, state, batch) -> (tokens, state)."""
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
            assert self._state is not None
            return self._state

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
                if self._state is not None:
                    raise RuntimeError("start: this engine runs already; make another one")
                _check_arrays(params)
                checked_params(self.model, params)
                self._params = packed_params(self.model, params, self._prepared.devices)
            self._start()

    def _start(self) -> None:
        if self._params is None:
            raise ValueError("this engine has no parameters: give them to start(params)")
        # An interrupt between a step's call and its return leaves donated buffers behind.
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))
        if self._state is not None and not lost:
            return
        self._end_rows(FinishReason.INTERRUPTED)  # their states are gone
        self._state = None
        with jax.default_device(self._prepared.devices[0]):
            if self._prepared.trial:
                self._try()
            self._check_memory()
            self._state = self._warmed(self.limits, self.executables)
        self.seal.hold(self._state)

    def _try(self) -> None:
        """Runs the trial's steps, so that drivers and libraries have what they want."""
        assert self._prepared.trial is not None
        limits, steps = self._prepared.trial
        self._warmed(limits, steps.executables)
        self._prepared = dataclasses.replace(self._prepared, trial=None)

    def _check_memory(self) -> None:
        """Plans again with what the device has now; fewer pages are found where it has less.

        Raises:
            PlanError: it does not fit.
        """
        prepared, compiler = self._prepared, self._prepared.compiler
        memory = smallest_memory(prepared.devices)
        own = on_device(self._params, prepared.devices)
        PROCESS.closed(self)  # its own temp is a line of its plan
        try:
            known = prepared.known
            if prepared.wanted.utilization is not None and memory is not None:
                filled = compiler.fill(prepared.wanted, known, memory, own)
                if filled.pages < prepared.limits.pages:
                    limits, steps, known = compiler.fit(prepared.wanted, known, memory, own)
                    prepared = dataclasses.replace(
                        prepared, limits=limits, steps=steps, known=known
                    )
            plan = compiler.plan(prepared.limits, known, memory, own, wanted=prepared.wanted)
            self._replan(dataclasses.replace(prepared, plan=plan))
        finally:
            PROCESS.opened(self)

    def _warmed(self, limits: Limits, executables: dict[str, jax.stages.Compiled]) -> DecodeState:
        """A state beside which each executable has run twice, on padding rows, which write nothing.

        The first two runs are special on a GPU: one loads the modules, one records the command
        buffer.
        """
        state = allocated_state(self.model, limits, self._prepared.devices)
        if limits is self.limits:
            check_allocated("arena", state.arena, self.plan["arena"])
            for arrays in state.caches.values():
                for name, array in arrays.items():
                    check_allocated(line_name(name), array, self.plan[line_name(name)])
        for entry in entry_points(limits) * 2:
            batch = padding(entry, limits.table_width)
            tokens, state = executables[str(entry)](self._params, state, batch)
            tokens.block_until_ready()
        return state

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
            self.scheduler.clear()
            self._events.clear()
            self._clocks.clear()
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
            self._state = self._params = None

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
            waiting = None if row else self.scheduler.withdraw(id)
            if row is None and waiting is None:
                return False
            if row is not None:
                self.scheduler.release(row)
                self._finish(row.request, row.tokens, FinishReason.ABORTED)
            elif waiting is not None:
                self._finish(waiting, (), FinishReason.ABORTED)
            return True

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.busy or bool(self._events)

    def step(self) -> list[Event]:
        """One round: at most one chunk of a prompt and one token for each row that decodes.

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
        self.stats, started = Stats(), time.perf_counter()
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
            self.scheduler.clear()
            self._events.clear()
            self._clocks.clear()
            self.stats.seconds = time.perf_counter() - started
        return [done[request.id] for request in requests]

    def _interrupt(self, requests: list[Request], done: dict[int | None, Completion]) -> None:
        """Ends what is not done: rows with what they generated, the rest with nothing."""
        self._end_rows(FinishReason.INTERRUPTED)
        for event in self._events:
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
        while self._next_id in self._clocks:
            self._next_id += 1
        request = numbered(request, self._next_id)
        assert request.id is not None
        if request.id in self._clocks:
            raise ValueError(f"a request with id {request.id} is running or waiting")
        self._next_id = (request.id + 1) % MOST_IDS
        self._clocks[request.id] = Clock(time.perf_counter())
        self._submit(request)
        return request.id

    def _submit(self, request: Request) -> None:
        """Queues a request, or refuses it."""
        reason = self.scheduler.refusal(request)
        if reason is None and request.stop_strings and self._detokenize is None:
            reason = "it has stop strings, and the engine was made without `detokenize`"
        if reason:
            self._finish(request, (), FinishReason.REFUSED, reason)
        else:
            self.scheduler.submit(request)

    def _step(self) -> list[Event]:
        self.scheduler.admit()
        if row := self.scheduler.next_prefill():
            self._prefill_chunk(row)
        if rows := self.scheduler.next_decode():
            self._decode_rows(rows)
        events, self._events = self._events, []
        return events

    def _prefill_chunk(self, row: Row) -> None:
        started = time.perf_counter()
        waiting = len(row.request.prompt) - row.cached
        chunk = next((c for c in self.limits.chunks if c >= waiting), self.limits.chunks[-1])
        tokens = row.request.prompt[row.cached : row.cached + chunk]
        row.cached += len(tokens)
        entry = EntryPoint("prefill", 1, chunk)
        tables = self.scheduler.block_tables
        new = self._run(entry, lambda: prefill_batch(entry, row, tokens, tables))
        self.stats.prefill_steps += 1
        self.stats.prompt_tokens += len(tokens)
        self.stats.prefill_seconds += time.perf_counter() - started
        if not row.prefilling:
            self._accept(row, int(new[0]))

    def _decode_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.cached += 1
        entry = EntryPoint("decode", next(b for b in self.limits.batches if b >= len(rows)), 1)
        tables = self.scheduler.block_tables
        new = self._run(entry, lambda: decode_batch(entry, rows, tables))
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += len(rows)
        for place, row in enumerate(rows):
            self._accept(row, int(new[place]))

    def _accept(self, row: Row, token: int) -> None:
        """A row's next token; it may be the last."""
        if token == NOT_FINITE:
            self._end(row, FinishReason.NOT_FINITE, "the model's logits held NaN or infinity")
            return
        if token in row.stop_tokens:
            self._end(row, FinishReason.STOP, token)
            return
        row.tokens.append(token)
        assert row.request.id is not None
        self._clocks[row.request.id].first(time.perf_counter())
        self._events.append(TokenEvent(row.request, token))
        if text := self._stop_string(row):
            self._end(row, FinishReason.STOP, text)
        elif len(row.tokens) == row.max_tokens:
            cut = row.max_tokens < row.request.max_tokens
            self._end(row, FinishReason.LENGTH, "max_model_len" if cut else "max_tokens")

    def _stop_string(self, row: Row) -> str | None:
        """The stop string that the last token completed."""
        if not row.request.stop_strings or self._detokenize is None:
            return None
        # Of one byte each, so many tokens hold the longest of them; others give no text at all.
        longest = max(len(text.encode()) for text in row.request.stop_strings)
        text = self._detokenize(row.tokens[-longest - 16 :])
        return next((stop for stop in row.request.stop_strings if stop in text), None)

    def _end_rows(self, reason: FinishReason, detail: str | None = None) -> None:
        """Ends every row with what it generated."""
        for row in self.scheduler.drop_rows():
            if row.request.id in self._clocks:
                self._finish(row.request, row.tokens, reason, detail)

    def _end(self, row: Row, reason: FinishReason, detail: str | int) -> None:
        self.scheduler.release(row)
        self._finish(row.request, row.tokens, reason, detail)

    def _finish(
        self,
        request: Request,
        tokens: Sequence[int],
        reason: FinishReason,
        detail: str | int | None = None,
    ) -> None:
        assert request.id is not None
        clock = self._clocks.pop(request.id)
        first, seconds = clock.read(time.perf_counter())
        done = Completion(request, tuple(tokens), reason, detail, first, seconds)
        self._events.append(FinishEvent(done))

    def _run(self, entry: EntryPoint, batch: Callable[[], Any]) -> np.ndarray:
        """One sealed step: the tokens, one for each row of the executable."""
        with self.seal.watch():
            given = batch()
            with self.seal.allowed():
                tokens, self._state = self.executables[str(entry)](self._params, self._state, given)
            new = np.array(tokens)  # a view would keep the array
            del tokens
            self.seal.check(self._state)
        return new


def _check_arrays(params: Any) -> None:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise TypeError(
            "params are shapes; an engine needs arrays. To compile before they are loaded, use "
            "Engine.of(prepare(model, shapes, limits)) and start(params)"
        )
