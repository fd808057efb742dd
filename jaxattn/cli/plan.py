"""The memory plan of a model, from its sizes alone: python -m jaxattn.plan DeepSeek-R1 --gpus 8

No device is used and nothing is allocated. The exit code is 0, or 2 for bad input or a plan that
does not fit; its table is printed all the same. It is 1 if stdout is closed or its reader left, and
130 after Ctrl-C.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxattn import interrupt
from jaxattn.cli.exit_codes import exit_code
from jaxattn.cli.options.parallel_layout import read_layout
from jaxattn.cli.options.parser import (
    VERSION,
    HelpFormatter,
    InputError,
    OptionParser,
    add_cache_format,
    add_dense,
    add_layout,
    in_options,
)
from jaxattn.cli.options.value_types import fraction, size, sizes
from jaxattn.cli.plan_report import report_plan
from jaxattn.memory.budget import MemoryPlan, PlanError
from jaxattn.memory.device_memory import KNOWN, DeviceError, DeviceMemory, known_device
from jaxattn.memory.limits import Limits
from jaxattn.models.catalog import public_models
from jaxattn.models.catalog.decoder_sizes import DecoderSizes
from jaxattn.models.catalog.model_sizes import ModelSizes
from jaxattn.models.checkpoint.native_format import CheckpointError, read_config
from jaxattn.models.embedded.model import Hybrid
from jaxattn.models.loading.huggingface_checkpoint import CONFIG, read_json
from jaxattn.models.registry import WeightsFormat
from jaxattn.parallel import Parallel
from jaxattn.plan import plan
from jaxattn.plan.layout_plan import best_layout
from jaxattn.plan.placement import CACHE_DTYPES, ModelPlacement
from jaxattn.plan.plan_check import group_limits
from jaxattn.plan.scratch_comparison import ScratchComparison, of_model, published

PROGRAM = interrupt.program("plan")


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    root = OptionParser(
        prog=PROGRAM,
        formatter_class=HelpFormatter,
        description="What memory a model takes on each GPU, to the byte and with the reason, and "
        "how much cache that leaves. Uses no device.",
        epilog="Exit codes: 0; 2 for bad input or a plan that does not fit.",
    )
    root.add_argument(
        "model",
        nargs="?",
        help=f"{', '.join(public_models.NAMES)}, or a folder with a config.json (one of those "
        "models', or one of jaxattn's own)",
    )
    root.add_argument(
        "--device",
        metavar="NAME",
        default="h200",
        help=f"{', '.join(KNOWN)}, or its memory, as in 96GiB",
    )
    root.add_argument("--gpus", metavar="N", type=size, default=1, help="GPUs that hold the model")
    root.add_argument(
        "--attention",
        choices=("data", "tensor"),
        default="data",
        help="data: each GPU has all of attention and rows of its own; tensor: heads are divided. "
        "Experts are divided in both",
    )
    root.add_argument(
        "--utilization",
        metavar="F",
        type=fraction,
        default=0.9,
        help="fraction of the device's total memory for arrays and XLA's temp; the driver's memory "
        "comes on top",
    )
    root.add_argument(
        "--batch", metavar="N", type=size, help="rows of a GPU (default: chosen; 128 with --gpus)"
    )
    root.add_argument(
        "--max-model-len",
        metavar="N",
        type=size,
        help="longest row in tokens (default: chosen, the model's own where the cache holds it; "
        "with --gpus at most 32768)",
    )
    root.add_argument(
        "--num-pages",
        metavar="N",
        type=size,
        help="pages of 64 tokens (default: as many as fit, up to --batch rows at full length)",
    )
    root.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=size,
        help="prompt tokens at a time (default: chosen; 512 with --gpus)",
    )
    root.add_argument(
        "--prefill-rows",
        metavar="N",
        type=size,
        help="most prompts that a step reads of (default: chosen)",
    )
    root.add_argument(
        "--reproducible",
        action="store_true",
        help="a text does not depend on the others that are served beside it",
    )
    root.add_argument(
        "--decode-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller batches as well, 0 for none (default: chosen; none with --gpus)",
    )
    root.add_argument(
        "--q-len", metavar="S", type=size, default=1, help="most tokens of a row in a decode step"
    )
    add_dense(root)
    add_cache_format(root)
    add_layout(root)
    root.add_argument(
        "--cache-dtype",
        choices=sorted(CACHE_DTYPES),
        help="counts an MLA cache of this dtype, whether a model serves it or not (default: as "
        "--kv-cache-dtype says)",
    )
    root.add_argument(
        "--compare",
        choices=("naive",),
        help="what a buffer for each layer, or a workspace for the longest context, would take",
    )
    root.add_argument("--plot", metavar="FILE.png", type=Path, help="draws the bar as a picture")
    root.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    root.add_argument("--version", action="version", version=VERSION)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    jax.config.update("jax_platforms", "cpu")  # shapes are enough: a GPU is left alone
    return exit_code(PROGRAM, lambda: run(parser().parse_args(argv)))


def run(options: argparse.Namespace) -> int:
    """Plans and prints."""
    naive: Sequence[ScratchComparison] = published() if options.compare else ()
    if not options.model:
        raise InputError(
            f"name a model: {', '.join(public_models.NAMES)}, or a folder with a config.json"
        )
    model = read_model(options.model, options.dense)
    try:
        memory = known_device(options.device)
        limits, placement = read_limits(options, model)
        parallel = read_layout(options)
        check_layout(options, parallel)
        found, refused = make(model, memory, limits, placement, parallel)
    except (DeviceError, ValueError) as error:
        raise InputError(in_options(error)) from error
    if naive:
        rows = max(limits.q_lens) * (found.limits or limits).batch // parallel.data
        ways = placement.ways if parallel.gpus == 1 else parallel.tensor
        naive = [*of_model(model, rows, ways, found["arena"]), *naive]
    return report_plan(found, refused, options, naive)


def check_layout(options: argparse.Namespace, parallel: Parallel) -> None:
    """Raises InputError for options that a plan of a layout would not obey."""
    if parallel.gpus == 1:
        return
    given = {
        "--gpus": options.gpus not in (1, parallel.gpus),
        "--attention": options.attention != "data",
        "--cache-dtype": options.cache_dtype is not None,
    }
    for flag in (flag for flag, wrong in given.items() if wrong):
        raise InputError(
            f"{flag} is for a plan without a layout, and {parallel.flags} is one, of "
            f"{parallel.gpus} GPUs: leave {flag} out"
        )


def make(
    model: ModelSizes,
    memory: DeviceMemory,
    limits: Limits,
    placement: ModelPlacement,
    parallel: Parallel,
) -> tuple[MemoryPlan, PlanError | None]:
    """The plan, and why it does not fit."""
    try:
        if parallel.gpus > 1:
            return plan(model, memory, limits, parallel=parallel), None
        made = plan(model, memory, limits, placement=placement)
        return with_layout(made, model, memory, limits, placement.gpus), None
    except PlanError as error:
        if error.plan is None:
            raise
        return error.plan, error


def with_layout(
    made: MemoryPlan, model: ModelSizes, memory: DeviceMemory, limits: Limits, gpus: int
) -> MemoryPlan:
    """The plan with the best layout that serves the model on so many GPUs, as flags."""
    if gpus == 1 or not isinstance(model, DecoderSizes):
        return made
    best = best_layout(model.model, memory, limits, gpus)
    found = best.flags if best else "none fits"
    return dataclasses.replace(made, facts=(*made.facts, ("best layout to serve", found)))


def read_model(name: str, dense: WeightsFormat | None = None) -> ModelSizes:
    """A shipped model, or a folder's; `dense` as `jaxattn.models.load` has it.

    Raises:
        InputError: there is none.
    """
    folder = Path(name)
    try:
        if (folder / CONFIG).is_file():
            if not {"model_type", "text_config"} & read_json(folder / CONFIG).keys():
                if dense:
                    raise InputError(f"--dense {dense}: the config.json of {folder} says its dtype")
                return DecoderSizes.of(folder.name, Hybrid(read_config(folder)))
        return public_models.load(name, dense)
    except (public_models.CatalogError, CheckpointError) as error:
        raise InputError(" ".join(str(error).split())) from error


def read_limits(options: argparse.Namespace, model: ModelSizes) -> tuple[Limits, ModelPlacement]:
    """Both, as the options say.

    Raises:
        ValueError: they make no sense.
    """
    length, chunk = options.max_model_len, options.prefill_chunk
    limits = Limits(
        batch=options.batch,
        max_model_len=length,
        num_pages=options.num_pages,
        prefill_chunk=min(chunk, length) if chunk and length else chunk,
        prefill_rows=options.prefill_rows,
        reproducible=options.reproducible,
        utilization=options.utilization,
        decode_buckets=options.decode_buckets,
        q_lens=tuple(sorted({1, options.q_len})),
        cache_format=options.kv_cache_dtype,
        native_layers=options.kv_cache_native_layers,
    )
    if options.gpus > 1 or not isinstance(model, DecoderSizes):
        limits = group_limits(model, limits)
    placement = ModelPlacement(
        gpus=options.gpus,
        attention=options.attention,
        cache_dtype=options.cache_dtype,
    )
    return limits, placement


if __name__ == "__main__":
    sys.exit(main())
