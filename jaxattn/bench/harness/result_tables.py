"""Display and storage of a run's result tables."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(title: str, rows: list[dict], *, width: int = 150) -> None:
    """Prints a table; a column that only some rows have is empty in the others."""
    table = Table(title=title)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row.get(name, "") for name in names))
    Console(width=width).print(table)


def _cells(values: Iterable[Any]) -> Iterable[str]:
    for value in values:
        if not isinstance(value, float):
            yield str(value)
        elif value < 100:
            yield f"{value:.3g}"
        else:
            yield f"{value:.1f}"


def store(result: dict[str, Any], path: Path | None) -> None:
    """Writes a run's JSON, if it is wanted; a run that is cut short keeps what was stored last."""
    if path:
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(path)
