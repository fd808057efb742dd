"""Segments: from a list of layer kinds, the shortest patterns, in order."""

import itertools
import random
import time

import pytest

from jaxattn.models.network.layer_segments import MOST_LAYERS, LayerSegment, derive


def written(segments):
    return [("".join(segment.pattern), segment.repeats) for segment in segments]


@pytest.mark.parametrize(
    "kinds, wanted",
    [
        ("d" * 3 + "e" * 58, [("d", 3), ("e", 58)]),  # DeepSeek-V3: dense, then experts
        ("gggm" * 12, [("gggm", 12)]),  # Qwen3-Next
        ("d" + "kkm" + "kkkm" * 5 + "kkkm", [("d", 1), ("k", 2), ("m", 1), ("kkkm", 6)]),
        ("a", [("a", 1)]),
        ("aab", [("a", 2), ("b", 1)]),
        ("abab", [("ab", 2)]),
        ("AAAABABAB", [("A", 3), ("AB", 3)]),
    ],
)
def test_known_lists(kinds, wanted):
    found = derive(kinds)
    cost = sum(len(segment.pattern) for segment in found)
    assert cost <= sum(len(pattern) for pattern, _ in wanted)
    if cost == sum(len(pattern) for pattern, _ in wanted):
        assert len(found) <= len(wanted)
    assert "".join("".join(s.pattern) * s.repeats for s in found) == kinds
    assert [s.first for s in found] == list(
        itertools.accumulate((len(s.pattern) * s.repeats for s in found[:-1]), initial=0)
    )


def test_kimi_linear_has_a_prefix_a_body_and_a_tail():
    """27 layers, MLA at 4, 8, ... 24 and 27; the first has a dense MLP."""
    kinds = ["dense KDA", *["KDA"] * 26]
    for layer in (4, 8, 12, 16, 20, 24, 27):
        kinds[layer - 1] = "MLA"
    segments = derive(kinds)
    assert segments[0] == LayerSegment(0, ("dense KDA",), 1)
    assert max(segment.repeats for segment in segments) == 6
    assert sum(len(segment.pattern) for segment in segments) <= 9


def brute_force(kinds):
    """The least (layers of all patterns, segments) over all ways to cut the list."""
    if not kinds:
        return 0, 0
    best = None
    for period in range(1, len(kinds) + 1):
        for repeats in range(1, len(kinds) // period + 1):
            if kinds[:period] * repeats != kinds[: period * repeats]:
                break
            rest = brute_force(kinds[period * repeats :])
            cost = period + rest[0], 1 + rest[1]
            best = cost if best is None else min(best, cost)
    return best


def test_no_cut_is_shorter():
    draw = random.Random(0)
    for _ in range(300):
        kinds = "".join(draw.choices("ab", k=draw.randint(1, 9)))
        found = derive(kinds)
        cost = sum(len(segment.pattern) for segment in found), len(found)
        assert cost == brute_force(kinds), kinds


def test_the_longest_list_takes_no_minutes():
    started = time.perf_counter()
    assert written(derive("a" * MOST_LAYERS)) == [("a", MOST_LAYERS)]
    derive("".join(random.Random(1).choices("ab", k=MOST_LAYERS)))
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize("count", [0, MOST_LAYERS + 1])
def test_no_layers_or_too_many_are_refused(count):
    with pytest.raises(ValueError, match=f"from 1 to 1,024 layers; got {count:,}"):
        derive(["a"] * count)
