"""`python -m jaxattn.bench offline MODEL`: whole requests through the engine, compared with vLLM.

Each engine runs in its own process, with its default options, random weights of MODEL's shapes and
the same token ids. Where vLLM is installed, it runs first, so a GPU that warms up slows jaxattn
down. MODEL is a shipped configuration, the beginning of its name, or a folder with a config.json.
Decoding is greedy, and every answer has the requested length.

    throughput   requests that all arrive at once: seconds, tokens per second
    prompt       one prompt at a time: time to its first token
    decode       a decode step of B rows of T tokens, while nothing else runs

`start` is the time from the start of the process to the first request: imports, weights and
compilation. `--mix sharegpt` draws the lengths of prompts and answers from log-normal
distributions, from 4 to 1,024 tokens. Their medians are 90 and 150 tokens, and the standard
deviations of the logarithm 1.35 and 1.0. These four numbers are our choice; the bench needs no data
set.
"""

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.engine_options import EngineChoice, add_engines, chosen
from jaxattn.bench.harness.result_tables import store
from jaxattn.bench.harness.speedup_report import OURS, THEIRS, compared, errors, report
from jaxattn.bench.harness.subprocess_group import child_process
from jaxattn.bench.offline.measures import MEASURES
from jaxattn.bench.offline.workload import FIXED, SHAREGPT, OfflineWorkload

WALL_CLOCK = {"name": "the wall clock of whole requests", "version": 1}
TINY = OfflineWorkload(
    requests=6, prompt=20, output=8, prompts=(8, 40), rows=(1, 3), context=64, repeats=2
)


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "offline", __doc__)
    add_engines(parser)
    real = OfflineWorkload()
    for option, what in (
        ("--requests", "number of requests that arrive at once"),
        ("--prompt", "tokens of each prompt"),
        ("--output", "tokens of each answer"),
        ("--context", "tokens of each row in the decode steps"),
        ("--repeats", "number of runs, of which the bench reports the median"),
        ("--seed", "random seed of lengths and token ids"),
    ):
        help = f"{what} (default: {getattr(real, option[2:])})"
        parser.add_argument(option, type=int, metavar="N", help=help)
    for option, what in (
        ("--prompts", "lengths of the prompts that are timed one at a time"),
        ("--rows", "numbers of rows of the decode steps"),
    ):
        help = f"{what} (default: {' '.join(map(str, getattr(real, option[2:])))})"
        parser.add_argument(option, type=int, nargs="+", metavar="N", help=help)
    parser.add_argument(
        "--mix",
        nargs="+",
        dest="mixes",
        choices=(FIXED, SHAREGPT),
        help="lengths of the requests: fixed, drawn like ShareGPT's, or one after the other "
        "(default: fixed)",
    )
    parser.add_argument(
        "--measures",
        nargs="+",
        choices=tuple(MEASURES),
        default=list(MEASURES),
        help="measures to run",
    )
    args = parser.parse_args(argv)
    base = TINY if args.small else real
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in (field.name for field in dataclasses.fields(base))
        if (value := getattr(args, name)) is not None
    }
    args.work = dataclasses.replace(base, **given)
    for name, value in dataclasses.asdict(args.work).items():
        numbers = value if isinstance(value, tuple) else (value,)
        least = 0 if name == "seed" else 1
        if wrong := [each for each in numbers if isinstance(each, int) and each < least]:
            parser.error(f"--{name} must be at least {least}; got {wrong[0]}")
    args.choice = chosen(parser, args)
    return args


def main(argv: Sequence[str], program: str) -> int:
    """Runs the command; returns its exit code: 0, or 1 if an engine failed."""
    args = parse(argv, program)
    choice: EngineChoice = args.choice
    result = run_metadata.begin(
        "offline", program, ["offline", *argv], seed=args.work.seed, method=WALL_CLOCK, device=False
    )
    result |= {
        "model": choice.name,
        "options": "default",
        "work": dataclasses.asdict(args.work),
        "engines": {},
        "errors": list(choice.messages),
        "rows": [],
    }
    rows: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    failed = False
    for engine in choice.engines:
        ran = run_engine(engine, choice, args)
        rows[engine], failed = ran["rows"], failed or bool(ran["failure"])
        result["engines"][engine] = ran["facts"] | {"rows": ran["rows"]}
        result |= {"device": ran["facts"].get("device", result.get("device", ""))}
        result["errors"] += errors(engine, ran["rows"])
        if ran["failure"]:
            result["errors"].append(f"{engine}: {ran['failure']}")
        result["rows"] = compared(rows[OURS], rows[THEIRS])
        store(result, args.json)
    run_metadata.end(result, args.json)
    title = f"{choice.name} on {result['device']}, default options"
    report(title, result["rows"], result["errors"], both=len(choice.engines) > 1)
    return int(failed)


def run_engine(engine: str, choice: EngineChoice, args: argparse.Namespace) -> dict[str, Any]:
    """Runs an engine in its own process; returns its facts, its rows and its failure or None."""
    with choice.folder() as folder, tempfile.TemporaryDirectory() as parent:
        job, lines = Path(parent, "job.json"), Path(parent, "result.jsonl")
        asked = {
            "engine": engine,
            "folder": str(folder),
            "peer options": choice.peer_options,
            "work": dataclasses.asdict(args.work),
            "measures": args.measures,
            "spawned": time.time(),
        }
        job.write_text(json.dumps(asked))
        failure = run_process(job, lines, choice.environment(), args.limit)
        found: dict[str, Any] = {"facts": {}, "rows": [], "failure": failure}
        with contextlib.suppress(FileNotFoundError):
            for line in lines.read_text().splitlines():
                [(kind, value)] = json.loads(line).items()
                found["rows"].append(value) if kind == "row" else found["facts"].update(value)
        return found


def run_process(job: Path, lines: Path, environment: Mapping[str, str], limit: float) -> str | None:
    """Runs an engine's process; returns an error message, or None."""
    command = [sys.executable, "-m", "jaxattn.bench.offline.engine_process", str(job), str(lines)]
    with child_process(command, environment, stdout=sys.stderr) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"its process did not finish within --limit {limit:g} s"
    return f"its process exited with code {code}" if code else None
