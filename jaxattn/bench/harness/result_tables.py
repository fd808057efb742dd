"""Display and storage of a run's result tables."""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(title: str, rows: list[dict], *, width: int = 150) -> None:
    """Prints a table; a cell is empty if its row lacks the column."""
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


def run_json(result: dict[str, Any]) -> str:
    """A run as JSON with one measurement per line, so that a diff of two runs shows whole rows."""

    def value(found: Any, indent: str) -> str:
        inner = indent + " "
        if isinstance(found, dict) and found and (not indent or _all_hold_more(found.values())):
            parts = [f"{json.dumps(name)}: {value(each, inner)}" for name, each in found.items()]
            around = "{}"
        elif isinstance(found, list) and found and _all_hold_more(found):
            parts, around = [json.dumps(each) for each in found], "[]"
        else:
            return json.dumps(found)
        lines = ",\n".join(inner + part for part in parts)
        return f"{around[0]}\n{lines}\n{indent}{around[1]}"

    return value(result, "") + "\n"


def _all_hold_more(values: Iterable[Any]) -> bool:
    return all(isinstance(value, dict | list) for value in values)


def check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message if --json or --plot cannot be written, before anything is measured."""
    for name in ("json", "plot"):
        path = getattr(args, name, None)
        if path is None:
            continue
        # JSON is first written to a temporary file in the same folder.
        written = path if name == "plot" and path.exists() else path.parent
        if path.is_dir() or not os.access(written, os.W_OK):
            parser.error(f"--{name} {path}: cannot be written")


def store(result: dict[str, Any], path: Path | None) -> None:
    """Writes a run's JSON if `path` is given; an interrupted run keeps its last stored state."""
    if path:
        partial_path = path.with_name(f"{path.name}.part")
        partial_path.write_text(run_json(result))
        partial_path.replace(path)
