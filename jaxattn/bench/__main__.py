"""`python -m jaxattn.bench {mla,mla-prefill,gdn,step}`: checks, then times; a table and JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxattn.bench import gdn_decode, gdn_prefill, mla, mla_prefill, step
from jaxattn.bench.timing import ceilings, device_facts

MODULES: dict[str, list[Any]] = {
    "mla": [mla],
    "mla-prefill": [mla_prefill],
    "gdn": [gdn_decode, gdn_prefill],
}


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
    parser.add_argument("what", choices=(*MODULES, "step"), help="what to measure")
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), help="None: the best")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try it on a CPU")
    parser.add_argument("--all", action="store_true", help="every published shape")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not args.small:
        parser.error(
            f"the shapes are a GPU's and JAX's backend is {jax.default_backend()!r}: add --small"
        )

    facts: dict[str, Any] = device_facts()
    if not args.small:
        facts |= ceilings()
    tables = []
    if args.what == "step":
        tables.append(step.measure(small=args.small, implementation=args.implementation))
    for module in MODULES.get(args.what, []):
        tables.append([])
        shapes = module.SMALL_SHAPES if args.small else module.SHAPES
        if args.all:
            shapes += getattr(module, "MORE_SHAPES", ())
        for shape in shapes:
            tables[-1].append(module.measure(shape, args.implementation))
            print(f"{args.what} {tables[-1][-1]}", file=sys.stderr, flush=True)
    print(json.dumps(facts))
    for rows in tables:
        show(f"jaxattn {args.what} on {facts['device']}", rows)
    if args.json:
        args.json.write_text(
            json.dumps({**facts, "what": args.what, "rows": sum(tables, [])}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
