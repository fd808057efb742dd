"""`python -m jaxattn.bench serve`: requests to a server of OpenAI's form, and how long they take.

With --rate requests come at random at each of the rates, whatever the server does, and times count
from when a request was due. With --concurrency so many run at a time. TTFT is the time to the first
token, ITL that between two chunks, E2E that of the whole answer. `late` is how late this program
sent its requests: where it is not small, the program is what was measured.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxattn.bench.harness.result_tables import show, store
from jaxattn.bench.plots.roofline_plot import BenchPlotError, require_matplotlib
from jaxattn.cli.options.parser import ProseHelpFormatter

KEYS = ("JAXATTN_API_KEY", "OPENAI_API_KEY")


def parse(argv: list[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{program} serve",
        description=__doc__,
        formatter_class=ProseHelpFormatter,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="address of the server's root"
    )
    parser.add_argument("--model", help="its name; without it the first that the server lists")
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate",
        nargs="+",
        type=_above_0(float),
        default=[],
        metavar="PER_SECOND",
        help="requests per second that come at random, one run for each rate",
    )
    load.add_argument(
        "--concurrency",
        nargs="+",
        type=_above_0(int),
        default=[],
        metavar="N",
        help="requests that run at a time, one run for each number",
    )
    load.add_argument(
        "--requests",
        type=_above_0(int),
        default=200,
        metavar="N",
        help="requests of each run",
    )
    load.add_argument(
        "--warmup", type=int, default=4, metavar="N", help="requests before the first run"
    )
    load.add_argument("--seed", type=int, default=0, help="seed of lengths, words and times")
    lengths = parser.add_argument_group("lengths", "drawn as ShareGPT has them, or fixed")
    for option, what in (("--prompt-tokens", "prompt"), ("--answer-tokens", "answer")):
        help = f"tokens of every {what}; drawn without it"
        lengths.add_argument(option, type=_above_0(int), metavar="N", help=help)
    lengths.add_argument(
        "--most-tokens", type=_above_0(int), default=1024, metavar="N", help="longest that is drawn"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them (matplotlib)")
    args = parser.parse_args(argv)
    if not args.rate and not args.concurrency:
        parser.error("give --rate, --concurrency, or both")
    if args.plot is not None:
        try:
            require_matplotlib()  # before all the measuring
        except BenchPlotError as error:
            parser.error(str(error))
    return args


def _above_0[T: (int, float)](kind: Callable[[str], T]) -> Callable[[str], T]:
    def parsed(text: str) -> T:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
        return value

    return parsed


def main(argv: list[str], program: str) -> int:
    """Runs the command; returns its exit code: 0, 1 if a request failed, 2 for bad input."""
    args = parse(argv, program)
    try:
        from jaxattn.bench.load import latency_plot, load_test
    except ModuleNotFoundError as error:
        print(f"{program} serve needs {error.name}: pip install 'jaxattn[bench]'", file=sys.stderr)
        return 2
    try:
        result = asyncio.run(load_test.run(args, _key(), _said))
    except load_test.ServerUnreachable as error:
        print(f"{program} serve: error: {error}", file=sys.stderr)
        return 2
    title = f"{result['model']} at {args.url}"
    show(title, result["rows"], width=220)
    store(result, args.json)
    if args.plot is not None:
        latency_plot.draw(result["rows"], title, args.plot)
    return int(any(row["failed"] for row in result["rows"]))


def _key() -> str | None:
    return next((os.environ[name] for name in KEYS if os.environ.get(name)), None)


def _said(row: dict[str, Any], errors: Sequence[str]) -> None:
    """Each row as it comes, and the first errors of it."""
    shown = {
        name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()
    }
    print(shown, *errors[:3], sep="\n  ", file=sys.stderr, flush=True)
