"""How a table is made of a stored run: rows, cells, and columns in Markdown."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Row = dict[str, Any]
Cell = Callable[[Row], str]


def rows_of(run: str) -> Iterator[Row]:
    """Rows of `benchmarks/results/RUN.json`, or of several, with their model and their options."""
    paths = sorted(RESULTS.glob(f"{run}.json"))
    if not paths:
        raise FileNotFoundError(f"no stored run {RESULTS / run}.json")
    for path in paths:
        stored = json.loads(path.read_text())
        named = {name: stored[name] for name in ("model", "options") if name in stored}
        for row in stored["rows"]:
            yield named | row


def text(key: str) -> Cell:
    return lambda row: str(row.get(key, ""))


def number(key: str, decimals: int = 1, times: float = 1) -> Cell:
    """A figure; nothing where the run has none."""

    def cell(row: Row) -> str:
        value = row.get(key, "")
        return "" if value == "" else f"{value * times:.{decimals}f}"

    return cell


def count(key: str) -> Cell:
    """A whole number, its thousands apart; nothing where the run has none."""
    return lambda row: f"{row[key]:,.0f}" if key in row else ""


def percent(key: str) -> Cell:
    return lambda row: f"{row[key]:.0%}" if key in row else ""


def faster(ours: str, theirs: str, who: str) -> Cell:
    """Who takes less time, and how much less: "FlashMLA, 4%"; below 0.5% neither."""

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
    """`faster` beside the fastest of others, whose names have the keys of their times."""

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
        run: the name of its file without ".json"; may have a `*`.
        columns: titles, and what of a row stands below them. A column that the run has no figure
            for is left out.
        where: the rows that are shown.
        missing: what stands there while there is no such run; None if there has to be one.
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
    """The rows in Markdown, without the columns that are empty in all of them."""
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
    """A row of the README's table: one shape of one run, beside one other library.

    Attributes:
        what: in words that need no key.
        timed: how both were timed.
        run: the stored run that has both.
        shape: what its row begins with.
        ours, theirs: columns of the run.
        who: the other library.
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
