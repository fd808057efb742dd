"""`python -m jaxattn.bench {mla,gdn,step}`: checks each result, prints a table, writes JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxattn.bench import gdn, mla, step
from jaxattn.bench.timing import ceilings, device_facts


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{v:.3g}" if isinstance(v, float) and v < 100 else v for v in row.values())
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in cells))
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxattn.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("what", choices=("mla", "gdn", "step"), help="what to measure")
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), help="None: the best")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try it on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not args.small:
        parser.error(
            f"the shapes are a GPU's and JAX's backend is {jax.default_backend()!r}: add --small"
        )

    facts: dict[str, Any] = device_facts()
    if not args.small:
        facts |= ceilings()
    if args.what == "step":
        rows = step.measure(small=args.small, implementation=args.implementation)
    else:
        module = mla if args.what == "mla" else gdn
        rows = []
        for shape in module.SMALL_SHAPES if args.small else module.SHAPES:
            rows.append(module.measure(shape, args.implementation))
            print(f"{args.what} {rows[-1]}", file=sys.stderr, flush=True)
    print(json.dumps(facts))
    show(f"jaxattn {args.what} on {facts['device']}", rows)
    if args.json:
        args.json.write_text(
            json.dumps({**facts, "what": args.what, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
