"""The options of `python -m jaxattn.serve`, with one function per group of the help."""

import argparse
import math
from pathlib import Path

from jaxattn import interrupt
from jaxattn.cli.options import http_options, multihost_options
from jaxattn.cli.options.model_options import add_cache_format, add_dense, add_speculation
from jaxattn.cli.options.parallel_options import add_layout
from jaxattn.cli.options.parser import VERSION, HelpFormatter, OptionParser
from jaxattn.cli.options.value_types import fraction, number, size, sizes

PROGRAM = interrupt.program("serve")
MAX_MODEL_LEN = 1024
CHAT_MODEL_LEN = 4096
MAX_TOKENS = 160
BATCH = 4
SERVER_BATCH = 16


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    root = OptionParser(
        prog=PROGRAM,
        formatter_class=HelpFormatter,
        description="Completes prompts with a model, or chats with it, in the terminal. With "
        "--port, serves the model over HTTP. Without arguments, the embedded byte-level model, a "
        "hybrid of MLA and gated delta nets, completes six beginnings of Python code.",
        epilog="Exit codes: 0 for success; 1 if a request was rejected, or if stdout is closed; "
        "2 for bad input; 130 after Ctrl-C; 143 after SIGTERM.",
    )
    root.stray = " (a prompt is given as --prompt TEXT)"
    add_model(root)
    add_prompts(root)
    add_sampling(root)
    add_memory(root)
    multihost_options.add(root)
    add_output(root)
    http_options.add(root)
    return root


def add_model(root: argparse.ArgumentParser) -> None:
    """Adds the group of options that choose the model, its formats and its device."""
    group = root.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="FOLDER_OR_NAME",
        help="folder with config.json and safetensors, GGUF file, or name on the Hugging Face hub "
        "such as org/name, which is downloaded (default: the embedded model)",
    )
    group.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="older name of --model (default: see --model)",
    )
    group.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a model on the hub (default: main)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of a published model's weights and matrix products (default: bfloat16)",
    )
    group.add_argument(
        "--experts",
        choices=("fp8", "4bit", "bfloat16"),
        help="format in which routed experts are kept; bfloat16 takes twice the bytes of fp8 and "
        "about four times those of 4bit (default: as the checkpoint stores them)",
    )
    add_dense(group)
    group.add_argument(
        "--implementation",
        choices=("mosaic_gpu", "mosaic_gpu_interpret", "xla"),
        help="which decode kernels run (default: the best for the device)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="device that runs the model; auto is the default device of JAX",
    )


def add_prompts(root: argparse.ArgumentParser) -> None:
    """Adds the group of prompts, the maximum length and stop strings."""
    group = root.add_argument_group("prompts")
    group.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt to complete; may be repeated; - reads one prompt from stdin. A prompt must be "
        "shorter than --max-model-len (default: six beginnings of Python code)",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="render each prompt as a user message with the model's chat template; without "
        "--prompt, hold a conversation: each line of stdin is a message, until stdin ends or "
        "Ctrl-C",
    )
    group.add_argument(
        "--system",
        metavar="TEXT",
        help="with --chat, the system message (default: none)",
    )
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=size,
        help=f"most tokens to generate for each prompt (default: {MAX_TOKENS}; with --chat up to "
        "--max-model-len)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="string that ends the generation, in addition to the model's stop tokens; may be "
        "repeated (default: none)",
    )


def add_sampling(root: argparse.ArgumentParser) -> None:
    """Adds the group of sampling parameters."""
    group = root.add_argument_group(
        "sampling",
        "the model's defaults come from its generation_config.json; with --port, a request may "
        "override each value",
    )
    group.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, lambda x: 0 <= x < math.inf, "a temperature: use 0 or more"),
        help="0 selects the most likely token (default: the model's, else 0, or 1 with --port)",
    )
    group.add_argument(
        "--top-p",
        metavar="P",
        type=number(float, lambda x: 0 < x <= 1, "a probability: use above 0 and at most 1"),
        help="sample from the most likely tokens whose probabilities sum to P (default: the "
        "model's, else 1)",
    )
    group.add_argument(
        "--top-k",
        metavar="K",
        type=number(int, lambda x: 0 <= x < 2**31, "a number of tokens: use 0 or more"),
        help="sample from the K most likely tokens; 0 means all (default: the model's, else 0)",
    )
    group.add_argument(
        "--min-p",
        metavar="P",
        type=number(float, lambda x: 0 <= x <= 1, "a probability: use 0 to 1"),
        help="sample from tokens at least P times as likely as the most likely token (default: the "
        "model's, else 0)",
    )
    group.add_argument(
        "--repetition-penalty",
        metavar="P",
        type=number(float, lambda x: 0.01 <= x <= 100, "a penalty: use 0.01 to 100"),
        help="a value above 1 makes tokens that the text already contains less likely (default: "
        "the model's, else 1)",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=number(int, lambda x: 0 <= x < 2**32, "a seed: use 0 to 4294967295"),
        default=0,
        help="random seed, combined with the prompt's number and the token's position",
    )


