"""The device thread, which creates and owns the engine, and steps it while it has requests.

Other threads send it commands through a queue, and it reports all outputs of a step in one call.
A slow client therefore never makes the device wait.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

from jaxattn.engine.requests.outputs import Completion, Event, FinishEvent, FinishReason
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.memory.plan import MemoryPlan

LOG = logging.getLogger("jaxattn.server")
MOST_FAILURES = 3


class PoolProtocol(Protocol):
    """The pages or slots of the scheduler."""

    @property
    def size(self) -> int: ...
    @property
    def in_use(self) -> int: ...


class SchedulerProtocol(Protocol):
    """The attributes of the engine's scheduler that the gauges read."""

    @property
    def pages(self) -> PoolProtocol: ...
    @property
    def slots(self) -> PoolProtocol: ...
    @property
    def rows(self) -> Mapping[int, object]: ...
    @property
    def preemptions(self) -> int: ...


class PrefixCacheStatsProtocol(Protocol):
    """Counts of prompt tokens that the engine looked up in the prefix cache."""

    @property
    def asked(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def states_missed(self) -> int: ...


class GenerationStatsProtocol(Protocol):
    """The numbers of drafted and accepted tokens, and the batch buckets that use the draft head."""

    @property
    def drafted_tokens(self) -> int: ...
    @property
    def guessed_tokens(self) -> int: ...
    @property
    def drafting(self) -> Mapping[int, bool]: ...


class RecompilationGuardProtocol(Protocol):
    @property
    def counts(self) -> Mapping[str, int]: ...


class EngineProtocol(Protocol):
    """The part of `jaxattn.Engine` that the server uses."""

    @property
    def limits(self) -> Limits: ...
    @property
    def plan(self) -> MemoryPlan: ...
    @property
    def busy(self) -> bool: ...
    @property
    def scheduler(self) -> SchedulerProtocol: ...
    @property
    def seal(self) -> RecompilationGuardProtocol: ...
    @property
    def prefixes(self) -> PrefixCacheStatsProtocol: ...
    @property
    def stats(self) -> GenerationStatsProtocol: ...
    def add(self, request: Request) -> int: ...
    def abort(self, id: int) -> bool: ...
    def step(self) -> list[Event]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's gauges and counters after a step. Counters count from the start.

    Attributes:
        rows: The number of running requests.
        pages, slots: The numbers of pages and slots in use.
        preemptions: The number of preempted rows.
        prefix_queries: The prompt tokens that were looked up in the prefix cache.
        prefix_hits: The prompt tokens that the prefix cache had, so that no prefill was needed.
        states_missed: The prompt tokens whose pages were cached, but not the recurrent state.
        drafted: The number of draft tokens.
        accepted: The number of accepted draft tokens.
        drafting: For each batch bucket, whether the model's draft head is in use.
        seal: The numbers of traces, compilations and new buffers after the warm-up, by kind.
    """

    rows: int = 0
    pages: int = 0
    slots: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    states_missed: int = 0
    drafted: int = 0
    accepted: int = 0
    drafting: Mapping[int, bool] = dataclasses.field(default_factory=dict)
    seal: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """The outputs of one step.

    Attributes:
        events: The events of all rows.
        snapshot: The engine's counts after the step.
        end_time: The time of the step's end, as `time.perf_counter()`.
        seconds: The step's duration.
    """

    events: Sequence[Event]
    snapshot: EngineSnapshot
    end_time: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Submit:
    requests: Sequence[Request]


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    ids: Sequence[int]


class _Stop:
    """The command that ends the thread, and drops the open requests."""


class EngineWorker:
    """The owner of the device thread and its engine. The thread calls all callbacks.

    Args:
        make_engine: Creates and starts the engine, which takes seconds to minutes.
        on_ready: Called when the engine runs.
        on_report: Called with the outputs of each step.
        on_end: Called at the thread's end, with its error or None.

    Attributes:
        engine: The engine; None until shortly before `on_ready` is called.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineProtocol],
        *,
        on_ready: Callable[[], None],
        on_report: Callable[[StepReport], None],
        on_end: Callable[[BaseException | None], None],
    ):
        self.engine: EngineProtocol | None = None
        self._make_engine, self._on_ready = make_engine, on_ready
        self._on_report, self._on_end = on_report, on_end
        self._commands: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Each needs a unique id."""
        self._commands.put(_Submit(requests))

    def abort(self, ids: Sequence[int]) -> None:
        """Aborts requests, including those that have not reached the engine yet."""
        self._commands.put(_Abort(ids))

    def stop(self) -> None:
        """Ends the thread after its current step, and closes the engine."""
        self._commands.put(_Stop())

    def join(self, seconds: float) -> bool:
        """Waits up to `seconds` for the thread; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def get_step_seconds(self) -> float:
        """Returns the seconds that the current step has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    def _run(self) -> None:
        ended: BaseException | None = None
        try:
            engine = self._make_engine()
            self.engine = engine
            self._on_ready()
            with engine:
                self._serve(engine)
        except BaseException as error:  # `on_end` must be called however the thread ends
            ended = error
        self._on_end(ended)

    def _serve(self, engine: EngineProtocol) -> None:
        failures = 0
        while True:
            rejected_events = self._take(engine)
            if rejected_events is None:
                return
            if rejected_events:
                now = time.perf_counter()
                self._on_report(StepReport(rejected_events, _snapshot(engine), now, 0.0))
            if not engine.busy:
                continue
            try:
                self._on_report(self._step(engine))
                failures = 0
            except Exception:
                failures += 1
                LOG.exception("a step failed; the engine ended the rows of this step")
                if failures == MOST_FAILURES:
                    raise

    def _step(self, engine: EngineProtocol) -> StepReport:
        began = self._step_began = time.perf_counter()
        try:
            events = engine.step()
        finally:
            self._step_began = None
        now = time.perf_counter()
        return StepReport(events, _snapshot(engine), now, now - began)

    def _take(self, engine: EngineProtocol) -> list[Event] | None:
        """Executes the queued commands; blocks for the first one if the engine is idle.

        Returns:
            The finish events of requests that the engine refused, or None after `stop`.
        """
        rejected_events: list[Event] = []
        wait = not engine.busy
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return rejected_events
            wait = False
            match command:
                case _Stop():
                    return None
                case _Abort(ids):
                    for id in ids:
                        engine.abort(id)
                case _Submit(requests):
                    for request in requests:
                        try:
                            engine.add(request)
                        except (TypeError, ValueError) as error:
                            done = Completion(request, (), FinishReason.REFUSED, str(error))
                            rejected_events.append(FinishEvent(done))


def _snapshot(engine: EngineProtocol) -> EngineSnapshot:
    scheduler, prefixes = engine.scheduler, engine.prefixes
    return EngineSnapshot(
        rows=len(scheduler.rows),
        pages=scheduler.pages.in_use,
        slots=scheduler.slots.in_use,
        preemptions=scheduler.preemptions,
        prefix_queries=prefixes.asked,
        prefix_hits=prefixes.hits,
        states_missed=prefixes.states_missed,
        drafted=engine.stats.drafted_tokens,
        accepted=engine.stats.guessed_tokens,
        drafting=dict(engine.stats.drafting),
        seal=dict(engine.seal.counts),
    )
