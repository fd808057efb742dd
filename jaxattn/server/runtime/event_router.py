"""The router of a step's events, from the device thread to the generations on the event loop."""

import collections
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxattn.engine.requests.outputs import Completion, Event, FinishEvent, FinishReason, TokenEvent
from jaxattn.server.decoding.output_collector import OutputCollector
from jaxattn.server.runtime.engine_worker import StepReport
from jaxattn.server.runtime.metrics import ServerMetrics

LOG = logging.getLogger("jaxattn.server")
BEHIND = 8  # tokens of each row that wait for the event loop; more than these become text together
type EventsOfRows = dict[OutputCollector, dict[int, list[Event]]]


class EventRouter:
    """Gives each generation what the engine gave for its rows.

    Args:
        metrics: of the server, which count it.
        on_loop: calls a function on the event loop, from any thread.

    Attributes:
        generations: by the ids of their rows, as long as these run or wait.
    """

    def __init__(self, metrics: ServerMetrics, on_loop: Callable[[Callable[[], Any]], None]):
        self.generations: dict[int, OutputCollector] = {}
        self._metrics, self._on_loop = metrics, on_loop
        self._reports, self._called = collections.deque[StepReport](), False

    def fail(self, reason: str) -> None:
        """Ends every row, after an error that ended the engine."""
        now = time.perf_counter()
        ended: EventsOfRows = {}
        for id, generation in list(self.generations.items()):
            request = next(each for each in generation.requests if each.id == id)
            done = Completion(request, (), FinishReason.FAILED, reason)
            self._route([FinishEvent(done)], now, ended)
        _put(ended)

    def report(self, report: StepReport) -> None:
        """Takes what a step gave; for the device thread."""
        self._reports.append(report)
        if not self._called:
            self._called = True
            self._on_loop(self._deliver)

    def _deliver(self) -> None:
        """Gives each generation what the steps gave that wait.

        A step's tokens are a write for each stream. A loop that is behind makes one of several
        steps, and so catches up.
        """
        self._called = False  # before what waits is read: a later report calls again
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        waiting = sum(len(report.events) for report in reports)
        # Rows that end are in no later snapshot, but in that of the step before.
        rows = max((report.snapshot.rows for report in reports), default=0)
        behind = waiting > BEHIND * max(1, rows)
        found: EventsOfRows = {}
        for report in reports:
            tokens = self._route(report.events, report.now, found)
            self._metrics.stepped(report, tokens)
            if not behind:
                _put(found)
                found = {}
        _put(found)

    def _route(
        self,
        events: Sequence[Event],
        now: float,
        found: EventsOfRows,
    ) -> int:
        """Adds the events to those of their generations' rows; returns how many are tokens."""
        rows = collections.defaultdict[int | None, list[Event]](list)
        for event in events:  # of 128 rows there may be 1,024
            request = event.completion.request if isinstance(event, FinishEvent) else event.request
            rows[request.id].append(event)
        tokens = 0
        for id, own in rows.items():
            generation = None if id is None else self.generations.get(id)
            if id is None or generation is None:
                LOG.error("the engine tells of request %s, which is none of those that run", id)
                continue  # the others get what is theirs
            if count := len([event for event in own if type(event) is TokenEvent]):
                self._metrics.tokens(id, count, now)
                tokens += count
            if isinstance(last := own[-1], FinishEvent):
                del self.generations[id]
                self._metrics.finished(last.completion, now)
            given = found.setdefault(generation, {})
            given[id] = given[id] + own if id in given else own
        return tokens


def _put(found: EventsOfRows) -> None:
    for generation, rows in found.items():
        generation.put(list(rows.items()))
