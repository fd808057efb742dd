"""One display of all that goes on before an engine runs: bytes that move, steps that compile."""

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

CURSOR = b"\x1b[?25h\n"  # shows it: the display hides it, in a line without an end


class BytesColumn(ProgressColumn):
    """Of a task that moves bytes: how many of how many, and how fast."""

    def render(self, task: Task) -> Text:
        if not task.fields.get("moves"):
            return Text("")
        rate = task.finished_speed or task.speed
        fast = f", {decimal(int(rate))}/s" if rate else ""
        return Text(f"{decimal(int(task.completed))} of {decimal(int(task.total or 0))}{fast}")


class ProgressDisplay:
    """Shows what compiles and what moves, from any thread. Without a task it prints nothing."""

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
        """So many executables are compiled next; a terminal shows them as they come."""

    def says(self, what: str) -> None:
        """Something else begins, for which a terminal's reader waits a moment."""

    def compiles(self, name: str, *, done: bool) -> None:
        """An executable begins to be compiled, or is."""
        task = self._task(f"compiling {name}", total=1)
        if done:
            self._progress.update(task, completed=1)

    def moved(self, what: str, done: int, total: int) -> None:
        """So many bytes of what is fetched or loaded."""
        task = self._task(what, total=total, moves=True)
        self._progress.update(task, completed=done, total=total)

    def tasks(self) -> list[dict[str, Any]]:
        """What has begun so far, as JSON; from any thread."""
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
        """Leaves its last state on the terminal."""
        if self._tasks:
            self._progress.stop()
        interrupt.before_end(None)

    def _task(self, name: str, *, total: int, moves: bool = False) -> TaskID:
        if name not in self._tasks:
            self._progress.start()  # not earlier: an empty display prints an empty line
            if self._console.is_terminal and not self._console.is_dumb_terminal:
                interrupt.before_end(CURSOR)
        return self._known(name, total=total, moves=moves)

    def _known(self, name: str, *, total: int, moves: bool = False) -> TaskID:
        """A task that is told to other readers, such as the server's page."""
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
