"""A comparison of two engines: the ratio of each measure, the faster engine, and the losses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxattn.bench.harness.result_tables import show

OURS, THEIRS = "jaxattn", "vLLM"
HIGHER = ("tok/s", "req/s")  # units in which more is better
LOWER = ("s", "ms")
EQUAL = 0.005  # the largest relative difference that counts as equal

Row = Mapping[str, Any]


def ratio(ours: float, theirs: float, unit: str) -> float | None:
    """The speedup of jaxattn over vLLM; None if the unit does not measure speed."""
    if unit.endswith(HIGHER):
        return ours / theirs if theirs else None
    if unit.split()[-1:] and unit.split()[-1] in LOWER:
        return theirs / ours if ours else None
    return None


def times_as_fast(row: Row) -> float | None:
    """The speedup in a row that contains the values of both engines; else None."""
    if OURS not in row or THEIRS not in row:
        return None
    return ratio(row[OURS], row[THEIRS], row["unit"])


def verdict(times: float | None) -> str:
    """Words such as "jaxattn wins, 1.66 times as fast" or "jaxattn loses, 0.75 times as fast"."""
    if times is None:
        return ""
    if abs(times - 1) <= EQUAL:
        return f"{OURS} and {THEIRS} are equally fast"
    return f"{OURS} {'wins' if times > 1 else 'loses'}, {times:.2f} times as fast"


def compared(ours: Sequence[Row], theirs: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """Returns a row for each measure, in our order; an engine without a value has no column.

    Args:
        ours, theirs: Rows with `what`, `unit` and `value`, or with `what` and `error`.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, rows in ((OURS, ours), (THEIRS, theirs)):
        for row in rows:
            if "error" not in row:
                key = row["what"], row["unit"]
                cells = found.setdefault(key, {"what": key[0], "unit": key[1]})
                cells[name] = row["value"]
    for cells in found.values():
        times = times_as_fast(cells)
        if times is not None:
            cells |= {"times as fast": times, "result": verdict(times)}
    return list(found.values())


def errors(engine: str, rows: Iterable[Row]) -> list[str]:
    """One line for each measure that an engine could not give, with the reason."""
    return [f"{engine}, {row['what']}: {row['error']}" for row in rows if "error" in row]


def summary(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """(a sentence that counts wins and losses, a line for each loss) of a whole comparison."""
    known = [(row, times) for row in rows if (times := times_as_fast(row)) is not None]
    if not known:
        return f"No measure of {THEIRS} succeeded, so there is no comparison.", []
    lost = [
        f"{row['what']}, {row['unit']}: {verdict(times)}"
        for row, times in known
        if times < 1 - EQUAL
    ]
    won = sum(times > 1 + EQUAL for _, times in known)
    said = f"{OURS} is faster than {THEIRS} in {won} of {len(known)} measures and slower in "
    return f"{said}{len(lost) or 'none'}.", lost


def report(title: str, rows: Sequence[Row], errors: Iterable[str], *, both: bool) -> None:
    """Prints the table, the errors, and, if both engines ran, wins and losses."""
    show(title, [dict(row) for row in rows])
    for line in errors:
        print(line)
    if both:
        said, lost = summary(rows)
        print("\n  ".join((said, *lost)))
