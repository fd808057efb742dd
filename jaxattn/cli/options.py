"""The options of `python -m jaxattn.serve`: what is accepted, and what a refusal says."""

import argparse
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from jaxattn import __version__, interrupt
from jaxattn.cli import hosts_options, server_options
from jaxattn.cli.values import fraction as fraction
from jaxattn.cli.values import number as number
from jaxattn.cli.values import size as size
from jaxattn.cli.values import sizes as sizes
from jaxattn.core.formats import CACHE_FORMATS

PROGRAM = interrupt.program("serve")
MAX_MODEL_LEN = 1024
CHAT_MODEL_LEN = 4096
MAX_TOKENS = 160
BATCH = 4
SERVER_BATCH = 16
VERSION = f"jaxattn {__version__}"
# Fields of `Limits` whose options have other names.
RENAMED = {
    "q_lens": "--q-len",
    "cache_format": "--kv-cache-dtype",
    "native_layers": "--kv-cache-native-layers",
}
# Names of `Limits` and `Placement` in a message, with "=value" or without. Those that are also
# plain words count only with a value, or where they begin a sentence about one.
_FIELD = re.compile(
    r"(?<![\w-])(?:(?P<name>max_model_len|num_pages|prefill_chunk|prefill_rows|checkpoints|speculate|decode_buckets|prefill_buckets|q_lens"
    r"|cache_dtype|cache_format|native_layers)|(?P<word>batch|utilization|gpus|attention)(?=\s+(?:\d|must\b)|=))"
    r"(?:(?:=|\s+(?=\d))(?P<value>\([^)]*\)|'[^']*'|\w(?:[\w.,]*\w)?))?"
)


class InputError(ValueError):
    """What was asked for cannot be done; one line for the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def in_options(error: Exception | str) -> str:
    """A message in one line, in which fields are the options that set them: 'num_pages=3' is
    '--num-pages 3'."""

    def option(match: re.Match[str]) -> str:
        field = match["name"] or match["word"]
        name = RENAMED.get(field, "--" + field.replace("_", "-"))
        value = re.sub(r"[()'\s]|,(?=\))", "", match["value"] or "")
        if field not in ("decode_buckets", "prefill_buckets", "q_lens"):
            value = value.replace(",", "")  # of thousands: no option takes them
        return f"{name} {value}".rstrip()

    return _FIELD.sub(option, " ".join(str(error).split()))


LAYOUT = {
    "data": "groups of GPUs, each with rows of its own",
    "tensor": "GPUs of a group, which divide heads, columns and the vocabulary",
    "context": "GPUs of a group over which the pages of a row are spread",
    "expert": "GPUs over which whole experts are spread",
}


def add_cache_format(group: Any) -> None:
    """The options of the cache's format, for a parser or a group of one."""
    group.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_FORMATS,
        default="auto",
        help="what the cache stores: MLA has bfloat16 and fp8_block, grouped-query attention all "
        "but fp8_block",
    )
    group.add_argument(
        "--kv-cache-native-layers",
        metavar="N",
        type=number(int, lambda x: x >= 0, "a number of layers: use 0 or more"),
        default=0,
        help="first and last layers of attention that keep the model's own format",
    )


def add_layout(group: Any) -> None:
    """--data, --tensor, --context and --expert; `layout.read_layout` reads them."""
    for name, what in LAYOUT.items():
        group.add_argument(f"--{name}", metavar="N", type=size, default=1, help=what)


