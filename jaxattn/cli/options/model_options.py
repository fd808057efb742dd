"""Options shared by several commands: cache format, speculative decoding and matrix format."""

import argparse

from jaxattn.cli.options.value_types import number, size
from jaxattn.core.cache.formats import CACHE_FORMATS
from jaxattn.limits import DRAFT_SOURCES


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
