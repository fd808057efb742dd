"""Progress as plain lines, for a stderr that is a file or a pipe."""

import threading
import time

from rich.console import Console
from rich.filesize import decimal

from jaxattn.cli.startup.progress_display import ProgressDisplay

EVERY = 5.0  # seconds between two lines of one task, to keep long logs short


class ProgressLines(ProgressDisplay):
    """A thread-safe printer of progress lines: at the beginning and the end of each task, and every
    few seconds in between.

    Args:
        every: The seconds between two lines of one task; None for EVERY.
    """

    def __init__(self, console: Console, every: float | None = None):
        super().__init__(console)
        self._every = EVERY if every is None else every
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._count = self._done = 0

    def begins(self, count: int) -> None:
        with self._lock:
            self._count, self._done = count, 0
            self._last["compiling"] = time.perf_counter()
            self.says(f"compiling {count} executables")

    def compiles(self, name: str, *, done: bool) -> None:
        with self._lock:
            task = self._known(f"compiling {name}", total=1)
            if not done:
                return
            self._progress.update(task, completed=1)
            self._done += 1
            if self._due("compiling", last=self._done == self._count):
                self.says(f"compiled {self._done} of {self._count}: {name}")

    def moved(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self._progress.update(self._known(what, total=total, moves=True), completed=done)
            now = time.perf_counter()
            if what not in self._began:
                self._began[what] = self._last[what] = now
                self.says(f"{what} {decimal(total)} of weights")
            if self._due(what, last=done >= total):
                took = max(now - self._began[what], 1e-6)
                rate = f"{decimal(int(done / took))}/s after {took:.1f} s"
                self.says(f"{what}: {decimal(done)} of {decimal(total)}, {rate}")

    def says(self, what: str) -> None:
        self._console.print(what)

    def stop(self) -> None:
        """Does nothing, as all lines are printed already."""

    def _due(self, task: str, *, last: bool) -> bool:
        now = time.perf_counter()
        if not last and now - self._last[task] < self._every:
            return False
        self._last[task] = now
        return True


def progress(console: Console) -> ProgressDisplay:
    """Returns the progress output of a start: a display on a terminal, otherwise lines."""
    return (
        ProgressDisplay(console) if console.is_terminal or console.quiet else ProgressLines(console)
    )
