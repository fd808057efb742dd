"""`python -m jaxattn.bench serve URL|MODEL`: latency and throughput of a server under load.

A URL is that of any OpenAI-compatible server. For a MODEL the bench starts our server and, where
vLLM is installed, vLLM's. They run one after the other, with default options, random weights and
the same prompts, which are token ids. vLLM runs first, so a GPU that warms up slows jaxattn down.
MODEL is a shipped configuration, the beginning of its name, or a folder with a config.json.

With --rates, requests arrive at random at each of the rates, regardless of the server, and times
count from when a request was due. With --concurrency, that many requests run at a time. For a MODEL
without either, 128 requests run at a time first. Then requests arrive at --shares of the rate that
the first server reached.
TTFT is the time to the first token, ITL the time between two chunks, and E2E the time of the whole
answer. A step may generate several tokens, whose chunks arrive together. TPOT is a request's mean
time per token after the first. `late` is the delay with which this program sent its requests: if it
is not small, the program itself was the bottleneck.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxattn import __version__
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.engine_options import add_engines, chosen
from jaxattn.bench.harness.result_tables import check_files, show, store
from jaxattn.bench.load.workload import LengthDistribution
from jaxattn.bench.plots.result_plot import BenchPlotError, require_matplotlib

URL = "http://127.0.0.1:8000"
KEYS = ("JAXATTN_API_KEY", "OPENAI_API_KEY")


def parse(argv: list[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "serve", __doc__)
    add_engines(parser, model="URL|MODEL")
    parser.add_argument("--url", help=f"the same as URL (default: {URL})")
    parser.add_argument(
        "--model", help="name of the model (default: the first that the server lists)"
    )
    parser.add_argument("--chat", action="store_true", help="send chats instead of completions")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rates",
        "--rate",
        nargs="+",
        type=_above_0(float),
        default=[],
        metavar="PER_SECOND",
        help="requests per second, which arrive at random; one run for each rate",
    )
    load.add_argument(
        "--concurrency",
        nargs="+",
        type=_above_0(int),
        default=[],
        metavar="N",
        help="concurrent requests; one run for each number",
    )
    load.add_argument(
        "--shares",
        nargs="+",
        type=_above_0(float),
        metavar="SHARE",
        help="rates as fractions of the first server's highest rate, with a MODEL (default: 0.25 "
        "0.5 0.75 1)",
    )
    load.add_argument(
        "--requests",
        type=_above_0(int),
        default=200,
        metavar="N",
        help="number of requests of each run",
    )
    load.add_argument(
        "--warmup", type=int, default=4, metavar="N", help="number of requests before the first run"
    )
    load.add_argument(
        "--seed", type=int, default=0, help="random seed of lengths, words and arrival times"
    )
    lengths = parser.add_argument_group("lengths", "lengths drawn like ShareGPT's, or fixed")
    for option, what in (("--prompt-tokens", "prompt"), ("--answer-tokens", "answer")):
        help = f"tokens of every {what} (default: drawn at random)"
        lengths.add_argument(option, type=_above_0(int), metavar="N", help=help)
    lengths.add_argument(
        "--most-tokens",
        type=_above_0(int),
        default=1024,
        metavar="N",
        help="maximum length that is drawn",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the latencies into this file (needs matplotlib)",
    )
    args = parser.parse_args(argv)
    if args.target and "://" in args.target:
        if args.url:
            parser.error(f"give {args.target} or --url {args.url}, not both")
        args.url, args.target = args.target, None
    if args.target or args.small:
        _check_model(parser, args)
    else:
        args.url = args.url or URL
        if not args.rates and not args.concurrency:
            parser.error("give --rates, --concurrency, or both")
        if args.engine or args.peer_options or args.shares:
            parser.error(
                "--engine, --peer-options and --shares need a MODEL, whose servers the command "
                "starts"
            )
        check_files(parser, args)
    if args.plot is not None:
        try:
            require_matplotlib()  # fail before the measurements
        except BenchPlotError as error:
            parser.error(str(error))
    return args


def _check_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reads the model and its engines; exits with a message if options do not fit them."""
    for name in ("url", "model", "chat", "plot"):
        if getattr(args, name) not in (None, False):
            parser.error(f"--{name} needs a URL, but {args.target or '--small'} is a model")
    if args.shares and (args.rates or args.concurrency):
        parser.error("--shares sets its own rates; leave --rates and --concurrency out")
    if args.small:
        args.prompt_tokens, args.answer_tokens = args.prompt_tokens or 20, args.answer_tokens or 8
    args.choice = chosen(parser, args)


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
        from jaxattn.bench.load import latency_plot, load_test, server_pair
        from jaxattn.bench.load.load_test import LoadTest
        from jaxattn.bench.load.traffic_pattern import LoadPattern
    except ModuleNotFoundError as error:
        print(f"{program} serve needs {error.name}: pip install 'jaxattn[bench]'", file=sys.stderr)
        return 2
    loads = [LoadPattern(rate=rate) for rate in args.rates]
    loads += [LoadPattern(concurrency=number) for number in args.concurrency]
    test = LoadTest(
        lengths=LengthDistribution(args.prompt_tokens, args.answer_tokens, args.most_tokens),
        loads=tuple(loads),
        requests=args.requests,
        warmup=args.warmup,
        seed=args.seed,
        chat=args.chat,
        shares=tuple(args.shares or load_test.TOP_SHARES),
    )
    facts = {
        "requests": args.requests,
        "seed": args.seed,
        "prompt tokens": args.prompt_tokens or "as ShareGPT",
        "answer tokens": args.answer_tokens or "as ShareGPT",
    }
    try:
        if args.url is None:
            return server_pair.run(args, argv, program, test, facts, _said)
        ran = asyncio.run(test.run(args.url, args.model, _key(), _said))
    except (load_test.ServerUnreachable, server_pair.ServerStartError) as error:
        print(f"{program} serve: error: {error}", file=sys.stderr)
        return 2
    result = {"what": "serve", "jaxattn": __version__, "url": args.url, "chat": args.chat}
    result |= facts | ran
    title = f"{result['model']} at {args.url}"
    show(title, result["rows"], width=220)
    store(result, args.json)
    if args.plot is not None:
        latency_plot.draw(result["rows"], title, args.plot)
    return int(any(row["failed"] for row in result["rows"]))


def _key() -> str | None:
    return next((os.environ[name] for name in KEYS if os.environ.get(name)), None)


def _said(row: dict[str, Any], errors: Sequence[str]) -> None:
    """Prints each row when it is done, with its first errors."""
    shown = {
        name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()
    }
    print(shown, *errors[:3], sep="\n  ", file=sys.stderr, flush=True)
