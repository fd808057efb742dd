"""An engine that says what it was told to, with the face that the server uses.

Rows, waiting requests, pages and slots are those of the engine's own scheduler, so that a test can
see what is left in use.
"""

import threading
import time
from collections.abc import Callable, Sequence

from jaxattn.engine.request import Completion, Event, FinishEvent, FinishReason, Request, TokenEvent
from jaxattn.engine.scheduler import Scheduler
from jaxattn.engine.seal import Seal
from jaxattn.memory.budget import Item, MemoryPlan
from jaxattn.memory.limits import Limits

LIMITS = Limits(batch=4, max_model_len=256, prefill_chunk=32)
Script = Callable[[Request], Sequence[int]]


def echo(request: Request) -> Sequence[int]:
    """Says its prompt, again and again."""
    return tuple(request.prompt) * (request.max_tokens // len(request.prompt) + 1)


class ScriptedEngine:
    """Gives each row one token in each step.

    Attributes:
        script: what a request is answered with; then its row ends by itself.
        step_seconds: that a step takes.
        failures: steps that fail from now on, as on a device error.
        hold: a step waits while it is clear.
    """

    def __init__(self, script: Script = echo, limits: Limits = LIMITS, step_seconds: float = 0.0):
        self.script, self.limits, self.step_seconds = script, limits, step_seconds
        self.plan = MemoryPlan((Item("weights", 1000, "of a test"),))
        self.seal = Seal()
        self.scheduler = Scheduler(limits, 256)
        self.failures = 0
        self.hold = threading.Event()
        self.hold.set()
        self.added: list[Request] = []
        self.closed = False
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self._events)

    def add(self, request: Request) -> int:
        assert request.id is not None
        rows = [row.request.id for row in self.scheduler.rows.values()]
        if request.id in rows or request.id in [each.id for each in self.scheduler.waiting]:
            raise ValueError(f"a request with id {request.id} is running or waiting")
        self.added.append(request)
        if reason := self.scheduler.refusal(request):
            self._finish(request, (), FinishReason.REFUSED, reason)
        else:
            self.scheduler.submit(request)
        return request.id

    def abort(self, id: int) -> bool:
        for row in self.scheduler.rows.values():
            if row.request.id == id:
                self.scheduler.release(row)
                self._finish(row.request, row.tokens, FinishReason.ABORTED)
                return True
        if request := self.scheduler.withdraw(id):
            self._finish(request, (), FinishReason.ABORTED)
            return True
        return False

    def step(self) -> list[Event]:
        self.hold.wait()
        time.sleep(self.step_seconds)
        self.scheduler.admit()
        if self.failures:
            self.failures -= 1
            for row in self.scheduler.drop_rows():
                self._finish(row.request, row.tokens, FinishReason.FAILED, "the device is lost")
            raise RuntimeError("the device is lost")
        for row in list(self.scheduler.rows.values()):
            script = self.script(row.request)
            token = script[len(row.tokens)] if len(row.tokens) < len(script) else None
            if token is None or token in row.stop_tokens:
                self._end(row, FinishReason.STOP, token)
                continue
            row.tokens.append(token)
            self._events.append(TokenEvent(row.request, token))
            if len(row.tokens) == row.max_tokens:
                self._end(row, FinishReason.LENGTH, "max_tokens")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self.scheduler.clear()
        self.closed = True

    def _end(self, row, reason: FinishReason, detail: str | int | None) -> None:
        self.scheduler.release(row)
        self._finish(row.request, row.tokens, reason, detail)

    def _finish(self, request: Request, tokens, reason: FinishReason, detail=None) -> None:
        self._events.append(FinishEvent(Completion(request, tuple(tokens), reason, detail)))