def add_memory(root: argparse.ArgumentParser) -> None:
    """Adds the group of sizes: rows, caches, compiled shapes and the layout over GPUs."""
    group = root.add_argument_group(
        "batch and memory", "sizes may end with k (1024) or m (1048576)"
    )
    _add_rows(group)
    _add_reuse(group)
    _add_shapes(group)
    add_cache_format(group)
    add_layout(group)
    _add_checks(group)


def _add_rows(group: argparse._ActionsContainer) -> None:
    """Adds the options of rows, their length and their prefill."""
    group.add_argument(
        "--batch",
        metavar="N",
        type=size,
        help="rows of the batch: requests that decode together (default: chosen for the model and "
        f"the GPU, 1 for a conversation; on a CPU {BATCH}, or {SERVER_BATCH} with --port)",
    )
    group.add_argument(
        "--max-model-len",
        metavar="N",
        type=size,
        help="most tokens of a prompt and its answer together (default: the model's context, or "
        f"what the GPU's cache holds; on a CPU at most {MAX_MODEL_LEN}, or {CHAT_MODEL_LEN} with "
        "--chat or --port)",
    )
    group.add_argument(
        "--num-pages",
        metavar="N",
        type=size,
        help="cache pages of 64 tokens (default: as many as --utilization allows; on a CPU enough "
        "for --batch times --max-model-len tokens)",
    )
    group.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=size,
        help="most tokens of one prompt that a step processes (default: chosen for the GPU; on a "
        "CPU 128)",
    )
    group.add_argument(
        "--prefill-rows",
        metavar="N",
        type=size,
        help="most prompts that one step processes together (default: chosen for the GPU; 1 on a "
        "CPU)",
    )
    group.add_argument(
        "--prefill-tokens",
        metavar="N",
        type=size,
        help="most prompt tokens of a step (default: chosen for the GPU; on a CPU --prefill-chunk "
        "times --prefill-rows; with --reproducible --prefill-chunk)",
    )
    group.add_argument(
        "--mixed-tokens",
        metavar="N",
        type=number(int, lambda x: x >= 0, "a number of tokens: use 0 or more"),
        help="most prompt tokens of a step that also decodes running answers, whose next tokens "
        "wait for it; 0 gives prompts steps of their own (default: chosen for the GPU; on a CPU "
        "--prefill-tokens)",
    )
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="make each answer independent of other requests: the engine processes prompts in "
        "whole chunks and in steps of their own, and compiles one shape of each step",
    )


def _add_reuse(group: argparse._ActionsContainer) -> None:
    """Adds the options of the prefix cache, checkpoint slots and speculative decoding."""
    group.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="process every prompt completely, even if its prefix is cached",
    )
    group.add_argument(
        "--checkpoints",
        metavar="N",
        type=size,
        help="slots for recurrent states at prefix boundaries, without which a model with "
        "recurrent states has no prefix cache; one state takes as much memory as thousands of "
        "cached tokens (default: chosen for the GPU; on a CPU none, or as many as rows with "
        "--port)",
    )
    add_speculation(group)


def _add_shapes(group: argparse._ActionsContainer) -> None:
    """Adds the options of the memory's use and of the buckets to compile."""
    group.add_argument(
        "--utilization",
        metavar="F",
        type=fraction,
        help="fraction of the device's memory to use; the cache gets what the rest of the plan "
        "leaves, up to --batch rows at full length (default: 0.9 on a GPU without --num-pages)",
    )
    group.add_argument(
        "--decode-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller batch sizes to compile too; 0 means none (default: chosen for the GPU; none "
        "on a CPU and with --reproducible)",
    )
    group.add_argument(
        "--prefill-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller numbers of prompt tokens to compile a step for; 0 means none (default: "
        "chosen for the GPU; none on a CPU and with --reproducible)",
    )


def _add_checks(group: argparse._ActionsContainer) -> None:
    """Adds the options of the compilation cache, the recompilation guard and the plan."""
    group.add_argument(
        "--compile-cache",
        metavar="DIR",
        type=Path,
        help="folder that caches compiled executables for the next start; none disables the cache "
        "(default: JAX_COMPILATION_CACHE_DIR; with --port the user's cache folder)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="stop with an error if the engine compiles or allocates anything after the warm-up",
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="print the memory plan with a reason for each line, then exit without loading the "
        "model",
    )
    group.add_argument(
        "--plot",
        metavar="FILE.png",
        type=Path,
        help="with --plan, also draw the plan into this file (default: no picture)",
    )


def add_output(root: argparse.ArgumentParser) -> None:
    """Adds the group of options for the output."""
    group = root.add_argument_group("output")
    group.add_argument("--quiet", action="store_true", help="print only errors to stderr")
    group.add_argument("--version", action="version", version=VERSION)
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object to stdout, and the text to stderr",
    )
