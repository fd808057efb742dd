"""`python -m jaxattn.bench WHAT` times kernels, decode steps and whole models on this GPU.

    mla, mla-prefill       MLA, decode and prefill
    mla-index              the indexer of DeepSeek Sparse Attention, with its top k
    mla-sparse             MLA attention to the positions that the indexer chose
    gqa, gqa-prefill       grouped-query attention, decode and prefill
    gdn, kda               the gated delta rule and Kimi's, decode and prefill
    moe, moe-cuts          an MoE layer, and each tile configuration of its kernels
    train                  ops and layers with their gradients
    step                   a decode step of a few layers
    plot                   a plot of a stored run: plot RUN.json --plot FILE.png

The following have options of their own; `python -m jaxattn.bench WHAT --help` shows them:

    model                  a whole model with random weights
    parallel               the same on several GPUs
    collectives            all-reduces over GPUs
    long-row               attention of one long row over GPUs
    dense                  the dense products of a decode step
    host                   the host time that the engine adds to a step
    quality                perplexity of a text, for each cache format
    offline                whole requests through the engine, compared with vLLM
    serve                  a server under load, compared with vLLM's
    rollout                weight updates, scores and exact mode of an engine
    compare                two stored runs side by side

`us` or `ms` is the GPU time of an op's kernels, from a profile, and `xla us` that of XLA's kernels.
`call us` is the time per call in a loop of calls. The bench takes both times of FlashMLA,
FlashAttention-3, FlashInfer, FlagGems, FLA and FlashQLA too, where they are installed. Each row
gives the rate of its `us` as a fraction of the peak rate of a burst of copies, reads and products
in the same run.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxattn import __version__, interrupt
from jaxattn.bench import comparison
from jaxattn.bench.attention import (
    gqa,
    gqa_prefill,
    mla,
    mla_fp8,
    mla_index,
    mla_prefill,
    mla_sparse,
    turboquant,
    turboquant_prefill,
)
from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import add_implementation, check_implementation
from jaxattn.bench.harness.measured_peaks import ceilings, peak_fractions
from jaxattn.bench.harness.result_tables import check_files, show, store
from jaxattn.bench.host import host_overhead as host
from jaxattn.bench.layers import decode_step, linear, moe, moe_tile_configs
from jaxattn.bench.layers.gradients import layer_gradients, op_gradients
from jaxattn.bench.linear_attention import (
    gdn_layer_decode,
    gdn_prefill,
    gdn_prefill_norm,
    kda_layer_decode,
    kda_prefill,
)
from jaxattn.bench.load import command as load_command
from jaxattn.bench.model import command, quality
from jaxattn.bench.multi_gpu import collectives, context_parallel, parallel_decode
from jaxattn.bench.offline import command as offline_command
from jaxattn.bench.offline import rollout
from jaxattn.bench.plots import result_plot
from jaxattn.cli.exit_codes import exit_code
from jaxattn.cli.options.parser import ProseHelpFormatter
from jaxattn.core.cache.formats import CACHE_FORMATS

PROGRAM = interrupt.program("bench")
MODULES: dict[str, list[Any]] = {
    "mla": [mla, mla_fp8],
    "mla-prefill": [mla_prefill],
    "mla-index": [mla_index],
    "mla-sparse": [mla_sparse],
    "gqa": [gqa, turboquant],
    "gqa-prefill": [gqa_prefill, turboquant_prefill],
    "gdn": [gdn_layer_decode, gdn_prefill, gdn_prefill_norm],
    "kda": [kda_layer_decode, kda_prefill],
    "moe": [moe],
    "moe-cuts": [moe_tile_configs],
    "train": [op_gradients, layer_gradients],
}
# The benches that also time other libraries (baselines).
COMPARED = ("mla", "mla-prefill", "mla-sparse", "gqa", "gqa-prefill", "gdn", "kda", "train")
BASELINES = Path(__file__).with_name("baselines")  # exists only in a checkout
Times = dict[str, dict[str, float]]  # seconds of the baselines, by column and shape
# Subcommands with options of their own: (argv after the subcommand, program name) -> exit code.
COMMANDS: dict[str, Callable[[list[str], str], int]] = {
    "model": command.main,
    "parallel": parallel_decode.main,
    "collectives": collectives.main,
    "long-row": context_parallel.main,
    "compare": comparison.main,
    "dense": linear.main,
    "host": host.main,
    "quality": quality.main,
    "offline": offline_command.main,
    "serve": load_command.main,
    "rollout": rollout.main,
}


WHATS = (*MODULES, "step", "plot")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the options of the benches in `WHATS`; exits with a message if they do not fit."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=ProseHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxattn {__version__}")
    parser.add_argument(
        "what", nargs="?", metavar="WHAT", help=f"what to time: one of {', '.join(WHATS)}"
    )
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN.json", help="the result that plot draws"
    )
    add_implementation(parser)
    parser.add_argument(
        "--small", action="store_true", help="use tiny shapes, to try the bench on a CPU"
    )
    parser.add_argument("--all", action="store_true", help="time every published shape")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="SHAPE",
        help="time only these of all published shapes, named like the beginnings of their rows, "
        "with colons between columns: --only 16/32:4x8192 256,16,32,1:float32",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_FORMATS,
        default="auto",
        help="with mla and gqa, time only shapes with this cache format; auto means all",
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="do not time XLA and other packages"
    )
    parser.add_argument(
        "--no-xla", action="store_true", help="do not time XLA, which takes most of a run"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write each row to this file as soon as it is measured",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw a roofline, and bars of the times for gdn (needs matplotlib)",
    )
    args = parser.parse_args(argv)
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message if the options do not fit, before anything is measured."""
    if args.what not in WHATS:
        named = f"no bench {args.what!r}; the benches are" if args.what else "give a bench:"
        parser.error(f"{named} {', '.join((*WHATS, *COMMANDS))}")
    if args.what in COMPARED and not (args.no_peers or BASELINES.is_dir()):
        parser.error(
            f"baselines need a checkout of the repository, but {Path(__file__).parent} is not part "
            f"of one; run {args.what} in a checkout, or leave the baselines out with --no-peers"
        )
    if (args.what == "plot") != (args.run is not None):
        parser.error("plot needs RUN.json, and only plot accepts it")
    if args.what == "plot" and args.plot is None:
        parser.error("plot needs --plot FILE.png")
    if args.what == "train" and args.implementation is not None:
        parser.error(
            "--implementation is not supported for train, because the layers that it times choose "
            "their own implementation"
        )
    if args.what == "step" and args.plot is not None:
        parser.error("--plot supports only mla, mla-prefill and gdn")
    if args.only:
        labels = [
            name for module in MODULES.get(args.what, []) for name in known(module, args.small)
        ]
        if unknown := sorted({spelled(name) for name in args.only} - set(labels)):
            parser.error(
                f"--only: {args.what} has no shape {' '.join(unknown)}; its shapes are "
                f"{' '.join(labels) or 'none to choose from'}"
            )
    if args.kv_cache_dtype != "auto":
        modules = MODULES.get(args.what, [])
        if not any(shapes_of(module, args) for module in modules):
            parser.error(
                f"--kv-cache-dtype {args.kv_cache_dtype}: {args.what} has no shape with this cache "
                "format"
            )
    check_files(parser, args)
    if args.what != "plot" and not args.small:
        # Baselines run in their own processes and need memory too. The backend reads this as it
        # starts.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if jax.default_backend() != "gpu":
            parser.error(
                f"the shapes are for a GPU, but JAX's backend is {jax.default_backend()!r}; add "
                "--small"
            )
    check_implementation(parser, args)


