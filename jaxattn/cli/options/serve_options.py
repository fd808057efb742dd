"""The options of `python -m jaxattn.serve`, a function for each group of the help."""

import argparse
import math
from pathlib import Path

from jaxattn.cli.options import http_options, multihost_options
from jaxattn.cli.options.parser import (
    BATCH,
    CHAT_MODEL_LEN,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    PROGRAM,
    SERVER_BATCH,
    VERSION,
    HelpFormatter,
    OptionParser,
    add_cache_format,
    add_dense,
    add_layout,
)
from jaxattn.cli.options.value_types import fraction, number, size, sizes


def parser() -> argparse.ArgumentParser:
    """The command's options, in groups, each with its default in the help."""
    root = OptionParser(
        prog=PROGRAM,
        formatter_class=HelpFormatter,
        description="Continues prompts with a model, or chats with it. Without arguments the "
        "embedded model of bytes, a hybrid of MLA and gated delta nets, continues six beginnings "
        "of Python code.",
        epilog="Exit codes: 0; 1 if a request was refused, or if stdout is closed or its "
        "reader left; 2 for bad input; 130 after Ctrl-C; 143 after SIGTERM.",
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
    """What is loaded, from where, and what runs it."""
    group = root.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="FOLDER_OR_NAME",
        help="folder with config.json and safetensors, or a name on the Hugging Face hub such as "
        "org/name, whose files are fetched (default: the embedded model)",
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
        help="dtype of a published model's weights and products (default: bfloat16)",
    )
    group.add_argument(
        "--experts",
        choices=("fp8", "bfloat16"),
        help="format of a published model's routed experts; bfloat16 takes twice the bytes "
        "of fp8 (default: fp8 where the folder has them in FP8)",
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
        help="where the model runs; auto is what JAX prefers",
    )


def add_prompts(root: argparse.ArgumentParser) -> None:
    """What is continued, how far, and what ends it."""
    group = root.add_argument_group("prompts")
    group.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a text to continue; may be repeated; - reads one from stdin, shorter than "
        "--max-model-len (default: six that begin Python code)",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a turn of its own in the model's chat template; without --prompt, a "
        "conversation: each line of stdin is a turn, until stdin ends or Ctrl-C",
    )
    group.add_argument(
        "--system",
        metavar="TEXT",
        help="with --chat, the message before the first turn (default: none)",
    )
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=size,
        help=f"tokens to generate for each prompt (default: {MAX_TOKENS}; with --chat as many as "
        "--max-model-len leaves)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="ends a text behind it, beside the model's own stop tokens; may be repeated "
        "(default: none)",
    )


def add_sampling(root: argparse.ArgumentParser) -> None:
    """How the next token is drawn."""
    group = root.add_argument_group(
        "sampling",
        "the model's defaults are those of its generation_config.json; with --port a request may "
        "say others",
    )
    group.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, lambda x: 0 <= x < math.inf, "a temperature: use 0 or more"),
        help="0 takes the most likely token (default: the model's, else 0, and with --port 1)",
    )
    group.add_argument(
        "--top-p",
        metavar="P",
        type=number(float, lambda x: 0 < x <= 1, "a probability: use above 0 and at most 1"),
        help="sample from the most likely tokens that together reach P (default: the model's, "
        "else 1)",
    )
    group.add_argument(
        "--top-k",
        metavar="K",
        type=number(int, lambda x: 0 <= x < 2**31, "a number of tokens: use 0 or more"),
        help="sample from the K most likely tokens, 0 from all (default: the model's, else 0)",
    )
    group.add_argument(
        "--min-p",
        metavar="P",
        type=number(float, lambda x: 0 <= x <= 1, "a probability: use 0 to 1"),
        help="sample from tokens at least P times as likely as the most likely one (default: the "
        "model's, else 0)",
    )
    group.add_argument(
        "--repetition-penalty",
        metavar="P",
        type=number(float, lambda x: 0.01 <= x <= 100, "a penalty: use 0.01 to 100"),
        help="above 1 makes tokens that the text has less likely (default: the model's, else 1)",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=number(int, lambda x: 0 <= x < 2**32, "a seed: use 0 to 4294967295"),
        default=0,
        help="decides every draw, together with the prompt's number and the token's position",
    )


def add_memory(root: argparse.ArgumentParser) -> None:
    """The group of sizes: rows, caches, compiled shapes and the layout over GPUs."""
    group = root.add_argument_group("batch and memory", "sizes may end in k (1024) or m (1048576)")
    _add_rows(group)
    _add_reuse(group)
    _add_shapes(group)
    add_cache_format(group)
    add_layout(group)
    _add_checks(group)


