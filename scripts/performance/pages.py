"""The tables of README.md and of some docs, generated from the stored runs of the bench.

    python -m scripts.performance             rewrites the tables
    python -m scripts.performance --check     lists stale tables, exit code 1 if there are any
    python -m scripts.performance --picture   also draws docs/images/mla-decode.svg (matplotlib)

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. tables.py defines its contents.
The text around it is written by hand.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from scripts.performance.picture import digest, draw
from scripts.performance.tables import TABLES

ROOT = Path(__file__).parents[2]
WITH_TABLES = ("performance", "whole-models", "several-gpus", "limits", "caches")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in WITH_TABLES))
PICTURE = ROOT / "docs" / "images" / "mla-decode.svg"
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The page with each of its tables generated from the stored runs.

    Raises:
        KeyError: tables.py does not define a table of the page.
    """
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[3]}", text)


def stale(text: str) -> list[str]:
    """The names of the page's tables that differ from the stored runs."""
    fresh = {place[2]: place[0] for place in PLACE.finditer(written(text))}
    return [place[2] for place in PLACE.finditer(text) if fresh[place[2]] != place[0]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.performance", description="Tables of the docs from stored runs."
    )
    parser.add_argument("--check", action="store_true", help="change nothing, name stale tables")
    parser.add_argument("--picture", action="store_true", help=f"draw {PICTURE.name} too")
    args = parser.parse_args(argv)
    old = 0
    if args.check and digest() not in PICTURE.read_text():
        print(f"{PICTURE.relative_to(ROOT)} is stale: draw it with --picture")
        old += 1
    for page in PAGES:
        text = page.read_text()
        names = stale(text)
        old += len(names)
        for name in names:
            print(f"{page.relative_to(ROOT)}: {name} {'is stale' if args.check else 'rewritten'}")
        if names and not args.check:
            page.write_text(written(text))
    if args.picture:
        draw(PICTURE)
    return 1 if args.check and old else 0
