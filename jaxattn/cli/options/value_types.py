"""Values of options: sizes, numbers and times, each with what is wanted where one is refused."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any


def size(text: str) -> int:
    """'4096' or '4k' as a positive integer; k is 1024 and m is 1024 * 1024."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    value = 0
    if match:
        value = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: use a positive integer, k for 1024 and m for 1048576, as in "
            "4096 or 4k"
        )
    return value


def sizes(text: str) -> tuple[int, ...]:
    """'1,8,64' as sizes, and '0' as none."""
    if text.strip() == "0":
        return ()
    return tuple(size(part) for part in text.split(","))


def number(
    kind: Callable[[str], float], accept: Callable[[Any], bool], wanted: str
) -> Callable[[str], Any]:
    """An argparse type: `kind` of the text if it is accepted, else an error with what is wanted."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if math.isnan(value) or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def fraction(text: str) -> float:
    """Above 0 and at most 1."""
    return number(float, lambda x: 0 < x <= 1, "a fraction: use above 0 and at most 1")(text)


def seconds(text: str) -> float:
    """A time above 0."""
    return number(float, lambda x: 0 < x < math.inf, "a time: use seconds above 0")(text)
