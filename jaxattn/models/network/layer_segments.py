"""Segments of a model: runs of layers that repeat a pattern, each of which becomes one scan.

DeepSeek-V3's 61 layers, three with a dense MLP and 58 with experts, are two segments:

    derive(["dense"] * 3 + ["experts"] * 58)    3 x [dense], 58 x [experts]

The list determines a prefix, a repeating body and a tail; nobody writes them by hand.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from functools import lru_cache

MOST_LAYERS = 1024


@dataclasses.dataclass(frozen=True)
class LayerSegment[Kind]:
    """A pattern of layers repeated `repeats` times; `first` is the index of the first layer."""

    first: int
    pattern: tuple[Kind, ...]
    repeats: int


def derive[Kind: Hashable](kinds: Sequence[Kind]) -> tuple[LayerSegment[Kind], ...]:
    """Returns the segments of a list of layer kinds, in order.

    Each layer of a pattern is compiled once, however often the pattern repeats. The function
    therefore minimizes the total length of the patterns, and then the number of segments.

    Raises:
        ValueError: There are no layers, or more than `MOST_LAYERS`.
    """
    if not 1 <= len(kinds) <= MOST_LAYERS:
        raise ValueError(f"a model must have from 1 to {MOST_LAYERS:,} layers; got {len(kinds):,}")
    names: dict[Kind, int] = {}
    numbers = tuple(names.setdefault(kind, len(names)) for kind in kinds)
    return tuple(
        LayerSegment(first, tuple(kinds[first : first + period]), repeats)
        for first, period, repeats in _shortest(numbers)
    )


@lru_cache(maxsize=64)
def _shortest(kinds: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Returns (first, period, repeats) of each segment, by dynamic programming from the last layer.

    `num_matching[p]` counts the layers from the current one on that equal the layer p further.
    """
    count = len(kinds)
    num_matching = [0] * (count + 1)
    # (layers of all patterns, segments) from a layer on, and the segment that begins there.
    best: list[tuple[int, int]] = [(0, 0)] * (count + 1)
    begin: list[tuple[int, int]] = [(0, 0)] * count
    for layer in reversed(range(count)):
        choice: tuple[tuple[int, int], int, int] | None = None
        for period in range(1, count - layer + 1):
            other = layer + period
            num_matching[period] = (
                num_matching[period] + 1 if other < count and kinds[layer] == kinds[other] else 0
            )
            if choice and period > choice[0][0]:
                continue
            for repeats in range(num_matching[period] // period + 1, 0, -1):
                rest = best[layer + period * repeats]
                cost = (period + rest[0], 1 + rest[1])
                if choice is None or cost < choice[0]:
                    choice = cost, period, repeats
        assert choice is not None
        best[layer], begin[layer] = choice[0], choice[1:]
    segments, layer = [], 0
    while layer < count:
        period, repeats = begin[layer]
        segments.append((layer, period, repeats))
        layer += period * repeats
    return tuple(segments)
