"""Replay of the executables of `jaxattn.bench.host.host_overhead`'s rounds without the engine.

An engine prefills the prompts of the rounds again, in the same order, and stops. Its own executable
then continues from its own state and rows, so nothing is copied. The pages are those of the rounds:
the scheduler plans each call as in a round, and the device gets all pages first. So tokens,
lengths, pages and experts are the same, and `host` compares the tokens.
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
BURST = 4  # calls that a queue accepts without blocking
CALLS = 200  # maximum number of calls for a median
WARM = 32  # tokens of the last row after its first that do not count


def requests(rows: int, steps: int) -> list[Request]:
    """The requests of a run: each prompt takes a round of its own; all rows end almost together."""
    return [
        Request(PROMPT, max_tokens=generated(rows, steps) - place, id=place)
        for place in range(rows)
    ]


def generated(rows: int, steps: int) -> int:
    """Tokens of the first row, which continues until the last row has run its steps."""
    return 2 * WARM + steps + rows + 8


@dataclasses.dataclass(frozen=True)
class ExecutableTimes:
    """Times in seconds of executables that are dispatched one after another.

    Attributes:
        step_seconds: Per step, if no tokens are read until all calls have run.
        read: Per step, if tokens are read as late as the engine reads them.
        call: For dispatching one call of one or several steps, while the queue is short.
        copy: For requesting a call's tokens, without waiting.
        take: For reading the tokens once they are on the host.
        texts: All tokens of each row, up to the last counted step.
    """

    step_seconds: float
    read: float
    call: float
    copy: float
    take: float
    texts: list[list[int]]


class EngineReplay:
    """An engine's rows in the state in which `rounds` begins to count.

    Args:
        engine: The engine to take the executable and the state from.
        rows: The number of rows, which fill the whole batch.
        steps: The number of counted steps, a multiple of the steps per call.

    Attributes:
        calls: The number of counted calls.
    """

    def __init__(self, engine: Engine, rows: int, steps: int):
        engine.start()
        loop, runner, scheduler = engine._loop, engine._runner, engine.scheduler
        assert loop is not None and runner is not None
        self.runner, self.several = runner, engine.limits.round_steps
        scheduler.drop_rows()  # resets the page pool, so that pages come in the rounds' order
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
            scheduler.sent(running.num_new_tokens * planned)
        loop._send_deltas()
        engine._clear()  # only the host's rows; the device keeps its rows until new ones come
        found = round_of(engine.limits, rows, SamplingMode.GREEDY, self.several)
        self._step, self._weights = engine.executables[str(found)], runner.weights
        self._carried_state = runner.state, runner.rows
        self._row_indices = jax.device_put(np.arange(rows, dtype=np.int32))
        self.tell([self.send() for _ in range(warm)])

    def send(self) -> jax.Array:
        """Dispatches a call and returns its future tokens."""
        self._carried_state, future_tokens = self._step(
            self._weights, self._carried_state, self._row_indices
        )
        return future_tokens

    def wait(self) -> None:
        """Waits until all calls have run."""
        jax.block_until_ready(self._carried_state)

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
        """Returns the state and the rows to the engine."""
        self.wait()
        self.runner.state, self.runner.rows = self._carried_state


def queued(engine: Engine, rows: int, steps: int) -> ExecutableTimes:
    """Times a round's executable by itself, through the calls that `rounds` counts.

    `call`, `copy` and `take` are medians of up to `CALLS` calls.
    """
    whole, texts = _run(EngineReplay(engine, rows, steps))
    read = _read(EngineReplay(engine, rows, steps))
    calls, copies, takes = _each(EngineReplay(engine, rows, steps))
    return ExecutableTimes(whole / steps, read / steps, calls, copies, takes, texts)


def _run(queue: EngineReplay) -> tuple[float, list[list[int]]]:
    """(seconds until all calls have run, all tokens of each row)."""
    start = time.perf_counter()
    future_tokens = [queue.send() for _ in range(queue.calls)]
    queue.wait()
    seconds = time.perf_counter() - start
    queue.tell(future_tokens)
    queue.give_back()
    return seconds, queue.texts


def _read(queue: EngineReplay) -> float:
    """Seconds until the tokens of all calls are read."""
    num_ahead = ROUNDS_AHEAD if queue.several == 1 else 1
    flights: deque[jax.Array] = deque()
    start = time.perf_counter()
    for _ in range(queue.calls):
        future_tokens = queue.send()
        future_tokens.copy_to_host_async()
        flights.append(future_tokens)
        if len(flights) > num_ahead:
            np.asarray(flights.popleft())
    for future_tokens in flights:
        np.asarray(future_tokens)
    seconds = time.perf_counter() - start
    queue.give_back()
    return seconds


def _each(queue: EngineReplay) -> tuple[float, float, float]:
    """Seconds to dispatch a call, to request its tokens, and to read them once they arrived."""
    burst = min(BURST, queue.calls)
    sends, copies, takes = [], [], []
    for _ in range(min(CALLS, queue.calls) // burst):
        start = time.perf_counter()
        future_tokens = [queue.send() for _ in range(burst)][-1]
        sent = time.perf_counter()
        sends.append((sent - start) / burst)
        queue.wait()
        start = time.perf_counter()
        future_tokens.copy_to_host_async()
        copies.append(time.perf_counter() - start)
        time.sleep(1e-3)
        start = time.perf_counter()
        np.asarray(future_tokens)
        takes.append(time.perf_counter() - start)
    queue.give_back()
    return statistics.median(sends), statistics.median(copies), statistics.median(takes)
