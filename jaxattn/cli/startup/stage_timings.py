"""The timings of the stages between a command's start and its first request."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

_IMPORTED = time.perf_counter()


def since_start(file: Path = Path("/proc/self/stat")) -> float:
    """Returns the seconds since the process began, or since this import if that is unknown."""
    try:
        # The program's name, in parentheses, may contain spaces.
        fields = file.read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, IndexError, ValueError, AttributeError):
        return time.perf_counter() - _IMPORTED


class StageTimings:
    """The durations of successive stages, from the start of the process on.

    Attributes:
        seconds: The duration of each stage that has ended, by its name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def ended(self, name: str) -> None:
        """Records the end of a stage, which began at the end of the stage before it."""
        self.seconds[name] = since_start() - self.total

    def line(self) -> str:
        """Returns all stages in one line."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"ready {self.total:.1f} s after the start: {parts}"


def executable_lines(seconds: dict[str, float], code: int) -> Iterable[str]:
    """Yields lines with the executables, and the time to trace, lower and compile each.

    Args:
        seconds: The time of each executable, by its name.
        code: The total bytes of machine code; 0 if unknown.
    """
    size = f", {code / 2**20:,.1f} MiB of code" if code else ""
    yield f"{len(seconds)} executables{size}, in seconds:"
    yield "  " + ", ".join(f"{name} {took:.1f}" for name, took in seconds.items())
