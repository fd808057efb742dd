"""The option parser of the commands, options shared by several commands, and input errors."""

import argparse
import re
from typing import NoReturn

from jaxattn import __version__, interrupt
from jaxattn.cli.options.value_types import number, size
from jaxattn.core.cache.formats import CACHE_FORMATS
from jaxattn.memory.engine_limits import DRAFT_SOURCES

PROGRAM = interrupt.program("serve")
MAX_MODEL_LEN = 1024
CHAT_MODEL_LEN = 4096
MAX_TOKENS = 160
BATCH = 4
SERVER_BATCH = 16
VERSION = f"jaxattn {__version__}"
# Fields of `Limits` -> options with other names.
RENAMED = {
    "q_lens": "--q-len",
    "cache_format": "--kv-cache-dtype",
    "native_layers": "--kv-cache-native-layers",
}
# Matches fields of `Limits` and `ModelPlacement` in a message, with or without "=value". Fields
# that are also plain words count only before a value or "must".
_FIELD = re.compile(
    r"(?<![\w-])(?:(?P<name>max_model_len|num_pages|prefill_chunk|prefill_rows|prefill_tokens|mixed_tokens|reproducible|checkpoints|speculate_by|speculate|decode_buckets|prefill_buckets|q_lens"
    r"|cache_dtype|cache_format|native_layers)|(?P<word>batch|utilization|gpus|attention)(?=\s+(?:\d|must\b)|=))"
    r"(?:(?:=|\s+(?=\d))(?P<value>\([^)]*\)|'[^']*'|\w(?:[\w.,]*\w)?))?"
)


class InputError(ValueError):
    """Invalid input, with a one-line message for the user."""


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises InputError instead of exiting.

    Attributes:
        stray: A hint that the error for a word without an option ends with.
    """

    stray = ""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        word = unknown != message and not unknown.startswith("-")
        raise InputError(f"{message}{self.stray}" if word else message)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that adds the default to the help of each option, unless its help has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        written = action.help and "(default: " in action.help
        default = action.default
        if default is None or default is False or default == [] or written:
            return action.help
        if isinstance(default, list):
            return f"{action.help} (default: {' '.join(map(str, default))})"
        return super()._get_help_string(action)


class ProseHelpFormatter(argparse.RawDescriptionHelpFormatter, HelpFormatter):
    """A `HelpFormatter` that keeps the line breaks of the description."""


def in_options(error: Exception | str) -> str:
    """Returns a message in one line, with fields replaced by their options: 'num_pages=3' becomes
    '--num-pages 3'."""

    def option(match: re.Match[str]) -> str:
        field = match["name"] or match["word"]
        name = RENAMED.get(field, "--" + field.replace("_", "-"))
        value = re.sub(r"[()'\s]|,(?=\))", "", match["value"] or "")
        if field == "reproducible":  # a flag without a value
            value = value.removeprefix("True")
        if field not in ("decode_buckets", "prefill_buckets", "q_lens"):
            value = value.replace(",", "")  # options accept no thousands separators
        return f"{name} {value}".rstrip()

    return _FIELD.sub(option, " ".join(str(error).split()))


LAYOUT = {
    "data": "data-parallel groups of GPUs, each with its own rows",
    "tensor": "tensor parallelism: GPUs that divide heads, columns and the vocabulary",
    "context": "context parallelism: GPUs of a group that divide the pages of each row",
    "expert": "expert parallelism: GPUs that divide the experts",
}


def add_cache_format(group: argparse._ActionsContainer) -> None:
    """Adds the options of the KV cache format to a parser or a group."""
    group.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_FORMATS,
        default="auto",
        help="format of the cache: MLA supports bfloat16 and fp8_block, grouped-query attention "
        "all formats except fp8_block",
    )
    group.add_argument(
        "--kv-cache-native-layers",
        metavar="N",
        type=number(int, lambda x: x >= 0, "a number of layers: use 0 or more"),
        default=0,
        help="number of first and of last attention layers that keep the model's own cache format",
    )


def add_speculation(group: argparse._ActionsContainer) -> None:
    """Adds --speculate and --speculate-by: the number of draft tokens, and what drafts them."""
    group.add_argument(
        "--speculate",
        metavar="N",
        type=size,
        default=0,
        help="speculative decoding: most tokens, up to 3, that a step drafts for each row "
        "(default: none)",
    )
    group.add_argument(
        "--speculate-by",
        choices=DRAFT_SOURCES,
        default="lookup",
        help="lookup drafts what followed the row's last tokens before; mtp loads the model's own "
        "prediction layer (MTP), which drafts wherever that is faster (default: lookup)",
    )


def add_dense(group: argparse._ActionsContainer) -> None:
    """Adds --dense, the format of a checkpoint's quantized matrices other than its experts."""
    group.add_argument(
        "--dense",
        choices=("fp8", "4bit", "bfloat16"),
        help="format of a quantized model's matrices except its routed experts; bfloat16 takes "
        "twice the bytes of fp8 and about four times those of 4bit (default: as the checkpoint "
        "stores them)",
    )


def add_layout(group: argparse._ActionsContainer) -> None:
    """Adds --data, --tensor, --context and --expert, which `parallel_config.read_layout` reads."""
    for name, what in LAYOUT.items():
        group.add_argument(f"--{name}", metavar="N", type=size, default=1, help=what)
