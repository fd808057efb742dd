"""An engine that generates scripted tokens, with the interface that the server uses."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxattn.engine.requests.outputs import Completion, Event, FinishEvent, FinishReason, TokenEvent
from jaxattn.engine.requests.request import Request
from jaxattn.engine.requests.stats import GenerationStats
from jaxattn.engine.scheduling.prefix_cache import PrefixCacheStats
from jaxattn.limits import Limits
from jaxattn.memory.plan import MemoryPlan, PlanItem

LIMITS = Limits(batch=4, max_model_len=256, prefill_chunk=32)
PAGE, HIDDEN = 64, 8
# A tool call in the Hermes format.
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
Script = Callable[[Request], Sequence[int]]


def echo(request: Request) -> Sequence[int]:
    """Repeats the prompt."""
    return tuple(request.prompt) * (request.max_tokens // len(request.prompt) + 1)


class Told:
    """A script that generates the text `says`, and records the prompts."""

    def __init__(self) -> None:
        self.says, self.prompts = "", list[str]()

    def __call__(self, request: Request) -> Sequence[int]:
        self.prompts.append(bytes(request.prompt).decode())
        return self.says.encode()


@dataclasses.dataclass
class Pool:
    size: int
    in_use: int = 0


@dataclasses.dataclass
class Row:
    request: Request
    most: int
    pages: int
    tokens: list[int] = dataclasses.field(default_factory=list)


class Scheduler:
    """Rows, with counts of pages and slots in use, so that a test can find leaks."""

    def __init__(self, limits: Limits):
        self.pages, self.slots = Pool(limits.pages), Pool(limits.batch)
        self.rows: dict[int, Row] = {}
        self.preemptions = 0
        self.waiting: collections.deque[Request] = collections.deque()

    def admit(self, request: Request, most: int) -> None:
        assert request.id is not None
        row = Row(request, most, -(-(len(request.prompt) + most) // PAGE))
        self.rows[request.id] = row
        self.slots.in_use += 1
        self.pages.in_use += row.pages

    def release(self, id: int) -> Row:
        row = self.rows.pop(id)
        self.slots.in_use -= 1
        self.pages.in_use -= row.pages
        return row


class Seal:
    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()


class ScriptedEngine:
    """Generates one token per row and step, or `tokens` for a row that nobody watches.

    Attributes:
        script: The answer to a request, after which its row ends by itself.
        step_seconds: The duration of a step.
        failures: The number of next steps that fail, as with a device error.
        hold: A step waits while this event is clear.
        before_step: Called in the device thread before each step. For example, `LiveServer.settle`
            lets the event loop write each step's tokens before the next step.
        added: All requests so far.
    """

    def __init__(
        self,
        script: Script = echo,
        limits: Limits = LIMITS,
        step_seconds: float = 0.0,
        tokens: int = 1,
    ):
        self.tokens = tokens
        self.script, self.limits, self.step_seconds = script, limits, step_seconds
        self.plan = MemoryPlan((PlanItem("weights", 1000, "of a test"),))
        self.seal, self.scheduler, self.prefixes = Seal(), Scheduler(limits), PrefixCacheStats()
        self.stats = GenerationStats()
        self.failures = 0
        self.hold = threading.Event()
        self.hold.set()
        self.before_step: Callable[[], object] = lambda: None
        self.added: list[Request] = []
        self.closed = False
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.rows or self.scheduler.waiting or self._events)

    def add(self, request: Request) -> int:
        assert request.id is not None
        waiting = [each.id for each in self.scheduler.waiting]
        if request.id in self.scheduler.rows or request.id in waiting:
            raise ValueError(f"a request with id {request.id} is running or waiting")
        self.added.append(request)
        self.scheduler.waiting.append(request)
        return request.id

    def abort(self, id: int) -> bool:
        if id in self.scheduler.rows:
            self._end(id, FinishReason.ABORTED)
            return True
        for request in self.scheduler.waiting:
            if request.id == id:
                self.scheduler.waiting.remove(request)
                self._events.append(FinishEvent(Completion(request, (), FinishReason.ABORTED)))
                return True
        return False

    def step(self) -> list[Event]:
        self.hold.wait()
        self.before_step()
        time.sleep(self.step_seconds)
        while self.scheduler.waiting and len(self.scheduler.rows) < self.limits.batch:
            request = self.scheduler.waiting.popleft()
            room = self.limits.max_model_len - len(request.prompt)
            self.scheduler.admit(request, min(request.max_tokens, room))
        if self.failures:
            self.failures -= 1
            for id in list(self.scheduler.rows):
                self._end(id, FinishReason.FAILED, "the device is lost")
            raise RuntimeError("the device is lost")
        for id, row in list(self.scheduler.rows.items()):
            several = 1 if row.request.watched or not row.tokens else self.tokens
            for _ in range(several):
                if id in self.scheduler.rows:
                    self._advance(id, row)
        events, self._events = self._events, []
        return events

    def _advance(self, id: int, row: Row) -> None:
        if row.request.pooling is not None:
            self._end(id, FinishReason.LENGTH, "max_tokens")
            return
        script, stops = self.script(row.request), row.request.stop_tokens
        token = script[len(row.tokens)] if len(row.tokens) < len(script) else None
        assert not isinstance(stops, int)
        if token is None or token in stops:
            self._end(id, FinishReason.STOP, token)
            return
        row.tokens.append(token)
        self._events.append(TokenEvent(row.request, token))
        if row.request.ends_at is not None and row.request.ends_at(token):
            self._end(id, FinishReason.STOP, "ends_at")
        elif len(row.tokens) == row.most:
            self._end(id, FinishReason.LENGTH, "max_tokens")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        self.closed = True

    def _end(self, id: int, reason: FinishReason, detail: str | int | None = None) -> None:
        row = self.scheduler.release(id)
        done = Completion(row.request, tuple(row.tokens), reason, detail)
        if row.request.pooling is not None and reason is FinishReason.LENGTH:
            embedding = np.full(HIDDEN, len(row.request.prompt), np.float32)
            done = dataclasses.replace(done, embedding=embedding)
        self._events.append(FinishEvent(done))
