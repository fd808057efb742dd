"""Timings of the stages between a command's start and its first request."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

_IMPORTED = time.perf_counter()


def since_start(file: Path = Path("/proc/self/stat")) -> float:
    """Seconds since the process began; where the system does not say it, since this import."""
    try:
        # The name of the program, in parentheses, may have spaces.
        fields = file.read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, IndexError, ValueError, AttributeError):
        return time.perf_counter() - _IMPORTED


class StageTimings:
    """One stage after another, from the start of the process.

    Attributes:
        seconds: of each stage that has ended, by its name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def ended(self, name: str) -> None:
        """The stage that began where the one before it ended is over."""
        self.seconds[name] = since_start() - self.total

    def line(self) -> str:
        """All of them in one line."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"ready {self.total:.1f} s after the start: {parts}"


def executable_lines(seconds: dict[str, float], code: int) -> Iterable[str]:
    """Which executables there are, and how long each took to trace, lower and compile.

    Args:
        seconds: by the executable's name.
        code: bytes of machine code of all of them; 0 where the platform does not say.
    """
    size = f", {code / 2**20:,.1f} MiB of code" if code else ""
    yield f"{len(seconds)} executables{size}, in seconds:"
    yield "  " + ", ".join(f"{name} {took:.1f}" for name, took in seconds.items())
