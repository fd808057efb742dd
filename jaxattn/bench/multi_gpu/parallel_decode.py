"""`python -m jaxattn.bench parallel NAME --tensor 2`: decode steps on several GPUs and on one.

    python -m jaxattn.bench parallel DeepSeek-V2-Lite --tensor 2 --also data=2,expert=2
    python -m jaxattn.bench parallel DeepSeek-V2-Lite --tokens 32768 --tensor 2 --context 2

NAME is as for `bench model`. Weights, latents and states are random, in the model's real shapes.
The bench first compiles all steps, several at a time. Then it runs the steps on one GPU and on each
layout, one after the other, in one process on the same GPUs. `ms` is the time per step in a run in
which each step is dispatched before the previous one has finished.

A layout skips numbers of rows whose caches do not fit in its GPUs. `times one GPU` is the speedup
in tokens/s over one GPU with `beside B` rows. These are as many rows, or those of one data group if
one GPU has no room for all.

`--xla-options KEY=VALUE ...` also times each step of several GPUs compiled with these options; it
may be given several times. With collectives in command buffers (CUDA graphs), no graph ends at an
all-reduce:

    --xla-options xla_gpu_enable_command_buffer=CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,\
FUSION,COLLECTIVES

`--one-launch` also times steps whose all-reduces, residual sums and norms are launches of
`jaxattn.ops.collectives.all_reduce_norm`; their rows have `one launch` True. Layouts with one data
group have such steps, and layouts whose data groups are one GPU each.

`cache tokens` is the maximum number of tokens in the layout's caches, in 90% of the GPUs' memory,
after weights, a slot per row and the step's temp.

`roof ms` is the time to move the bytes of a step once at the GPU's rate (see `bench model`).
`collectives ms` is the time that a GPU spends in collectives, including waits. `all-reduces` counts
the sums of layers in a step's HLO, where a loop over layers has one body. `other form` counts those
that XLA's own kernel does not support.
"""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import add_implementation, command_parser
from jaxattn.bench.harness.result_tables import show, store
from jaxattn.bench.model.model_lookup import UnknownModelError, find
from jaxattn.bench.multi_gpu.device_count import short_of_devices
from jaxattn.bench.multi_gpu.sharded_model import Options, ShardedModel
from jaxattn.cli.options.parallel_options import LAYOUT
from jaxattn.models import divided
from jaxattn.parallel import ALONE, Parallel

COMPILERS = 16  # threads
SPARE_BYTES = 2 * 2**30  # of a GPU, for temp, code and NCCL
HIDDEN = ("all-reduce forms", "launches")  # columns that only the JSON contains


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "parallel", __doc__)
    parser.add_argument("name", help="a shipped configuration, or a folder with a config.json")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 32, 128],
        help="numbers of rows of the decode steps",
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each row")
    for name, text in LAYOUT.items():
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help="further layouts, such as tensor=2,context=2; each layout runs those of --rows that "
        "are multiples of its groups",
    )
    parser.add_argument(
        "--xla-options",
        nargs="+",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also time steps of several GPUs with these XLA options",
    )
    parser.add_argument(
        "--one-launch",
        action="store_true",
        help="also time steps with one launch per sum, residual and norm, up to the most rows that "
        "one launch takes",
    )
    parser.add_argument("--not-alone", action="store_true", help="do not time the step on one GPU")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of weights, caches and tokens"
    )
    add_implementation(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole result to this file"
    )
    args = parser.parse_args(argv)
    try:
        first = Parallel(**{name: getattr(args, name) for name in LAYOUT})
        args.layouts = [first, *(read_layout(text) for text in args.also)]
        args.xla_options = [read_options(texts) for texts in args.xla_options]
        args.name, _, args.model = find(args.name)
        for parallel in args.layouts:
            divided(args.model, parallel)
    except (UnknownModelError, TypeError, ValueError) as error:
        parser.error(str(error))
    if min(args.rows) < 1 or args.tokens < 1:
        parser.error("--rows and --tokens must be positive")
    if odd := [rows for rows in args.rows if rows % first.data]:
        parser.error(f"--rows {odd[0]} must be a multiple of --data {first.data}")
    return args


