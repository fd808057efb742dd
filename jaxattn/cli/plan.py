"""The memory plan of a model, computed from its sizes: python -m jaxattn.plan DeepSeek-R1 --gpus 8

The command uses no device and allocates nothing. The exit code is 0, or 2 for bad input or a plan
that does not fit, whose table is printed anyway. It is 1 if stdout or its pipe is closed, and 130
after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxattn import interrupt
from jaxattn.cli.exit_codes import exit_code
from jaxattn.cli.options.contradictions import check_sizes
from jaxattn.cli.options.model_options import add_cache_format, add_dense, add_speculation
from jaxattn.cli.options.parallel_options import add_layout, read_layout
from jaxattn.cli.options.parser import VERSION, HelpFormatter, InputError, OptionParser, in_options
from jaxattn.cli.options.value_types import fraction, size, sizes
from jaxattn.cli.plan_report import report_plan
from jaxattn.cli.startup.model_source import is_name, located, one_line, read
from jaxattn.limits import Limits
from jaxattn.memory.device_memory import KNOWN, DeviceError, DeviceMemory, known_device
from jaxattn.memory.plan import MemoryPlan, PlanError
from jaxattn.models.catalog import model_resolver
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.parallel import Parallel
from jaxattn.plan import plan
from jaxattn.plan.alternative_scratch_designs import ScratchComparison, of_model, published
from jaxattn.plan.group_device_plan import group_limits
from jaxattn.plan.layout_search import best_layout
from jaxattn.plan.placement import CACHE_DTYPES, ModelPlacement

PROGRAM = interrupt.program("plan")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    root = OptionParser(
        prog=PROGRAM,
        formatter_class=HelpFormatter,
        description="Prints the memory that a model takes on each GPU, to the byte and with a "
        "reason for each line, and the size of the cache. Uses no device.",
        epilog="Exit codes: 0 for success; 2 for bad input or a plan that does not fit.",
    )
    root.add_argument(
        "model",
        nargs="?",
        help=f"{', '.join(model_resolver.NAMES)}; or, as for serve, a folder with a config.json, "
        "a GGUF file, or a name on the hub such as org/name, of which only config.json is "
        "downloaded",
    )
    root.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the hub (default: its main branch)",
    )
    root.add_argument(
        "--device",
        metavar="NAME",
        default="h200",
        help=f"{', '.join(KNOWN)}, or the device's memory, such as 96GiB",
    )
    root.add_argument(
        "--gpus",
        metavar="N",
        type=size,
        default=1,
        help="number of GPUs; the command plans the layout whose caches hold the most tokens",
    )
    root.add_argument(
        "--attention",
        choices=("data", "tensor"),
        help="plan a group of GPUs that need not be a supported layout. data: each GPU has the "
        "whole attention and its own rows; tensor: the GPUs divide the heads. Both divide the "
        "experts",
    )
    root.add_argument(
        "--utilization",
        metavar="F",
        type=fraction,
        default=0.9,
        help="fraction of the device's total memory for arrays and XLA's temporary memory; the "
        "fraction excludes the driver's memory",
    )
    root.add_argument(
        "--batch",
        metavar="N",
        type=size,
        help="rows of all GPUs together, or of each GPU with --attention data (default: chosen; "
        "128 with --attention)",
    )
    root.add_argument(
        "--max-model-len",
        metavar="N",
        type=size,
        help="most tokens of a row (default: chosen, the model's context if the cache holds it; "
        "with --attention at most 32768)",
    )
    root.add_argument(
        "--num-pages",
        metavar="N",
        type=size,
        help="cache pages of 64 tokens (default: as many as fit, up to --batch rows at full "
        "length)",
    )
    root.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=size,
        help="tokens of a prompt that one step processes (default: chosen; 512 with --attention)",
    )
    root.add_argument(
        "--prefill-rows",
        metavar="N",
        type=size,
        help="most prompts that one step processes together (default: chosen)",
    )
    root.add_argument(
        "--reproducible",
        action="store_true",
        help="plan an engine whose answers do not depend on other requests",
    )
    root.add_argument(
        "--decode-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller batch sizes to compile too; 0 means none (default: chosen; none with "
        "--attention)",
    )
    root.add_argument(
        "--q-len", metavar="S", type=size, default=1, help="most tokens of a row in a decode step"
    )
    add_speculation(root)
    add_dense(root)
    add_cache_format(root)
    add_layout(root)
    root.add_argument(
        "--cache-dtype",
        choices=sorted(CACHE_DTYPES),
        help="plan an MLA cache of this dtype, even if no model supports it (default: that of "
        "--kv-cache-dtype)",
    )
    root.add_argument(
        "--compare",
        choices=("naive",),
        help="compare with one scratch buffer per layer, and with a workspace for the longest "
        "context",
    )
    root.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the plan into this file")
    root.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    root.add_argument("--version", action="version", version=VERSION)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code."""
    jax.config.update("jax_platforms", "cpu")  # the plan needs only shapes and no GPU
    return exit_code(PROGRAM, lambda: run(parser().parse_args(argv)))


