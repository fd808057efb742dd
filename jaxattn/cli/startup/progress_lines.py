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
        self._last_report_times: dict[str, float] = {}
        self._count = self._num_compiled = 0

    def begins(self, count: int) -> None:
        with self._lock:
            self._count, self._num_compiled = count, 0
            self._last_report_times["compiling"] = time.perf_counter()
            self.says(f"compiling {count} executables")

    def compiles(self, name: str, *, done: bool) -> None:
        with self._lock:
            task = self._known(f"compiling {name}", total=1)
            if not done:
                return
            self._progress.update(task, completed=1)
            self._num_compiled += 1
            if self._due("compiling", is_last=self._num_compiled == self._count):
                self.says(f"compiled {self._num_compiled} of {self._count}: {name}")

    def moved(self, task_name: str, num_bytes: int, total: int) -> None:
        with self._lock:
            self._progress.update(
                self._known(task_name, total=total, moves=True), completed=num_bytes
            )
            now = time.perf_counter()
            if task_name not in self._began:
                self._began[task_name] = self._last_report_times[task_name] = now
                self.says(f"{task_name} {decimal(total)} of weights")
            if self._due(task_name, is_last=num_bytes >= total):
                took = max(now - self._began[task_name], 1e-6)
                rate = f"{decimal(int(num_bytes / took))}/s after {took:.1f} s"
                self.says(f"{task_name}: {decimal(num_bytes)} of {decimal(total)}, {rate}")

    def says(self, message: str) -> None:
        self._console.print(message)

    def stop(self) -> None:
        """Does nothing, as all lines are printed already."""

    def _due(self, task: str, *, is_last: bool) -> bool:
        now = time.perf_counter()
        if not is_last and now - self._last_report_times[task] < self._every:
            return False
        self._last_report_times[task] = now
        return True


def progress(console: Console) -> ProgressDisplay:
    """Returns the progress output of a start: a display on a terminal, otherwise lines."""
    return (
        ProgressDisplay(console) if console.is_terminal or console.quiet else ProgressLines(console)
    )
