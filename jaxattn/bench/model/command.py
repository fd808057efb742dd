"""`python -m jaxattn.bench model NAME`: decode and prefill of a whole model with random weights.

NAME is a shipped configuration (`python -m jaxattn.plan --help` lists them) or a folder with a
config.json. The bench compares each decode step with its roofline: the bytes that the step has to
move, at the rate that kernels reach on this GPU. A separate untimed pass counts the experts.
"""

import argparse
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import (
    add_implementation,
    check_implementation,
    command_parser,
)
from jaxattn.bench.harness.measured_peaks import copy_bandwidth, matmul_rate
from jaxattn.bench.harness.result_tables import check_files, show, store
from jaxattn.bench.model import roofline
from jaxattn.bench.model.batches import BenchBatches
from jaxattn.bench.model.expert_usage import moe_layers
from jaxattn.bench.model.model_lookup import UnknownModelError, find
from jaxattn.bench.model.op_categories import OpCategory
from jaxattn.bench.model.random_weights import random_params
from jaxattn.bench.model.steps import ModelSteps, OutOfMemoryError, attempt, check_room, peak_bytes
from jaxattn.bench.plots import result_plot
from jaxattn.cli.options.model_options import add_dense
from jaxattn.memory.plan import nbytes
from jaxattn.models.network.decoder_model import DecoderModel


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "model", __doc__)
    parser.add_argument("name", help="a shipped configuration, or a folder with a config.json")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 32, 128],
        help="numbers of rows of the decode steps",
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens of each row")
    parser.add_argument(
        "--prompt", type=int, default=8192, help="prompt tokens to prefill; 0 means no prefill"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[2048, 8192], help="prompt tokens per step"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of weights, caches and tokens"
    )
    add_implementation(parser)
    add_dense(parser)
    parser.add_argument("--no-peers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole result to this file"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw bars of roofline and time into this file (needs matplotlib)",
    )
    args = parser.parse_args(argv)
    if args.no_peers:
        warnings.warn(
            "bench model times no other engine, so --no-peers has no effect; leave it out, or use "
            "bench offline, which runs vLLM",
            DeprecationWarning,
            stacklevel=2,
        )
    numbers = {"--rows": args.rows, "--chunks": args.chunks, "--context": [args.context]}
    for option, values in numbers.items():
        if min(values) < 1:
            parser.error(f"{option} must be positive; got {min(values)}")
    if args.prompt < 0:
        parser.error(f"--prompt must be 0 or more; got {args.prompt}")
    args.rows, args.chunks = (
        sorted(set(args.rows)),
        sorted({min(c, args.prompt) for c in args.chunks}),
    )
    try:
        args.name, _, args.model = find(args.name, args.dense)
        if args.plot:
            result_plot.require_matplotlib()  # fail before the measurements
    except (UnknownModelError, result_plot.BenchPlotError) as error:
        parser.error(str(error))
    longest = max(args.context, args.prompt)
    if longest > args.model.max_position_embeddings:
        parser.error(
            f"{args.name} supports {args.model.max_position_embeddings:,} tokens; got {longest:,}"
        )
    check_files(parser, args)
    check_implementation(parser, args)
    return args


def main(argv: Sequence[str], program: str) -> int:
    args = parse(argv, program)
    # The backend reads these as it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    result: dict[str, Any] = {
        "what": "model",
        "model": args.name,
        "rows": [],
        "kinds": {},
    }
    result |= run_metadata.begin("model", program, ["model", *argv], seed=args.seed)
    try:
        measure(args, result)
    except OutOfMemoryError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    run_metadata.end(result, args.json)
    report(result)
    if args.plot:
        result_plot.save(result, args.plot)
    return 0