def spelled(label: str) -> str:
    """The name of a shape with colons instead of spaces, as `--only` spells it."""
    return label.strip().replace(" ", ":")


def known(module: Any, small: bool) -> dict[str, Any]:
    """All shapes of a module, by name."""
    shapes = module.SMALL_SHAPES if small else module.SHAPES + module.MORE_SHAPES
    return {spelled(" ".join(module.label(shape).values())): shape for shape in shapes}


def shapes_of(module: Any, args: argparse.Namespace) -> tuple[Any, ...]:
    if args.only:
        wanted = set(map(spelled, args.only))
        found = tuple(shape for name, shape in known(module, args.small).items() if name in wanted)
    else:
        found = module.SMALL_SHAPES if args.small else module.SHAPES
        found += module.MORE_SHAPES if args.all and not args.small else ()
    if args.kv_cache_dtype == "auto":
        return found
    stores = getattr(module, "cache_format", lambda shape: None)
    return tuple(shape for shape in found if stores(shape) == args.kv_cache_dtype)


def baselines() -> tuple[ModuleType, ModuleType]:
    """The modules of the PyTorch and the jax-triton baselines, which a wheel does not contain."""
    from jaxattn.bench.baselines import jax_triton_baselines, torch_runner

    return torch_runner, jax_triton_baselines