def read_layout(text: str) -> Parallel:
    """Parses a layout such as tensor=2,context=2.

    Raises:
        ValueError: the text is malformed, or its numbers are inconsistent.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in LAYOUT or not number.isdigit():
            raise ValueError(
                f"{text!r} is not a layout: write {', '.join(LAYOUT)} with numbers, such as "
                "tensor=2,context=2"
            )
        found[name] = int(number)
    return Parallel(**found)


def read_options(texts: Sequence[str]) -> Options:
    """Parses KEY=VALUE options; XLA needs True and False as booleans.

    Raises:
        ValueError: an option has no value.
    """
    pairs = [text.partition("=") for text in texts]
    if odd := [key for key, equals, _ in pairs if not key or not equals]:
        raise ValueError(f"--xla-options {odd[0]!r} is not an option: write KEY=VALUE")
    booleans: dict[str, bool] = {"True": True, "False": False}
    return tuple((key, booleans.get(value, value)) for key, _, value in pairs)


def main(argv: Sequence[str], program: str) -> int:
    # The backend reads these as it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    args = parse(argv, program)
    most = max(args.layouts, key=lambda parallel: parallel.gpus)
    if short_of_devices(program, most.flags, most.gpus):
        return 2
    result: dict[str, Any] = {
        **run_metadata.begin("parallel", program, ["parallel", *argv], seed=args.seed),
        "model": args.name,
        "layouts": [parallel.flags for parallel in args.layouts],
        "rows": [],
    }
    layouts = [layout for each in _wanted(args) if (layout := _layout(args, *each))]
    with ThreadPoolExecutor(COMPILERS) as pool:
        for layout in layouts:
            layout.compile_all(pool)
        for layout in layouts:
            layout.wait()
    _say(f"compiled {len(layouts)} layouts")
    while layouts:
        _measure(args, layouts.pop(0), result)
        gc.collect()  # frees memory for the next layout
    run_metadata.end(result, args.json)
    table = [{k: v for k, v in row.items() if k not in HIDDEN} for row in result["rows"]]
    show(f"{args.name}, {args.tokens:,} tokens per row", table)
    return 0


def _wanted(args: argparse.Namespace) -> list[tuple[Parallel, bool]]:
    """Layouts, and whether one launch does the sum, the residual and the norm."""
    wanted = [] if args.not_alone else [(ALONE, False)]
    for parallel in args.layouts:
        wanted.append((parallel, False))
        own: Any = divided(args.model.with_fused_sums(), parallel)
        if args.one_launch and own.spec.sums_fused:
            wanted.append((parallel, True))
    return list(dict.fromkeys(wanted))


def _layout(args: argparse.Namespace, parallel: Parallel, fused: bool) -> ShardedModel | None:
    """The layout with the row counts that divide over its groups and fit in its memory."""
    model, most = args.model.with_fused_sums(None if fused else 0), max(args.rows)
    if fused:
        own: Any = divided(model, parallel)
        most = own.spec.summed_tokens * parallel.data
    rows = sorted(count for count in args.rows if count % parallel.data == 0 and count <= most)
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    while rows:
        layout = ShardedModel(
            model,
            parallel,
            rows,
            tokens=args.tokens,
            devices=jax.devices()[: parallel.gpus],
            seed=args.seed,
            implementation=args.implementation,
            options=[(), *args.xla_options] if parallel.gpus > 1 and not fused else [()],
        )
        weights, caches = layout.nbytes
        if room is None or weights + caches + SPARE_BYTES <= room:
            return layout
        _say(
            f"{_name(parallel)} has no memory for {rows[-1]} rows: weights need "
            f"{weights / 1e9:.1f} GB, and caches and states {caches / 1e9:.1f} GB, of "
            f"{room / 1e9:.1f} GB"
        )
        most, rows = rows[-1], rows[:-1]
        if parallel == ALONE:  # also the rows of one data group
            rows = sorted({*rows, *(most // each.data for each in args.layouts if each.data > 1)})
    return None


def _measure(args: argparse.Namespace, layout: ShardedModel, result: dict[str, Any]) -> None:
    """Adds a row for each number of rows, and stores it at once."""
    layout.fill()
    weights, caches = layout.nbytes
    _say(
        f"{_name(layout.parallel)}: weights of {weights / 1e9:.1f} GB, and caches and states of "
        f"{caches / 1e9:.1f} GB, on each GPU"
    )
    for count, options in itertools.product(layout.counts, layout.options):
        try:
            row = layout.time(count, options)
        except jax.errors.JaxRuntimeError as error:
            if not options:
                raise
            failed = f"{_name(layout.parallel)}, {count} rows, {dict(options)}: {error}"
            _say(f"not timed: {failed.splitlines()[0]}")
            result.setdefault("not timed", []).append(failed)
            layout.fill()  # the failed step has consumed the donated state
            continue
        row.update(_beside(row, result["rows"], layout.parallel))
        result["rows"].append(row)
        store(result, args.json)
        _say(str({k: v for k, v in row.items() if k not in HIDDEN}))


def _beside(row: dict[str, Any], rows: list[dict[str, Any]], parallel: Parallel) -> dict[str, Any]:
    """The ratio to one GPU's tokens/s, at as many rows or at those of a data group."""
    alone = {each["B"]: each["tokens/s"] for each in rows if each["GPUs"] == 1}
    for count in (row["B"], row["B"] // parallel.data):
        if parallel.gpus > 1 and count in alone:
            return {"times one GPU": row["tokens/s"] / alone[count], "beside B": count}
    return {}


def _name(parallel: Parallel) -> str:
    return parallel.flags or "one GPU"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
