"""`python -m jaxattn.bench host`: the time that the engine's host code adds to a decode step.

`round ms` is the wall time per decode step of `Engine.generate` with callbacks, once all rows
decode. `executable ms` is that of the same executable in a queue (executable_replay.py). It runs
the same steps of the same rows, after another prefill, and reads nothing until all have run. `read
ms` also reads the tokens when the engine would read them, but does nothing with them: it is the
time of JAX itself. `call us` is the host time to dispatch a call while the queue is short, `copy
us` to request its tokens, and `take us` to read them once they have arrived. `exposed us` is `round
ms` less `executable ms`: the time per step for which the device waits for the host. Both kinds of
run alternate, and each column is the median of the runs. `spread us` is the largest exposed time of
a run less the smallest. `host us` is the host's time per step without its waits for the device. It
is hidden while it is shorter than a step. `same tokens` compares the tokens of queue and rounds: if
they differ, the times are not comparable.

With --grammars N, N of the rows follow a grammar in further runs. Each of their steps waits for the
host, which reads the tokens and fills masks before it samples. `N grammars ms` is the wall time per
step of all rows, and `N grammars us` the host's part of it. The vocabulary of these grammars
consists of words.

If a call runs several decode steps (`Limits.steps_per_round`, column `steps`), times are per step,
except `call us`, `copy us` and `take us`, which are per call.

Without a MODEL, the bench runs the embedded model. A MODEL is a shipped configuration, with random
weights.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.result_tables import check_files, show
from jaxattn.bench.host.executable_replay import PROMPT, WARM, generated, queued, requests
from jaxattn.bench.host.word_grammar import maker
from jaxattn.bench.model.model_lookup import UnknownModelError, find
from jaxattn.bench.model.random_weights import random_params
from jaxattn.core.numerics.rope import RopeConfig
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import Completion, FinishReason
from jaxattn.engine.requests.request import Grammar, Request
from jaxattn.limits import MOST_STEPS, Limits
from jaxattn.models import Hybrid, HybridConfig
from jaxattn.models.checkpoint.native_format import EMBEDDED, load
from jaxattn.models.interface import Model

ROUNDS = {"name": "the wall clock of rounds", "version": 2}


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "host", __doc__)
    parser.add_argument("name", nargs="?", metavar="MODEL", help="a shipped configuration")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[4, 64, 256], help="numbers of rows that decode"
    )
    parser.add_argument("--steps", type=int, default=2000, help="counted steps of each run")
    parser.add_argument("--repeats", type=int, default=5, help="number of runs of each kind")
    parser.add_argument(
        "--steps-per-round",
        type=int,
        metavar="N",
        help="steps per call (default: the engine's choice)",
    )
    parser.add_argument(
        "--small", action="store_true", help="use a model of one layer, to compare hosts on a CPU"
    )
    parser.add_argument(
        "--grammars",
        type=int,
        nargs="+",
        metavar="N",
        default=[],
        help="numbers of rows with a grammar, timed in separate runs",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows to this file"
    )
    args = parser.parse_args(argv)
    for option, value in (("--rows", min(args.rows)), ("--steps", args.steps)):
        if value < 1:
            parser.error(f"{option} must be positive; got {value}")
    try:
        Limits(steps_per_round=args.steps_per_round)
    except ValueError as error:
        parser.error(f"--steps-per-round: {error}")
    if wrong := [n for n in args.grammars if not 0 < n <= min(args.rows)]:
        parser.error(f"--grammars must be from 1 to the smallest --rows; got {wrong[0]}")
    if args.grammars and importlib.util.find_spec("llguidance") is None:
        parser.error(
            "--grammars needs llguidance, which is not installed: pip install 'jaxattn[server]'"
        )
    if args.repeats < 1:
        parser.error(f"--repeats must be positive; got {args.repeats}")
    if args.small and args.name:
        parser.error("--small has its own model; leave MODEL out")
    check_files(parser, args)
    if args.name:
        try:
            args.name, _, args.model = find(args.name)
        except UnknownModelError as error:
            parser.error(str(error))
    return args


def model_of(args: argparse.Namespace) -> tuple[str, Model, Any]:
    """Returns (name, model, parameters)."""
    if args.small:
        config = HybridConfig(
            vocab_size=256, hidden_size=16, intermediate_size=16, num_repeats=1, gdn_per_repeat=0,
            num_attention_heads=1, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
            v_head_dim=8, rope=RopeConfig(dim=8), max_position_embeddings=8192,
        )  # fmt: skip
        return "one layer", Hybrid(config), Hybrid(config).init_params(jax.random.key(0))
    if args.name:
        return args.name, args.model, random_params(args.model)
    config, params = load(EMBEDDED)
    return "embedded", Hybrid(config), params


@dataclasses.dataclass(frozen=True)
class HostTimes:
    """Seconds per step of a run.

    Attributes:
        step_seconds: Wall time of a step.
        waited: The part of it in which the host waited for tokens.
        texts: The tokens that each row generated.
    """

    step_seconds: float
    waited: float
    texts: list[tuple[int, ...]]


def rounds(engine: Engine, rows: int, steps: int, grammars: Sequence[Grammar] = ()) -> HostTimes:
    """Runs `generate` with callbacks and times the steps in which all rows decode.

    The first rows follow `grammars`.
    """
    first_timed = WARM + 1
    time_and_wait: dict[int, tuple[float, float]] = {}
    num_tokens = 0

    def on_token(request: Request, token: int) -> None:
        nonlocal num_tokens
        if request.id == rows - 1:  # the row that is prefilled last
            num_tokens += 1
            if num_tokens in (first_timed, first_timed + steps):
                time_and_wait[num_tokens] = time.perf_counter(), engine.stats.waited_seconds

    def on_finish(completion: Completion) -> None:
        if completion.finish_reason != FinishReason.LENGTH:
            raise RuntimeError(
                f"a row ended early: {completion.finish_reason}, {completion.detail}"
            )

    engine.scheduler.drop_rows()  # resets the page pool, so that pages come in the queue's order
    timed_requests = [
        dataclasses.replace(request, grammar=grammar)
        for request, grammar in itertools.zip_longest(requests(rows, steps), grammars)
    ]
    done = engine.generate(timed_requests, on_token=on_token, on_finish=on_finish)
    begin, end = time_and_wait[first_timed], time_and_wait[first_timed + steps]
    whole, waited = (end[0] - begin[0]) / steps, (end[1] - begin[1]) / steps
    return HostTimes(whole, waited, [each.tokens for each in done])


def longest(rows: int, steps: int) -> int:
    """Tokens of the longest row if calls have the maximum number of steps."""
    return len(PROMPT) + generated(rows, whole_calls(steps, MOST_STEPS))


def whole_calls(steps: int, several: int) -> int:
    """`steps` rounded up to whole calls, because timing starts and ends at the end of a call."""
    return -(-steps // several) * several


def differing(run: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> str:
    """Counts the tokens that differ between a queue's rows and the rounds; "yes" if none does."""
    found = [
        other != token
        for text, own in zip(run, alone, strict=True)
        for other, token in itertools.zip_longest(text[: len(own)], own)
    ]
    return f"{sum(found)} of {len(found)} differ" if any(found) else "yes"