def measure_peers(args: argparse.Namespace, facts: dict[str, Any]) -> dict[Any, Times]:
    """Returns the baselines' times by module; adds their versions to `facts` as "peers".

    Runs before JAX takes memory.
    """
    if args.what not in COMPARED:
        return {}
    times = {}
    torch_runner, jax_triton_baselines = baselines()
    for module in MODULES[args.what]:
        shapes = shapes_of(module, args)
        if not shapes:
            continue
        name = module.__name__.rpartition(".")[2]
        times[module], said = torch_runner.measure(name, shapes)
        said += jax_triton_baselines.said(name)
        facts.setdefault("peers", []).extend(said)
        for line in said:
            print(line, file=sys.stderr, flush=True)
    return times


def measure(
    module: Any, args: argparse.Namespace, facts: dict[str, Any], others: Times
) -> Iterator[dict]:
    """Yields a row per shape: our times, their fractions of the peak rates, and the baselines."""
    for shape in shapes_of(module, args):
        xla = not (args.no_peers or args.no_xla or args.implementation == "xla")
        row = module.measure(shape, args.implementation, xla=xla)
        if "burst" in facts:
            row |= peak_fractions(row, facts)
        unit = result_plot.unit(row)
        for who, times in others.items():
            time = times.get(json.dumps(shape))
            row[f"{who} {unit}"] = time / result_plot.TIMES[unit] if time else ""
        if args.what in COMPARED and not args.no_peers and not args.small:
            row |= baselines()[1].times(module.__name__.rpartition(".")[2], shape)
            if hasattr(module, "measure_peers"):
                row |= module.measure_peers(shape)
        print(f"{args.what} {row}", file=sys.stderr, flush=True)
        yield row


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    facts = run_metadata.begin(args.what, PROGRAM, argv)
    others = {} if args.no_peers else measure_peers(args, facts)
    if not args.small:
        facts |= ceilings()
    result: dict[str, Any] = {**facts, "rows": [], "notes": []}
    tables: list[list[dict]] = []
    if args.what == "step":
        tables.append(decode_step.measure(small=args.small, implementation=args.implementation))
        result["rows"] += tables[0]
    for module in MODULES.get(args.what, []):
        tables.append([])
        for row in measure(module, args, facts, others.get(module, {})):
            tables[-1].append(row)
            result["rows"].append(row)
            store(result, args.json)
        result["notes"] += module.notes(tables[-1]) if hasattr(module, "notes") else []
    run_metadata.end(result, args.json)
    print(json.dumps({name: x for name, x in result.items() if name not in ("rows", "notes")}))
    for rows in filter(None, tables):
        show(f"jaxattn {args.what} on {facts['device']}", rows)
    for note in result["notes"]:
        print(note)
    if args.plot:
        result_plot.save(result, args.plot)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code; see cli/exit_codes.py."""
    return exit_code(PROGRAM, lambda: answer(sys.argv[1:] if argv is None else argv))


def answer(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:], PROGRAM)
    args = parse(arguments)
    try:
        if args.plot:
            result_plot.require_matplotlib()  # fail before the measurements
        if args.what == "plot":
            result_plot.save(result_plot.load(args.run), args.plot)
        else:
            run(args, arguments)
    except result_plot.BenchPlotError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
