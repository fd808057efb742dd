"""The option parser of the commands, and input errors."""

import argparse
import re
from typing import NoReturn

from jaxattn import __version__

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