def parser() -> argparse.ArgumentParser:
    """The command's options, in groups, each with its default in the help."""
    root = Parser(
        prog=PROGRAM,
        formatter_class=HelpFormatter,
        description="Continues prompts with a model, or chats with it. Without arguments the "
        "embedded model of bytes, a hybrid of MLA and gated delta nets, continues six beginnings "
        "of Python code.",
        epilog="Exit codes: 0; 1 if a request was refused, or if stdout is closed or its "
        "reader left; 2 for bad input; 130 after Ctrl-C; 143 after SIGTERM.",
    )
    model = root.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="FOLDER_OR_NAME",
        help="folder with config.json and safetensors, or a name on the Hugging Face hub such as "
        "org/name, of which the files that are needed are fetched (default: the embedded model)",
    )
    model.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="the same: how --model was called before (default: see --model)",
    )
    model.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a model on the hub (default: main)",
    )
    model.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of a published model's weights and products (default: bfloat16)",
    )
    model.add_argument(
        "--experts",
        choices=("fp8", "bfloat16"),
        help="what a published model's routed experts are kept in; bfloat16 takes twice the bytes "
        "of fp8 (default: fp8 where the folder has them in FP8)",
    )
    model.add_argument(
        "--implementation",
        choices=("mosaic_gpu", "mosaic_gpu_interpret", "xla"),
        help="of the decode kernels (default: the best for the device)",
    )
    model.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto is what JAX prefers",
    )
    prompts = root.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated; - reads one prompt from stdin, shorter than --max-model-len "
        "(default: six that begin Python code)",
    )
    prompts.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a turn of its own in the model's chat template; without --prompt, a "
        "conversation: each line of stdin is a turn, until stdin ends or Ctrl-C",
    )
    prompts.add_argument(
        "--system",
        metavar="TEXT",
        help="with --chat, the message before the first turn (default: none)",
    )
    prompts.add_argument(
        "--max-tokens",
        metavar="N",
        type=size,
        help=f"generated for each prompt (default: {MAX_TOKENS}; with --chat as many as "
        "--max-model-len leaves)",
    )
    prompts.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="ends a text behind it, beside the model's own stop tokens; may be repeated "
        "(default: none)",
    )
    sampling = root.add_argument_group(
        "sampling", "the model's defaults are those of its generation_config.json"
    )
    sampling.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, lambda x: 0 <= x < math.inf, "a temperature: use 0 or more"),
        help="0 takes the most likely token (default: the model's, else 0)",
    )
    sampling.add_argument(
        "--top-p",
        metavar="P",
        type=number(float, lambda x: 0 < x <= 1, "a probability: use above 0 and at most 1"),
        help="sample from the most likely tokens that together reach P (default: the model's, "
        "else 1)",
    )
    sampling.add_argument(
        "--top-k",
        metavar="K",
        type=number(int, lambda x: 0 <= x < 2**31, "a number of tokens: use 0 or more"),
        help="sample from the K most likely tokens, 0 from all (default: the model's, else 0)",
    )
    sampling.add_argument(
        "--min-p",
        metavar="P",
        type=number(float, lambda x: 0 <= x <= 1, "a probability: use 0 to 1"),
        help="sample from tokens at least P times as likely as the most likely one (default: the "
        "model's, else 0)",
    )
    sampling.add_argument(
        "--seed",
        metavar="N",
        type=number(int, lambda x: 0 <= x < 2**32, "a seed: use 0 to 4294967295"),
        default=0,
        help="with the prompt's number and the position it decides every draw",
    )
    memory = root.add_argument_group("batch and memory", "sizes may end in k (1024) or m (1048576)")
    memory.add_argument(
        "--batch",
        metavar="N",
        type=size,
        help=f"prompts that decode together (default: {BATCH}, 1 for a conversation, and with "
        f"--port {SERVER_BATCH})",
    )
    memory.add_argument(
        "--max-model-len",
        metavar="N",
        type=size,
        help="longest prompt and its continuation together, in tokens (default: "
        f"{MAX_MODEL_LEN}, with --chat or --port {CHAT_MODEL_LEN}, or the model's own if that is "
        "shorter)",
    )
    memory.add_argument(
        "--num-pages",
        metavar="N",
        type=size,
        help="pages of 64 tokens (default: enough for --batch times --max-model-len)",
    )
    memory.add_argument(
        "--prefill-chunk",
        metavar="N",
        type=size,
        default=128,
        help="prompt tokens that are read at a time",
    )
    memory.add_argument(
        "--prefill-rows",
        metavar="N",
        type=size,
        default=1,
        help="prompts that may be read together, a chunk of each (default: 1, so that a text does "
        "not depend on how many are)",
    )
    memory.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="read every prompt whole, also where it begins as an earlier one did",
    )
    memory.add_argument(
        "--checkpoints",
        metavar="N",
        type=size,
        help="slots for states at the ends of prefixes: a model with recurrent states has no "
        "prefix cache without them, and a state takes what thousands of tokens do (default: none; "
        "with --port as many as rows)",
    )
    memory.add_argument(
        "--speculate",
        metavar="N",
        type=size,
        default=0,
        help="tokens that a step guesses per row, up to 3: those that followed the row's last ones "
        "where they stood before (default: none)",
    )
    memory.add_argument(
        "--utilization",
        metavar="F",
        type=fraction,
        help="give the cache what the plan leaves of this fraction of the device's memory, up to "
        "--batch rows at full length (default: as many pages as --num-pages says)",
    )
    memory.add_argument(
        "--decode-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller batches to compile as well (default: none, so that a text does not depend on "
        "how many rows run)",
    )
    memory.add_argument(
        "--prefill-buckets",
        metavar="N,N",
        type=sizes,
        help="smaller chunks to compile as well, for the end of a prompt (default: none)",
    )
    add_cache_format(memory)
    add_layout(memory)
    memory.add_argument(
        "--compile-cache",
        metavar="DIR",
        type=Path,
        help="keeps what XLA compiles and tunes, for the next start; none keeps nothing (default: "
        "as JAX_COMPILATION_CACHE_DIR says, and with --port the user's cache folder)",
    )
    memory.add_argument(
        "--strict",
        action="store_true",
        help="stop if anything is compiled or allocated after the warm-up",
    )
    memory.add_argument(
        "--plan",
        action="store_true",
        help="print the whole memory plan with the reason of every line, load nothing and stop",
    )
    memory.add_argument(
        "--plot",
        metavar="FILE.png",
        type=Path,
        help="with --plan, draws it as a picture too (default: no picture)",
    )
    hosts_options.add(root)
    output = root.add_argument_group("output")
    output.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    output.add_argument("--version", action="version", version=VERSION)
    output.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, the text on stderr"
    )
    server_options.add(root)
    return root
