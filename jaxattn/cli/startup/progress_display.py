"""The progress display of an engine's start: downloads, loading and compilation."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from jaxattn import interrupt

CURSOR = b"\x1b[?25h\n"  # shows the cursor, which the display hides, and ends the line


class BytesColumn(ProgressColumn):
    """The column of a task that moves bytes: the bytes done, the total and the rate."""

    def render(self, task: Task) -> Text:
        if not task.fields.get("moves"):
            return Text("")
        rate = task.finished_speed or task.speed
        fast = f", {decimal(int(rate))}/s" if rate else ""
        return Text(f"{decimal(int(task.completed))} of {decimal(int(task.total or 0))}{fast}")


class ProgressDisplay:
    """A live display of compilation and byte transfers. It is thread-safe, and empty at first."""

    def __init__(self, console: Console):
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            BytesColumn(),
            console=console,
            disable=console.quiet,
        )
        self._tasks: dict[str, TaskID] = {}

    def begins(self, count: int) -> None:
        """Announces the number of executables to compile. A terminal shows each when it begins."""

    def says(self, message: str) -> None:
        """Announces another stage. A terminal does not show it, as the stage is short."""

    def compiles(self, name: str, *, done: bool) -> None:
        """Reports that the compilation of an executable begins or is done."""
        task = self._task(f"compiling {name}", total=1)
        if done:
            self._progress.update(task, completed=1)

    def moved(self, task_name: str, num_bytes: int, total: int) -> None:
        """Reports the bytes done and in total of a download or load."""
        task = self._task(task_name, total=total, moves=True)
        self._progress.update(task, completed=num_bytes, total=total)

    def tasks(self) -> list[dict[str, Any]]:
        """Returns the tasks that have begun, as JSON objects. It is thread-safe."""
        return [
            {
                "name": task.description,
                "done": task.completed,
                "of": task.total,
                "bytes": bool(task.fields.get("moves")),
            }
            for task in self._progress.tasks
        ]

    def stop(self) -> None:
        """Stops the display, whose last state stays on the terminal."""
        if self._tasks:
            self._progress.stop()
        interrupt.before_end(None)

    def _task(self, name: str, *, total: int, moves: bool = False) -> TaskID:
        if name not in self._tasks:
            self._progress.start()  # only now, as an empty display prints an empty line
            if self._console.is_terminal and not self._console.is_dumb_terminal:
                interrupt.before_end(CURSOR)
        return self._known(name, total=total, moves=moves)

    def _known(self, name: str, *, total: int, moves: bool = False) -> TaskID:
        """Returns a task, and adds it for readers of `tasks` if it is new."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, moves=moves)
        return self._tasks[name]

    def __enter__(self) -> "ProgressDisplay":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