def ceilings() -> dict[str, float]:
    """Peak rates of this run, with sizes that fit next to the weights, or small ones on a CPU."""
    gpu = jax.default_backend() == "gpu"
    return {
        "copy_GB_s": copy_bandwidth(2**28 if gpu else 2**20) / 1e9,
        "matmul_TFLOP_s": matmul_rate(8192 if gpu else 128) / 1e12,
    }


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fills in the rows and the time by kind of op, and stores the result after each step."""
    model: DecoderModel = args.model
    rows = BenchBatches(
        rows=tuple(args.rows), context=args.context, prompt=args.prompt,
        vocab=model.vocab_size, seed=args.seed,
    )  # fmt: skip
    check_room(model, rows)
    params = weights(model, result)
    result |= ceilings()
    rate = roofline.rate(result["device"], result["copy_GB_s"] * 1e9)
    layers = len(model.spec.blocks)
    result |= {"roof_GB_s": rate / 1e9, "layers": layers, "moe_layers": moe_layers(model)}
    begin = time.perf_counter()
    chunks = args.chunks if args.prompt else []
    steps = ModelSteps(model, params, rows, chunks, implementation=args.implementation)
    result["caches_GB"] = nbytes(steps.state) / 1e9
    result["compile_s"] = time.perf_counter() - begin
    say(f"caches of {result['caches_GB']:.1f} GB, compiled in {result['compile_s']:.0f} s")
    touched = steps.touched()
    result["touched"] = {str(count): found for count, found in touched.items()}
    for count in rows.rows:
        add(result, f"decode {count}", *steps.decode(count, touched[count], rate))
        store(result, args.json)
    for chunk in chunks:
        name = f"prefill by {chunk}"
        add(result, name, *attempt(functools.partial(steps.prefill, chunk), name))
        store(result, args.json)
    result["peak_GB"] = (peak_bytes() or 0) / 1e9


def weights(model: DecoderModel, result: dict[str, Any]) -> Any:
    """Returns the parameters; adds their size, time and peak memory to `result`."""
    begin = time.perf_counter()
    params = jax.block_until_ready(random_params(model, seed=result["seed"]))
    result["weights_GB"] = nbytes(params) / 1e9
    result["weights_s"] = time.perf_counter() - begin
    result["weights_peak_GB"] = (peak_bytes() or 0) / 1e9
    say(f"weights of {result['weights_GB']:.1f} GB in {result['weights_s']:.1f} s")
    return params


def add(
    result: dict[str, Any], name: str, row: dict[str, Any], kinds: Sequence[OpCategory]
) -> None:
    """Adds a row, and its time by kind of op under its name."""
    result["rows"].append(row)
    result["kinds"][name] = [_line(kind, result) for kind in kinds]
    say(f"{name} {row}")


def _line(kind: OpCategory, result: dict[str, Any]) -> dict[str, Any]:
    us, bound = kind.seconds * 1e6, kind.nbytes / result["roof_GB_s"] * 1e-3
    return {
        "kind": kind.name,
        "us": us,
        "us a layer": us / result["layers"],
        "launches": kind.launches,
        "GB/s": kind.nbytes / us * 1e-3 if kind.nbytes and us else "",
        "us a layer over roof": (us - bound) / result["layers"],
        "kernels": [(kernel, origin, time * 1e6) for kernel, origin, time in kind.kernels],
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(result: dict[str, Any]) -> None:
    """Prints the tables of a run."""
    facts = {key: value for key, value in result.items() if key not in ("rows", "kinds", "touched")}
    print(json.dumps(facts))
    title = f"{result['model']} on {result['device']}, roof at {result['roof_GB_s']:,.0f} GB/s"
    for step in ("decode", "prefill"):
        rows = [row for row in result["rows"] if row["step"].startswith(step)]
        if rows:
            show(f"{title}: {step}", [shown(row, result) for row in rows])
    for name, kinds in result["kinds"].items():
        if kinds:
            lines = [{key: v for key, v in kind.items() if key != "kernels"} for kind in kinds]
            show(f"{name}: kernel time by category", lines)
    for row in result["rows"]:
        size = f" of {row['B']} x {row.get('chunk', 1)} tokens" if "B" in row else ""
        for line in row.get("writes", ()):
            print(f"{row['step']}{size} writes {line}")


def shown(row: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A row's columns, with its fraction of the matmul rate."""
    kept = {k: v for k, v in row.items() if k not in ("step", "writes")}
    if "TFLOP/s" in row:
        kept["of matmul"] = f"{row['TFLOP/s'] / result['matmul_TFLOP_s']:.1%}"
    return kept