def _add_rows(group: argparse._ActionsContainer) -> None:
    """How many rows there are, how long they get and how they are read."""
    group.add_argument(
        "--batch",
        metavar="N",
        type=size,
        help="prompts that decode together (default: chosen for the model and the GPU, 1 for a "
        f"conversation; on a CPU {BATCH}, and with --port {SERVER_BATCH})",
    )
    group.add_argument(
        "--max-model-len",
        metavar="N",
        type=size,
        help="longest prompt and its continuation together, in tokens (default: the model's own, "
        f"as far as the GPU's cache holds it; on a CPU at most {MAX_MODEL_LEN}, with --chat or "
        f"--port {CHAT_MODEL_LEN})",
    )
    group.add_argument(
        "--num-pages",
        metavar="N",
        type=size,
        help="pages of 64 tokens (default: as --utilization says, and on a CPU enough for --batch "
        "times --max-model-len)",
    )
    group.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=size,
        help="most tokens of one prompt in a step (default: chosen for the GPU; on a CPU 128)",
    )
    group.add_argument(
        "--prefill-rows",
        metavar="N",
        type=size,
        help="most prompts that a step reads of (default: chosen for the GPU; 1 on a CPU and with "
        "--reproducible)",
    )
    group.add_argument(
        "--prefill-tokens",
        metavar="N",
        type=size,
        help="most tokens of prompts in a step (default: chosen for the GPU, or --prefill-chunk "
        "times --prefill-rows)",
    )
    group.add_argument(
        "--mixed-tokens",
        metavar="N",
        type=number(int, lambda x: x >= 0, "a number of tokens: use 0 or more"),
        help="most tokens of prompts in a step in which other texts go on, whose next token waits "
        "for it; 0 gives prompts steps of their own (default: chosen for the GPU; on a CPU as many "
        "as without such texts)",
    )
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="a text does not depend on the others that are served beside it: prompts are read one "
        "at a time, in steps of their own, and each kind of step has one shape",
    )


def _add_reuse(group: argparse._ActionsContainer) -> None:
    """What rows take from earlier ones: prefixes, states and guesses."""
    group.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="read every prompt whole, also where it begins as an earlier one did",
    )
    group.add_argument(
        "--checkpoints",
        metavar="N",
        type=size,
        help="slots for states at the ends of prefixes: a model with recurrent states has no "
        "prefix cache without them, and a state takes what thousands of tokens do (default: chosen "
        "for the GPU; on a CPU none, with --port as many as rows)",
    )
    group.add_argument(
        "--speculate",
        metavar="N",
        type=size,
        default=0,
        help="tokens that a step guesses per row, up to 3: those that followed the row's last ones "
        "where they stood before (default: none)",
    )


def _add_shapes(group: argparse._ActionsContainer) -> None:
    """The pool's share of the memory, and the shapes to compile."""
    group.add_argument(
        "--utilization",
        metavar="F",
        type=fraction,
        help="give the cache what the plan leaves of this fraction of the device's memory, up to "
        "--batch rows at full length (default: 0.9 on a GPU, unless --num-pages says how many)",
    )
    group.add_argument(
        "--decode-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller batches to compile as well, 0 for none (default: chosen for the GPU; none "
        "on a CPU and with --reproducible)",
    )
    group.add_argument(
        "--prefill-buckets",
        metavar="N,N",
        type=sizes,
        help="fewer prompt tokens of a step to compile as well, 0 for none (default: chosen for "
        "the GPU; none on a CPU and with --reproducible)",
    )


def _add_checks(group: argparse._ActionsContainer) -> None:
    """What is kept of a compilation, what is refused after it, and the plan."""
    group.add_argument(
        "--compile-cache",
        metavar="DIR",
        type=Path,
        help="keeps what XLA compiles and tunes, for the next start; none keeps nothing (default: "
        "as JAX_COMPILATION_CACHE_DIR says, and with --port the user's cache folder)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="stop if anything is compiled or allocated after the warm-up",
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="print the whole memory plan with the reason of every line, load nothing and stop",
    )
    group.add_argument(
        "--plot",
        metavar="FILE.png",
        type=Path,
        help="with --plan, draws it as a picture too (default: no picture)",
    )


def add_output(root: argparse.ArgumentParser) -> None:
    """What the terminal gets."""
    group = root.add_argument_group("output")
    group.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    group.add_argument("--version", action="version", version=VERSION)
    group.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, the text on stderr"
    )
