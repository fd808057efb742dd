"""Measures of an engine through its public interface: throughput, single prompts, decode steps.

The code is the same for every engine. An engine gets all requests at once and reports which rows
got a token in each of its steps. Decoding is greedy, and no stop token ends an answer.
"""

import functools
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxattn.bench.offline.workload import OfflineRequest, OfflineWorkload

DECODE_STEPS = 96  # tokens per row for the window in which all rows decode
TOKENS_PER_STEP = 2048  # assumed minimum of prompt tokens per step, for the last row's start
LEAST_STEPS = 12  # steps that the window needs
WARM_TOKENS = 8
OUT, IN = "output tok/s", "input tok/s"

Row = dict[str, Any]


class MeasureError(Exception):
    """Raised if an engine cannot give a measure; the message gives the reason."""


class OfflineEngine(Protocol):
    """An engine that gets all its requests at once.

    Attributes:
        name: The engine's name.
        vocab_size: The number of token ids.
        longest: The maximum number of tokens of a prompt and its answer together.
    """

    name: str
    vocab_size: int
    longest: int

    def generate(self, requests: Sequence[OfflineRequest]) -> None:
        """Serves all requests.

        Raises:
            MeasureError: an answer is shorter than requested.
        """

    def steps(self, requests: Sequence[OfflineRequest]) -> Iterator[list[int]]:
        """Serves all requests; yields, per step, the index of each request that got a token."""

    def facts(self) -> dict[str, Any]:
        """The version, the device and the options in effect."""

    def memory(self) -> dict[str, float]:
        """Memory in GB, by what it is."""


class StepWindow(NamedTuple):
    """The steps in which all rows decode.

    Attributes:
        ms: Milliseconds per step, the median of the window's three thirds.
        steps: The number of steps.
    """

    ms: float
    steps: int


def measured(engine: OfflineEngine, work: OfflineWorkload, what: Iterable[str]) -> Iterator[Row]:
    """Yields the rows of all measures in `what`; the row of a failed measure has an `error`."""
    for name in what:
        for title, take in MEASURES[name](engine, work):
            try:
                yield from take()
            except MeasureError as error:
                yield {"what": title, "error": str(error)}


type Measure = tuple[str, Callable[[], Iterable[Row]]]


def throughput(engine: OfflineEngine, work: OfflineWorkload) -> Iterator[Measure]:
    """Seconds for all requests of each mix, and tokens per second."""

    def take(mix: str) -> Iterator[Row]:
        what, lengths = work.title(mix), work.lengths(mix)
        _check_length(engine, max(sum(pair) for pair in lengths))
        warm = [(tokens, min(answer, WARM_TOKENS)) for tokens, answer in lengths]
        engine.generate(work.draw(f"warm-up {what}", warm[: max(work.rows)], engine.vocab_size))
        runs = [seconds(engine, run) for run in work.runs(what, lengths, engine.vocab_size)]
        middle = statistics.median(runs)
        yield {"what": what, "unit": "s", "value": middle, "runs": runs}
        for place, unit in enumerate((IN, OUT)):
            tokens = sum(pair[place] for pair in lengths)
            yield {"what": what, "unit": unit, "value": tokens / middle}

    for mix in work.mixes:
        yield work.title(mix), functools.partial(take, mix)


def one_prompt(engine: OfflineEngine, work: OfflineWorkload) -> Iterator[Measure]:
    """Milliseconds from a prompt to its first token, with no other request running."""

    def take(tokens: int, what: str) -> Iterator[Row]:
        _check_length(engine, tokens + 1)
        lengths = [(tokens, 1)]
        engine.generate(work.draw(f"warm-up {what}", lengths, engine.vocab_size))
        runs = [seconds(engine, run) * 1e3 for run in work.runs(what, lengths, engine.vocab_size)]
        yield {"what": what, "unit": "ms", "value": statistics.median(runs), "runs": runs}

    for tokens in work.prompts:
        what = f"one prompt of {tokens:,}"
        yield what, functools.partial(take, tokens, what)


def decode(engine: OfflineEngine, work: OfflineWorkload) -> Iterator[Measure]:
    """Milliseconds per decode step while all rows decode and no prompt is prefilled."""

    def take(rows: int, what: str) -> Iterator[Row]:
        answer = DECODE_STEPS + math.ceil(rows * work.context / TOKENS_PER_STEP)
        tokens = max(work.context - answer + DECODE_STEPS // 2, 1)
        _check_length(engine, tokens + answer)
        warm = work.draw(f"warm-up {what}", [(tokens, WARM_TOKENS)] * rows, engine.vocab_size)
        engine.generate(warm)
        requests = work.draw(what, [(tokens, answer)] * rows, engine.vocab_size)
        found = window(stamped(engine.steps(requests)), rows, answer)
        yield {"what": what, "unit": "ms", "value": found.ms, "steps": found.steps}

    for rows in work.rows:
        what = f"decode step, B {rows}, T {work.context:,}"
        yield what, functools.partial(take, rows, what)


MEASURES: dict[str, Callable[[OfflineEngine, OfflineWorkload], Iterator[Measure]]] = {
    "throughput": throughput,
    "prompt": one_prompt,
    "decode": decode,
}


def seconds(engine: OfflineEngine, requests: Sequence[OfflineRequest]) -> float:
    """Seconds that the engine needs for all requests."""
    begin = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - begin


def stamped(steps: Iterator[list[int]]) -> list[tuple[float, list[int]]]:
    """(end time, rows that got a token) of each step that generated a token."""
    return [(time.perf_counter(), rows) for rows in steps if rows]


def window(steps: Sequence[tuple[float, list[int]]], rows: int, answer: int) -> StepWindow:
    """The time per step between the start of the last row and the end of the first row to finish.

    A step may generate several tokens per row, so a step here is one token per row.

    Raises:
        MeasureError: too few steps have all rows.
    """
    given: Counter[int] = Counter()
    points: list[tuple[float, float]] = []  # (seconds, tokens per row so far)
    for moment, got in steps:
        given.update(got)
        if len(given) == rows:
            points.append((moment, given.total() / rows))
        if max(given.values()) >= answer:
            break
    count = points[-1][1] - points[0][1] if points else 0.0
    if len(points) < 4 or count < LEAST_STEPS:
        raise MeasureError(
            f"{rows} rows decoded together for only {count:.0f} steps, but {LEAST_STEPS} are "
            f"timed: {len(given)} rows had begun when the first finished its {answer} tokens. The "
            "engine's batch or cache has room for fewer rows"
        )
    cuts = [round(third * (len(points) - 1) / 3) for third in range(4)]
    thirds = itertools.pairwise(points[cut] for cut in cuts)
    ms = [(after[0] - before[0]) / (after[1] - before[1]) * 1e3 for before, after in thirds]
    return StepWindow(statistics.median(ms), round(count))


def _check_length(engine: OfflineEngine, tokens: int) -> None:
    if tokens > engine.longest:
        raise MeasureError(
            f"{tokens:,} tokens exceed the context of {engine.name}, {engine.longest:,}"
        )
