"""The router of engine events, from the device thread to output collectors on the event loop."""

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
# If more than this many tokens per row wait for the event loop, one write serves several steps.
BEHIND = 8
type EventsOfRows = dict[OutputCollector, dict[int, list[Event]]]


class EventRouter:
    """Passes the events of the engine's rows to the output collectors of their requests.

    Args:
        metrics: The metrics of the server, which count the events.
        on_loop: A function that calls another function on the event loop, from any thread.

    Attributes:
        collectors: The collectors by the ids of their rows, while these run or wait.
    """

    def __init__(self, metrics: ServerMetrics, on_loop: Callable[[Callable[[], Any]], None]):
        self.collectors: dict[int, OutputCollector] = {}
        self._metrics, self._on_loop = metrics, on_loop
        self._reports, self._delivery_scheduled = collections.deque[StepReport](), False

    def fail(self, reason: str) -> None:
        """Ends every row after an error that ended the engine."""
        now = time.perf_counter()
        events_of_rows: EventsOfRows = {}
        for id, collector in list(self.collectors.items()):
            request = next(each for each in collector.requests if each.id == id)
            done = Completion(request, (), FinishReason.FAILED, reason)
            self._route([FinishEvent(done)], now, events_of_rows)
        _put(events_of_rows)

    def report(self, report: StepReport) -> None:
        """Queues the report of a step. The device thread calls this method."""
        self._reports.append(report)
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            self._on_loop(self._deliver)

    def _deliver(self) -> None:
        """Passes the queued reports to the collectors.

        Each step causes a write to each stream. An event loop that is behind joins the tokens of
        several steps in one write, and so catches up.
        """
        self._delivery_scheduled = False  # before what waits is read: a later report calls again
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        num_events = sum(len(report.events) for report in reports)
        # The snapshot after a step no longer counts the rows that ended in it.
        rows = max((report.snapshot.rows for report in reports), default=0)
        is_behind = num_events > BEHIND * max(1, rows)
        events_of_rows: EventsOfRows = {}
        for report in reports:
            tokens = self._route(report.events, report.end_time, events_of_rows)
            self._metrics.stepped(report, tokens)
            if not is_behind:
                _put(events_of_rows)
                events_of_rows = {}
        _put(events_of_rows)

    def _route(
        self,
        events: Sequence[Event],
        now: float,
        events_of_rows: EventsOfRows,
    ) -> int:
        """Adds the events to `events_of_rows`, and returns the number of tokens."""
        rows = collections.defaultdict[int | None, list[Event]](list)
        for event in events:  # of 128 rows there may be 1,024
            request = event.completion.request if isinstance(event, FinishEvent) else event.request
            rows[request.id].append(event)
        tokens = 0
        for id, row_events in rows.items():
            collector = None if id is None else self.collectors.get(id)
            if id is None or collector is None:
                LOG.error("the engine sent an event for request %s, which is not running", id)
                continue  # the others get what is theirs
            if count := len([event for event in row_events if type(event) is TokenEvent]):
                self._metrics.tokens(id, count, now)
                tokens += count
            if isinstance(last := row_events[-1], FinishEvent):
                del self.collectors[id]
                self._metrics.finished(last.completion, now)
            collector_rows = events_of_rows.setdefault(collector, {})
            collector_rows[id] = (
                collector_rows[id] + row_events if id in collector_rows else row_events
            )
        return tokens


def _put(events_of_rows: EventsOfRows) -> None:
    for collector, rows in events_of_rows.items():
        collector.put(list(rows.items()))
