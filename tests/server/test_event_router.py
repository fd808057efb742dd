"""Which steps' events reach a collector together, where the event loop is behind the device."""

import dataclasses

import pytest

from jaxattn.engine.requests.outputs import Completion, FinishEvent, FinishReason, TokenEvent
from jaxattn.engine.requests.request import Request
from jaxattn.server.runtime.engine_worker import EngineSnapshot, StepReport
from jaxattn.server.runtime.event_router import BEHIND, EventRouter
from jaxattn.server.runtime.metrics import ServerMetrics


@dataclasses.dataclass(eq=False)
class Collector:
    """Takes what the router puts, instead of an `OutputCollector`."""

    requests: list[Request]
    puts: list[dict] = dataclasses.field(default_factory=list)

    def put(self, rows):
        self.puts.append({id: len(events) for id, events in rows})


def delivered(rows: int, steps: int) -> Collector:
    """Rows that give a token in each of so many steps and end in the last one, after which the
    event loop runs for the first time."""
    calls: list = []
    metrics = ServerMetrics("model")
    router = EventRouter(metrics, calls.append)
    collector = Collector([Request(b"ab", max_tokens=steps, id=id) for id in range(rows)])
    router.collectors.update(dict.fromkeys(range(rows), collector))
    metrics.asked(range(rows), [2] * rows, steps, 0.0)
    for step in range(steps):
        events = [TokenEvent(request, 97) for request in collector.requests]
        last = step == steps - 1
        if last:
            done = [Completion(each, (97,), FinishReason.LENGTH) for each in collector.requests]
            events += map(FinishEvent, done)
        snapshot = EngineSnapshot(rows=0 if last else rows)
        router.report(StepReport(events, snapshot, float(step), 0.01))
    [deliver] = calls
    deliver()
    assert not router.collectors
    return collector


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_rows_that_end_count_for_how_far_the_loop_is_behind(rows):
    collector = delivered(rows, steps=3)
    assert collector.puts == [dict.fromkeys(range(rows), n) for n in (1, 1, 2)]


def test_a_loop_that_is_behind_has_one_put_for_several_steps():
    collector = delivered(2, steps=BEHIND + 1)
    assert collector.puts == [{0: BEHIND + 2, 1: BEHIND + 2}]