def run(options: argparse.Namespace) -> int:
    """Computes the plan and prints it."""
    naive: Sequence[ScratchComparison] = published() if options.compare else ()
    if not options.model:
        raise InputError(
            f"give a model: {', '.join(model_resolver.NAMES)}, a folder with a config.json, a GGUF "
            "file, or a name on the hub such as org/name"
        )
    model = read_model(options)
    try:
        memory = known_device(options.device)
        limits, placement = read_limits(options, model)
        parallel = read_layout(options)
        check_layout(options, parallel)
        if options.gpus > 1 and parallel.gpus == 1 and not counts_group(options):
            parallel = best_layout(model.name, model.model, memory, limits, options.gpus)
        memory_plan, plan_error = make(model, memory, limits, placement, parallel)
    except (DeviceError, ValueError) as error:
        raise InputError(in_options(error)) from error
    if naive:
        rows = max(limits.q_lens) * (memory_plan.limits or limits).batch // parallel.data
        ways = placement.ways if parallel.gpus == 1 else parallel.tensor
        naive = [*of_model(model, rows, ways, memory_plan["arena"]), *naive]
    return report_plan(memory_plan, plan_error, options, naive)


def counts_group(options: argparse.Namespace) -> bool:
    """Whether to plan a group of GPUs that need not be a supported layout."""
    return options.gpus > 1 and bool(options.attention or options.cache_dtype)


def check_layout(options: argparse.Namespace, parallel: Parallel) -> None:
    """Raises InputError for options that the plan of a layout would ignore."""
    gpus = max(parallel.gpus, options.gpus)
    if options.speculate and gpus > 1:
        raise InputError(
            f"--speculate {options.speculate} needs a single GPU, but the plan is for {gpus}; "
            "leave --speculate out"
        )
    if parallel.gpus == 1:
        return
    flags_given = {
        "--gpus": options.gpus not in (1, parallel.gpus),
        "--attention": options.attention is not None,
        "--cache-dtype": options.cache_dtype is not None,
    }
    for flag in (flag for flag, wrong in flags_given.items() if wrong):
        raise InputError(
            f"{flag} applies only to a plan without a layout, but {parallel.flags} is a layout of "
            f"{parallel.gpus} GPUs; leave {flag} out"
        )


def make(
    model: DecoderSizes,
    memory: DeviceMemory,
    limits: Limits,
    placement: ModelPlacement,
    parallel: Parallel,
) -> tuple[MemoryPlan, PlanError | None]:
    """Returns the plan, and the error if it does not fit."""
    try:
        if parallel.gpus > 1:
            return plan(model, memory, limits, parallel=parallel), None
        return plan(model, memory, limits, placement=placement), None
    except PlanError as error:
        if error.plan is None:
            raise
        return error.plan, error


def read_model(options: argparse.Namespace) -> DecoderSizes:
    """Returns the sizes of a model of the catalog, or of a folder, a GGUF file or a hub name.

    `serve` finds and reads models in the same way.

    Raises:
        InputError: If there is no such model.
    """
    model_name = options.model
    shipped = model_name.lower() in map(str.lower, model_resolver.NAMES)
    try:
        if not shipped and (Path(model_name).expanduser().exists() or is_name(model_name)):
            path, name = located(model_name, options.revision)
            folder = read(path, None, None, options.dense, options.speculate_by == "mtp")
            return model_resolver.of_folder(name or path.name, folder)
        if options.revision:
            raise InputError(f"--revision needs a name on the hub, but {model_name} is not one")
        return model_resolver.load(model_name, options.dense, options.speculate_by == "mtp")
    except (model_resolver.CatalogError, CheckpointError) as error:
        raise InputError(one_line(error)) from error


def read_limits(options: argparse.Namespace, model: DecoderSizes) -> tuple[Limits, ModelPlacement]:
    """Returns the limits and the placement from the options.

    Raises:
        ValueError: If the options contradict each other.
    """
    check_sizes(options)
    limits = Limits(
        batch=options.batch,
        max_model_len=options.max_model_len,
        num_pages=options.num_pages,
        prefill_chunk=options.prefill_chunk,
        prefill_rows=options.prefill_rows,
        reproducible=options.reproducible,
        utilization=options.utilization,
        decode_buckets=options.decode_buckets,
        q_lens=tuple(sorted({1, options.q_len})),
        speculate=options.speculate,
        speculate_by=options.speculate_by,
        cache_format=options.kv_cache_dtype,
        native_layers=options.kv_cache_native_layers,
    )
    if counts_group(options):
        limits = group_limits(model, limits)
    placement = ModelPlacement(
        gpus=options.gpus if counts_group(options) else 1,
        attention=options.attention or "data",
        cache_dtype=options.cache_dtype,
    )
    return limits, placement


if __name__ == "__main__":
    sys.exit(main())
