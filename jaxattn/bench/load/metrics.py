"""Metrics of a load test: throughput and latency percentiles, from the outcomes of requests."""

import math
from collections.abc import Sequence
from typing import Any

from jaxattn.bench.load.client import RequestOutcome

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is at least as large as `percent`% of all; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def measured(load: str, outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """A row with the throughput in requests and tokens per second, and latencies in milliseconds.

    The latencies are those of `bench serve`. Failed requests enter only the number of failed
    requests and the lateness.
    """
    good = [each for each in outcomes if each.error is None]
    begun = min((each.due for each in outcomes), default=0.0)
    seconds = max((each.ended for each in outcomes), default=0.0) - begun
    row: dict[str, Any] = {"load": load, "ok": len(good), "failed": len(outcomes) - len(good)}
    if not good:
        return row
    answer = sum(each.answer for each in good)
    row |= {
        "s": seconds,
        "req/s": len(good) / seconds,
        "out tok/s": answer / seconds,
        "all tok/s": (answer + sum(each.prompt for each in good)) / seconds,
    }
    times = {
        "TTFT": [each.first for each in good],
        "ITL": [gap for each in good for gap in each.gaps],
        "TPOT": [each.per_token for each in good if each.answer > 1],
        "E2E": [each.whole for each in good],
    }
    for name, values in times.items():
        for percent in PERCENTILES:
            row[f"{name} p{percent} ms"] = 1e3 * percentile(values, percent)
    row["late p99 ms"] = 1e3 * percentile([each.sent - each.due for each in outcomes], 99)
    return row
