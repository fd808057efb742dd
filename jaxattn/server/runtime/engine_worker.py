"""The device thread: it makes the engine, owns it, and steps it while there is anything to do.

Other threads reach it by a queue of commands. What a step gives goes back in one piece. So nothing
that a client does, or leaves undone, makes the device wait.
"""

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxattn.engine.requests.outputs import Completion, Event, FinishEvent, FinishReason
from jaxattn.engine.requests.request import Request
from jaxattn.memory.engine_limits import Limits
from jaxattn.memory.plan import MemoryPlan

LOG = logging.getLogger("jaxattn.server")
MOST_FAILURES = 3


class PoolProtocol(Protocol):
    """Pages or slots."""

    @property
    def size(self) -> int: ...
    @property
    def in_use(self) -> int: ...


class SchedulerProtocol(Protocol):
    """What the gauges read of the engine's scheduler."""

    @property
    def pages(self) -> PoolProtocol: ...
    @property
    def slots(self) -> PoolProtocol: ...
    @property
    def rows(self) -> Mapping[int, object]: ...
    @property
    def preemptions(self) -> int: ...


class PrefixCacheStatsProtocol(Protocol):
    """Tokens of prompts that were looked up in the cache of prefixes."""

    @property
    def asked(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def states_missed(self) -> int: ...


class GenerationStatsProtocol(Protocol):
    """Tokens that were drafted, those of them that turned out right, and the buckets of rows that
    draft by the model's own head."""

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
    """What a server uses of `jaxattn.Engine`."""

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
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine held when a step had ended.

    Attributes:
        rows: requests that have a row.
        pages, slots: in use.
        preemptions: rows that lost their pages to older ones, so far.
        prefix_asked: tokens of prompts that were looked up in the cache of prefixes, so far.
        prefix_hits: those of them that were not read again.
        states_missed: those whose pages were cached without the states behind them.
        drafted: tokens that were drafted, so far.
        accepted: those of them that turned out right.
        drafting: of buckets of rows, whether the model's own head drafts.
        seal: what was traced, compiled or allocated after the warm-up, by kind.
    """

    rows: int = 0
    pages: int = 0
    slots: int = 0
    preemptions: int = 0
    prefix_asked: int = 0
    prefix_hits: int = 0
    states_missed: int = 0
    drafted: int = 0
    accepted: int = 0
    drafting: Mapping[int, bool] = dataclasses.field(default_factory=dict)
    seal: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """What one step gave.

    Attributes:
        now: when it ended, of `time.perf_counter`.
        seconds: that it took.
    """

    events: Sequence[Event]
    snapshot: EngineSnapshot
    now: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Submit:
    requests: Sequence[Request]


@dataclasses.dataclass(frozen=True, slots=True)
class _Abort:
    ids: Sequence[int]


class _Stop:
    """Ends the thread. What runs is dropped."""


class EngineWorker:
    """Runs the engine in a thread of its own.

    Args:
        make: makes the engine and starts it, in the thread; this takes seconds to minutes.
        on_ready: called in the thread when the engine runs.
        on_report: called in the thread with what each step gave.
        on_end: called in the thread at its end, with what went wrong, or None.

    Attributes:
        engine: once `on_ready` was called.
    """

    def __init__(
        self,
        make: Callable[[], EngineProtocol],
        *,
        on_ready: Callable[[], None],
        on_report: Callable[[StepReport], None],
        on_end: Callable[[BaseException | None], None],
    ):
        self.engine: EngineProtocol | None = None
        self._make, self._on_ready = make, on_ready
        self._on_report, self._on_end = on_report, on_end
        self._commands: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; each has an id that no other has."""
        self._commands.put(_Submit(requests))

    def abort(self, ids: Sequence[int]) -> None:
        """Ends requests, those too that are not queued in the engine yet."""
        self._commands.put(_Abort(ids))

    def stop(self) -> None:
        """Ends the thread when its step has ended, and closes the engine."""
        self._commands.put(_Stop())

    def join(self, seconds: float) -> bool:
        """Waits for the thread's end; whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stuck_for(self) -> float:
        """The seconds that the step in flight has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    def _run(self) -> None:
        ended: BaseException | None = None
        try:
            engine = self._make()
            self.engine = engine
            self._on_ready()
            with contextlib.closing(engine):
                self._serve(engine)
        except BaseException as error:  # who waits for this thread learns of any end
            ended = error
        self._on_end(ended)

    def _serve(self, engine: EngineProtocol) -> None:
        failures = 0
        while True:
            refused = self._take(engine)
            if refused is None:
                return
            if refused:
                now = time.perf_counter()
                self._on_report(StepReport(refused, _snapshot(engine), now, 0.0))
            if not engine.busy:
                continue
            try:
                self._on_report(self._step(engine))
                failures = 0
            except Exception:
                failures += 1
                LOG.exception("a step failed; the rows that it was for have ended")
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
        """Obeys the commands that wait, and waits for one while the engine has nothing to do.

        Returns:
            The ends of requests that the engine did not take, or None after `stop`.
        """
        refused: list[Event] = []
        wait = not engine.busy
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return refused
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
                            refused.append(FinishEvent(done))


def _snapshot(engine: EngineProtocol) -> EngineSnapshot:
    scheduler, prefixes = engine.scheduler, engine.prefixes
    return EngineSnapshot(
        rows=len(scheduler.rows),
        pages=scheduler.pages.in_use,
        slots=scheduler.slots.in_use,
        preemptions=scheduler.preemptions,
        prefix_asked=prefixes.asked,
        prefix_hits=prefixes.hits,
        states_missed=prefixes.states_missed,
        drafted=engine.stats.drafted_tokens,
        accepted=engine.stats.guessed_tokens,
        drafting=dict(engine.stats.drafting),
        seal=dict(engine.seal.counts),
    )
