"""A histogram for Prometheus that takes many equal values at once, such as the times of a step's
tokens."""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class WeightedHistogram(Collector):
    """Counts of values by upper bounds, which belong to their buckets.

    Args:
        model: the name that the label `model_name` has.
    """

    def __init__(self, name: str, said: str, model: str, bounds: Sequence[float]):
        self._name, self._said, self._model, self._bounds = name, said, model, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int) -> None:
        """Takes a value so many times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._said, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [*zip(bounds, itertools.accumulate(self._counts), strict=True)]
        family.add_metric([self._model], buckets, self._sum)
        yield family
