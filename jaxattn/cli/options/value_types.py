"""The argparse types of options: sizes, numbers and times, with errors that state what is valid."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any


def size(text: str) -> int:
    """Parses a positive integer such as '4096' or '4k'; k is 1024 and m is 1024 * 1024."""
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
    """Parses sizes such as '1,8,64'; '0' gives an empty tuple."""
    if text.strip() == "0":
        return ()
    return tuple(size(part) for part in text.split(","))


def number(
    kind: Callable[[str], float], accept: Callable[[Any], bool], wanted: str
) -> Callable[[str], Any]:
    """Returns an argparse type that converts a text with `kind`, and checks it with `accept`.

    Args:
        wanted: A description of the valid values, for the error.
    """

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
    """Parses a number above 0 and at most 1."""
    return number(float, lambda x: 0 < x <= 1, "a fraction: use above 0 and at most 1")(text)


def seconds(text: str) -> float:
    """Parses a finite time above 0."""
    return number(float, lambda x: 0 < x < math.inf, "a time: use seconds above 0")(text)
