"""Markdown tables of stored runs: rows, cells and columns."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Row = dict[str, Any]
Cell = Callable[[Row], str]


RUN_FIELDS = ("model", "options", "requests")


def rows_of(run: str) -> Iterator[Row]:
    """Yields the rows of `benchmarks/results/RUN.json`, or of several.

    Each row has the model, the options and the number of requests, if its run names them.
    """
    paths = sorted(RESULTS.glob(f"{run}.json"))
    if not paths:
        raise FileNotFoundError(f"no stored run {RESULTS / run}.json")
    for path in paths:
        stored = json.loads(path.read_text())
        named = {name: stored[name] for name in RUN_FIELDS if name in stored}
        for row in stored["rows"]:
            yield named | row


def text(key: str) -> Cell:
    return lambda row: str(row.get(key, ""))


def number(key: str, decimals: int = 1, times: float = 1) -> Cell:
    """A decimal number; empty if the run has none."""

    def cell(row: Row) -> str:
        value = row.get(key, "")
        return "" if value == "" else f"{value * times:.{decimals}f}"

    return cell


def count(key: str) -> Cell:
    """A whole number with thousands separators; empty if the run has none."""
    return lambda row: f"{row[key]:,.0f}" if key in row else ""


def percent(key: str) -> Cell:
    return lambda row: f"{row[key]:.0%}" if key in row else ""


def faster(ours: str, theirs: str, who: str) -> Cell:
    """Who takes less time, and how much less: "FlashMLA, 4%"; "neither" below 0.5%."""

    def cell(row: Row) -> str:
        if "" in (row.get(ours, ""), row.get(theirs, "")):
            return ""
        least, most = sorted((row[ours], row[theirs]))
        if 1 - least / most < 0.005:
            return "neither"
        name = "jaxattn" if row[ours] == least else who
        return f"{name}, {1 - least / most:.0%}"

    return cell


def faster_than_all(ours: str, others: dict[str, str]) -> Cell:
    """`faster` compared with the fastest of `others`, which maps names to keys of times."""

    def cell(row: Row) -> str:
        times = {who: row[key] for who, key in others.items() if row.get(key, "") != ""}
        if not times:
            return ""
        who = min(times, key=times.__getitem__)
        return faster(ours, others[who], who)(row)

    return cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A Markdown table of one run's rows.

    Attributes:
        run: The name of the run's file without ".json"; may contain a `*`.
        columns: Maps titles to cells. The table omits a column that is empty in all rows.
        where: Selects the rows to show.
        missing: The text to show while the run does not exist; None if the run has to exist.
    """

    run: str
    columns: dict[str, Cell]
    where: Callable[[Row], bool] = lambda row: True
    missing: str | None = None

    def __call__(self) -> str:
        if self.missing is not None and not list(RESULTS.glob(f"{self.run}.json")):
            return self.missing
        return table_of(self.columns, [row for row in rows_of(self.run) if self.where(row)])


def table_of(columns: dict[str, Cell], rows: list[Row]) -> str:
    """The rows in Markdown, without columns that are empty in all of them."""
    filled = {
        title: cells for title, cell in columns.items() if any(cells := [cell(row) for row in rows])
    }
    return markdown(list(filled), [list(row) for row in zip(*filled.values(), strict=True)])


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    if not rows:
        raise ValueError(f"no rows for the table {titles}")
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the README's table: one shape of one run, compared with one other library.

    Attributes:
        what: The shape in words.
        timed: How both were timed.
        run: The stored run that contains both.
        shape: The first columns of its row.
        ours, theirs: Columns of the run.
        who: The other library.
    """

    what: str
    timed: str
    run: str
    shape: dict[str, str]
    ours: str
    theirs: str
    who: str

    def cells(self) -> list[str]:
        [row] = [row for row in rows_of(self.run) if self.shape.items() <= row.items()]
        times = 1000 if self.ours.endswith("ms") else 1
        return [
            self.what,
            self.timed,
            number(self.ours, times=times)(row),
            f"{self.who}: {number(self.theirs, times=times)(row)}",
            faster(self.ours, self.theirs, self.who)(row),
        ]
