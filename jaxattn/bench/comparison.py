"""`python -m jaxattn.bench compare A.json B.json`: the times of two runs, row by row.

The command matches rows by name and prints B / A for each time: below 1, B is faster. It rejects
files of different benches, methods, devices, power limits or seeds, because their times cannot be
compared.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.result_tables import show
from jaxattn.bench.harness.speedup_report import OURS, THEIRS

UNITS = ("us", "ms", "s", "tokens/s", OURS, THEIRS)  # request benches name a column by its engine


class ComparisonError(Exception):
    """Raised for two files whose times cannot be compared; the message gives the reason."""


def load(path: Path) -> dict[str, Any]:
    """Loads a run that `--json` stored.

    Raises:
        ComparisonError: the file cannot be read, or has no rows or no method.
    """
    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise ComparisonError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ComparisonError(f"cannot read {path}: {error}") from error
    if not isinstance(run, dict) or not isinstance(run.get("rows"), list):
        raise ComparisonError(f"{path} is not a result of a bench: it has no rows")
    if "method" not in run:
        raise ComparisonError(
            f"{path} does not state how it was timed, because an older version wrote it; run its "
            "bench again"
        )
    return run


def conditions(run: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that two comparable runs share."""
    fields = {name: run.get(name) for name in ("what", "model", "layouts", "device", "seed")}
    method = run["method"] if isinstance(run["method"], dict) else {"name": run["method"]}
    fields |= {f"method: {name}": value for name, value in method.items()}
    return fields | {"power limit W": run.get("card", {}).get("power limit W")}


def check(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Raises ComparisonError, naming each difference, unless the runs are comparable."""
    ours, theirs = conditions(a), conditions(b)
    different = [
        f"{name}: {ours.get(name)!r} and {theirs.get(name)!r}"
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        raise ComparisonError(f"not comparable, because they differ in {'; '.join(different)}")


def name(row: dict[str, Any]) -> str:
    """The name of a row: all values before the first measured number."""
    leading = itertools.takewhile(lambda value: not isinstance(value, float), row.values())
    return " ".join(map(str, leading))


def compared(a: dict[str, Any], b: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for each time that both runs contain."""
    others = {name(row): row for row in b["rows"]}
    for row in a["rows"]:
        other = others.get(name(row), {})
        for column, value in row.items():
            beside = other.get(column)
            if not (isinstance(value, float) and isinstance(beside, float) and value > 0):
                continue
            if column.split()[-1] in UNITS:
                ratio = f"{beside / value:.3f}"
                yield {"row": name(row), "time": column, "A": value, "B": beside, "B / A": ratio}


def main(argv: Sequence[str], program: str) -> int:
    parser = command_parser(program, "compare", __doc__)
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    args = parser.parse_args(argv)
    try:
        a, b = load(args.a), load(args.b)
        check(a, b)
        rows = list(compared(a, b))
        if not rows:
            raise ComparisonError("the results have no time with the same name")
    except ComparisonError as error:
        print(f"{program} compare: {args.a}, {args.b}: {error}", file=sys.stderr)
        return 2
    show(f"A: {_said(a)}; B: {_said(b)}", rows)
    return 0


def _said(run: dict[str, Any]) -> str:
    return f"{run.get('commit') or 'no commit'} with jax {run.get('jax')}"
