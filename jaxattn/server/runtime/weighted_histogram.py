"""A Prometheus histogram that records many equal values at once, such as the latencies of the
tokens of one step."""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class WeightedHistogram(Collector):
    """A histogram whose buckets include their upper bounds.

    Args:
        documentation: The help text.
        model: The value of the label `model_name`.
        bounds: The buckets' upper bounds, in ascending order, without infinity.
    """

    def __init__(self, name: str, documentation: str, model: str, bounds: Sequence[float]):
        self._name, self._documentation = name, documentation
        self._model, self._bounds = model, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int) -> None:
        """Records `value` `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [*zip(bounds, itertools.accumulate(self._counts), strict=True)]
        family.add_metric([self._model], buckets, self._sum)
        yield family
