"""Replay of the executables of `jaxattn.bench.host.host_overhead`'s rounds without the engine.

An engine reads the prompts of the rounds anew, in the same order, and is stopped there. Its own
executable goes on from its own state and rows, so nothing is copied. Pages are those of the rounds:
the scheduler plans each call as it does in a round, and the device is told of all of them first.
So tokens, lengths, pages and experts are the same, and `host` compares the tokens.
"""

import dataclasses
import statistics
import time
from collections import deque

import jax
import numpy as np

from jaxattn.engine.engine import Engine
from jaxattn.engine.execution.overlap_loop import ROUNDS_AHEAD
from jaxattn.engine.requests.request import Request
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps.model_steps import round_of
from jaxattn.engine.steps.token_selection import FinishCode

PROMPT = b"def f("
BURST = 4  # calls that no queue holds up
CALLS = 200  # of which the median call is taken, at most
WARM = 32  # tokens of the last row behind its first that do not count


def requests(rows: int, steps: int) -> list[Request]:
    """Of a run. Each prompt is read in a round of its own, and all rows end together or nearly."""
    return [
        Request(PROMPT, max_tokens=generated(rows, steps) - place, id=place)
        for place in range(rows)
    ]


def generated(rows: int, steps: int) -> int:
    """Tokens of the first row: it goes on until the last to begin has its steps."""
    return 2 * WARM + steps + rows + 8


@dataclasses.dataclass(frozen=True)
class ExecutableTimes:
    """Seconds of executables that are sent one after another.

    Attributes:
        whole: of a step, where none is read before all have run.
        read: of a step whose tokens are read, as late as the engine reads them.
        call: of the call that sends one or several, where the queue is short.
        copy: of asking for a call's tokens, without a wait.
        take: of reading them once they are on the host.
        texts: all tokens of each row until the last step that counts.
    """

    whole: float
    read: float
    call: float
    copy: float
    take: float
    texts: list[list[int]]


class EngineReplay:
    """An engine's rows as `rounds` has them where it begins to count.

    Args:
        rows: of the batch; all of it.
        steps: that count, a multiple of the steps of a call.

    Attributes:
        calls: that count.
    """

    def __init__(self, engine: Engine, rows: int, steps: int):
        engine.start()
        loop, runner, scheduler = engine._loop, engine._runner, engine.scheduler
        assert loop is not None and runner is not None
        self.runner, self.several = runner, engine.limits.round_steps
        scheduler.drop_rows()  # pools as new ones: pages come in the rounds' order
        for request in requests(rows, steps):
            engine.add(request)
        while len(scheduler.rows) < rows or not scheduler.rows[rows - 1].tokens:
            engine.step()
        loop.drain()
        self.texts = [list(scheduler.rows[place].tokens) for place in range(rows)]
        warm = -(-(WARM + 1 - len(self.texts[-1])) // self.several)
        self.calls = steps // self.several
        for _ in range(warm + self.calls):
            running, planned = loop._next_running()
            assert running is not None and planned == self.several, (
                "rows read, end, or have no page"
            )
            scheduler.sent(running.moved * planned)
        loop._send_deltas()
        engine._clear()  # the host's side; the device's rows stay until others come
        found = round_of(engine.limits, rows, SamplingMode.GREEDY, self.several)
        self._step, self._weights = engine.executables[str(found)], runner.weights
        self._held = runner.state, runner.rows
        self._places = jax.device_put(np.arange(rows, dtype=np.int32))
        self.tell([self.send() for _ in range(warm)])

    def send(self) -> jax.Array:
        """Sends a call; what it will tell."""
        self._held, told = self._step(self._weights, self._held, self._places)
        return told

    def wait(self) -> None:
        """Until all calls have run."""
        jax.block_until_ready(self._held)

    def tell(self, calls: list[jax.Array]) -> None:
        """Adds tokens to the texts.

        Raises:
            RuntimeError: a row ended.
        """
        for call in calls:
            told = np.asarray(call).reshape(self.several, len(self.texts), -1)
            if (told[:, :, 1] != FinishCode.NONE).any():
                raise RuntimeError("a row of the queue ended before its last step")
            for text, tokens in zip(self.texts, told[:, :, 0].T.tolist(), strict=True):
                text.extend(tokens)

    def give_back(self) -> None:
        """The engine has its state and rows again."""
        self.wait()
        self.runner.state, self.runner.rows = self._held


def queued(engine: Engine, rows: int, steps: int) -> ExecutableTimes:
    """The executable of a round, on its own, through the calls that `rounds` counts.

    `call`, `copy` and `take` are medians of `CALLS` calls, or of as many as count.
    """
    whole, texts = _run(EngineReplay(engine, rows, steps))
    read = _read(EngineReplay(engine, rows, steps))
    calls, copies, takes = _each(EngineReplay(engine, rows, steps))
    return ExecutableTimes(whole / steps, read / steps, calls, copies, takes, texts)


def _run(queue: EngineReplay) -> tuple[float, list[list[int]]]:
    """(seconds until all calls have run, the texts then)."""
    start = time.perf_counter()
    told = [queue.send() for _ in range(queue.calls)]
    queue.wait()
    seconds = time.perf_counter() - start
    queue.tell(told)
    queue.give_back()
    return seconds, queue.texts


def _read(queue: EngineReplay) -> float:
    """Seconds until all calls are read."""
    ahead = ROUNDS_AHEAD if queue.several == 1 else 1
    flights: deque[jax.Array] = deque()
    start = time.perf_counter()
    for _ in range(queue.calls):
        told = queue.send()
        told.copy_to_host_async()
        flights.append(told)
        if len(flights) > ahead:
            np.asarray(flights.popleft())
    for told in flights:
        np.asarray(told)
    seconds = time.perf_counter() - start
    queue.give_back()
    return seconds


def _each(queue: EngineReplay) -> tuple[float, float, float]:
    """Seconds to send a call, to ask for its tokens, and to take them when they have come."""
    burst = min(BURST, queue.calls)
    sends, copies, takes = [], [], []
    for _ in range(min(CALLS, queue.calls) // burst):
        start = time.perf_counter()
        told = [queue.send() for _ in range(burst)][-1]
        sent = time.perf_counter()
        sends.append((sent - start) / burst)
        queue.wait()
        start = time.perf_counter()
        told.copy_to_host_async()
        copies.append(time.perf_counter() - start)
        time.sleep(1e-3)
        start = time.perf_counter()
        np.asarray(told)
        takes.append(time.perf_counter() - start)
    queue.give_back()
    return statistics.median(sends), statistics.median(copies), statistics.median(takes)