def measure(
    model: Model,
    params: Any,
    rows: int,
    steps: int,
    repeats: int,
    several: int | None = None,
    grammars: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns a row of the table.

    Args:
        several: Steps per call; None lets the engine choose.
        grammars: Numbers of rows that follow a grammar, each in its own runs.
    """
    length = longest(rows, steps)
    limits = Limits(
        batch=rows,
        max_model_len=length,
        prefill_chunk=16,
        prefill_rows=1,
        checkpoints=0,
        decode_buckets=(),
        prefill_buckets=(),
        steps_per_round=several,
    )
    began = time.perf_counter()
    with Engine(model, params, limits, workers=os.cpu_count() or 1) as engine:
        seal, several = engine.seal, engine.limits.round_steps
        steps = whole_calls(steps, several)
        rounds(engine, rows, whole_calls(min(steps, 64), several))
        ready = time.perf_counter() - began
        print(f"{rows} rows: compiled and warm in {ready:.1f} s", file=sys.stderr, flush=True)
        runs = [(queued(engine, rows, steps), rounds(engine, rows, steps)) for _ in range(repeats)]
        bound: dict[str, float] = {}
        for count in grammars:
            made = maker(model.vocab_size)
            ran = [rounds(engine, rows, steps, made(count)) for _ in range(repeats)]
            bound[f"{count} grammars ms"] = statistics.median(run.step_seconds for run in ran) * 1e3
            host = statistics.median(run.step_seconds - run.waited for run in ran)
            bound[f"{count} grammars us"] = host * 1e6
        sealed = "; ".join(seal.messages) or "yes"
    same = [differing(run.texts, alone.texts) for alone, run in runs]
    exposed = [run.step_seconds - alone.step_seconds for alone, run in runs]
    return {
        "B": rows,
        "steps": several,
        "executable ms": statistics.median(alone.step_seconds for alone, _ in runs) * 1e3,
        "read ms": statistics.median(alone.read for alone, _ in runs) * 1e3,
        "call us": statistics.median(alone.call for alone, _ in runs) * 1e6,
        "copy us": statistics.median(alone.copy for alone, _ in runs) * 1e6,
        "take us": statistics.median(alone.take for alone, _ in runs) * 1e6,
        "round ms": statistics.median(run.step_seconds for _, run in runs) * 1e3,
        "exposed us": statistics.median(exposed) * 1e6,
        "spread us": (max(exposed) - min(exposed)) * 1e6,
        "host us": statistics.median(run.step_seconds - run.waited for _, run in runs) * 1e6,
        "tokens/s": rows / statistics.median(run.step_seconds for _, run in runs),
        "sealed": sealed,
        "same tokens": next((told for told in same if told != "yes"), "yes"),
    } | bound


def main(argv: Sequence[str], program: str) -> int:
    args = parse(argv, program)
    # The backend reads these as it starts: weights and the caches of 256 rows need most of a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    name, model, params = model_of(args)
    result = run_metadata.begin("host", program, ["host", *argv], method=ROUNDS) | {"model": name}
    result |= {"steps": args.steps, "repeats": args.repeats, "rows": []}
    for rows in args.rows:
        needed = longest(rows, args.steps)
        if needed > model.max_position_embeddings:
            print(
                f"{program} host: {rows} rows of {args.steps} steps need {needed:,} tokens, but "
                f"the model supports {model.max_position_embeddings:,}; use fewer --steps",
                file=sys.stderr,
            )
            return 2
        row = measure(
            model, params, rows, args.steps, args.repeats, args.steps_per_round, args.grammars
        )
        print(json.dumps(row), file=sys.stderr, flush=True)
        result["rows"].append(row)
        run_metadata.end(result, args.json)
    show(f"jaxattn host, {name} on {result['device']}", result["rows"])
    return 0
