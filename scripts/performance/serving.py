"""Tables of whole requests compared with vLLM, and their summary for the README."""

from jaxattn.bench.harness.speedup_report import OURS, THEIRS, summary, times_as_fast, verdict
from scripts.performance.cells import (
    RESULTS,
    Cell,
    Row,
    Table,
    markdown,
    number,
    rows_of,
    text,
)

OFFLINE, SERVE = "offline-*", "serve-*"
DEFAULT = "default"  # options of a run with default options
NOT_RUN = (
    "No run of `python -m jaxattn.bench {}` with default options is stored yet, so we do not know "
    "who is faster."
)


def figure(name: str) -> Cell:
    """An engine's value with its unit: "12.23 s"."""

    def cell(row: Row) -> str:
        if name not in row:
            return ""
        decimals = 0 if row["unit"].endswith("/s") else 2
        return f"{number(name, decimals)(row)} {row['unit']}"

    return cell


def result(row: Row) -> str:
    """The verdict in words."""
    return verdict(times_as_fast(row))


def table(run: str, command: str) -> Table:
    """The table of all runs of a command, without memory, which does not measure speed."""
    columns = {"model": text("model"), "what": text("what"), OURS: figure(OURS)}
    columns |= {THEIRS: figure(THEIRS), "our options": text("options"), "result": result}
    return Table(
        run=run,
        where=lambda row: row["unit"] != "GB",
        columns=columns,
        missing=NOT_RUN.format(command),
    )


def compared() -> str:
    """Returns a table with the times of runs with default options, and a list.

    The list gives, for each set of options, the number of measures in which an engine is faster.
    It names the losses of servers and of runs with other options.
    """
    lines = []
    rows = _compared_rows(OFFLINE)
    if default := [row for row in rows if row["options"] == DEFAULT]:
        lines += [_times(default), ""]
    else:
        lines.append(f"- No run with default options and {THEIRS} is stored yet.")
    for options in (DEFAULT, *sorted({row["options"] for row in rows} - {DEFAULT})):
        found = [row for row in rows if row["options"] == options]
        said, lost = _summarized(found, f"with {_options(options)}")
        lines += [*said, *(f"    - {each}" for each in lost if options != DEFAULT)]
    servers = _compared_rows(SERVE)
    counts = sorted({f"{row['requests']:,}" for row in servers if "requests" in row})
    how = f" and {' or '.join(counts)} requests per load" if counts else ""
    said, _ = _summarized(servers, f"behind HTTP with default options{how}")
    lines += [line + _losses(servers) for line in said]
    return "\n".join(lines)


def _compared_rows(run: str) -> list[Row]:
    found = rows_of(run) if list(RESULTS.glob(f"{run}.json")) else []
    return [row for row in found if OURS in row and THEIRS in row]


def _summarized(rows: list[Row], how: str) -> tuple[list[str], list[str]]:
    """Returns (the list's line for some rows, or none; a sentence for each loss)."""
    if not rows:
        return [], []
    said, lost = summary([row | {"what": f"{row['model']}, {row['what']}"} for row in rows])
    *others, last = sorted({row["model"] for row in rows})
    models = f"{', '.join(others)} and {last}" if others else last
    said = said.replace(" measures ", " [measures](docs/performance.md#whole-requests) ", 1)
    return [f"- {models} {how}: {said}"], lost


def _losses(rows: list[Row]) -> str:
    """Returns " Losses of NAME, 8 req/s: TTFT p50 (0.86 times as fast)." for each model and load
    with losses."""
    lost: dict[str, list[str]] = {}
    for row in rows:
        if (times := times_as_fast(row)) and times < 1:
            *load, what = row["what"].split(", ")
            where = ", ".join([row["model"], *load])
            lost.setdefault(where, []).append(f"{what} ({times:.2f} times as fast)")
    return "".join(f" Losses of {where}: {', '.join(whats)}." for where, whats in lost.items())


def _times(rows: list[Row]) -> str:
    """Returns a table with a row for each model and a column for each time.

    A cell contains our time first; the smaller time is bold.
    """
    ours, theirs = figure(OURS), figure(THEIRS)
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["unit"] in ("s", "ms"):
            pair = [ours(row), theirs(row)]
            faster = int((times_as_fast(row) or 1) < 1)
            pair[faster] = f"**{pair[faster]}**"
            cells.setdefault(row["model"], {})[row["what"]] = ", ".join(pair)
    whats = list(dict.fromkeys(what for model in cells.values() for what in model))
    found = [[name, *(model.get(what, "") for what in whats)] for name, model in cells.items()]
    return markdown([f"{OURS}, {THEIRS}", *whats], found)


def _options(options: str) -> str:
    return f"{options} options" if options == DEFAULT else options
