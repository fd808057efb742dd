"""Tables of whole requests compared with vLLM, and all losses in words."""

from jaxattn.bench.harness.speedup_report import OURS, THEIRS, summary, times_as_fast, verdict
from scripts.performance.cells import RESULTS, Cell, Row, Table, number, rows_of, text

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


def losses() -> str:
    """The comparison in words: all times of runs with default options, then other runs' losses."""
    runs = [run for run in (OFFLINE, SERVE) if list(RESULTS.glob(f"{run}.json"))]
    rows = [
        row | {"what": f"{row['model']}, {row['what']}"}
        for run in runs
        for row in rows_of(run)
        if OURS in row and THEIRS in row
    ]
    lines = []
    if not any(row["options"] == DEFAULT for row in rows):
        lines.append(f"- No run with default options and {THEIRS} is stored yet.")
    for options in (DEFAULT, *sorted({row["options"] for row in rows} - {DEFAULT})):
        if found := [row for row in rows if row["options"] == options]:
            said, lost = summary(found)
            *others, last = sorted({row["model"] for row in found})
            models = f"{', '.join(others)} and {last}" if others else last
            lines.append(f"- {models} with {_options(options)}: {said}")
            lines += [f"    - {each}" for each in (_times(found) if options == DEFAULT else lost)]
    return "\n".join(lines)


def losses_in_brief() -> str:
    """Like `losses`, with one line for the runs with the same options."""
    return losses().replace("\n    - ", " ").replace(" times as fast", " times as fast.")


def _times(rows: list[Row]) -> list[str]:
    """A line with both times for each row that has times."""
    ours, theirs = figure(OURS), figure(THEIRS)
    return [
        f"{row['what']}: {ours(row)}, {THEIRS} {theirs(row)}."
        for row in rows
        if row["unit"] in ("s", "ms")
    ]


def _options(options: str) -> str:
    return f"{options} options" if options == DEFAULT else options
