"""Checks for options of `serve` and `plan` that contradict each other.

`Limits` and `Parallel` reject the combinations that are also invalid in Python. The checks here are
for options that an engine would silently lower or ignore. Their errors name both options.
"""

import argparse

from jaxattn.cli.options import http_options
from jaxattn.cli.options.parser import InputError
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.limits import LINE_TOKENS


def check_sizes(options: argparse.Namespace) -> None:
    """Raises InputError if a size exceeds the size that it is a part of, or if --num-pages cannot
    hold a row of --max-model-len."""
    length, batch, pages = options.max_model_len, options.batch, options.num_pages
    for smaller_name, larger_name, reason in (
        ("prefill_chunk", "max_model_len", "no prompt is as long as a chunk"),
        ("prefill_rows", "batch", "each prompt needs a row"),
        ("mixed_tokens", "prefill_tokens", "no step processes that many prompt tokens"),
    ):
        smaller, larger = getattr(options, smaller_name, None), getattr(options, larger_name, None)
        if smaller and larger and smaller > larger:
            raise InputError(
                f"{_named(smaller_name, smaller)} exceeds {_named(larger_name, larger)}, and "
                f"{reason}; decrease it, or leave one of them out"
            )
    _check_mixed(options)
    capacity = pages and pages * PAGE_SIZE * options.context
    if capacity and length and capacity < length:
        num_pages = -(-length // (PAGE_SIZE * options.context))
        row = _named("max_model_len", length)
        raise InputError(
            f"{_named('num_pages', pages)} has room for only {capacity:,} tokens of {row}; give "
            f"{num_pages} pages or more, a smaller length, or leave one of them out"
        )
    if batch and batch % options.data:
        raise InputError(
            f"{_named('batch', batch)} must be a multiple of {_named('data', options.data)}, "
            "because all groups have the same number of rows"
        )


def _check_mixed(options: argparse.Namespace) -> None:
    """Raises InputError if --mixed-tokens is less than a mixed step processes of one prompt."""
    tokens = getattr(options, "mixed_tokens", None)
    line = min(LINE_TOKENS, options.prefill_chunk or LINE_TOKENS)
    if tokens and tokens < line:
        raise InputError(
            f"{_named('mixed_tokens', tokens)} is less than the {line} tokens of a prompt that a "
            f"step processes together; give {line} or more, or 0 for prompt steps of their own"
        )


def check_reuse(options: argparse.Namespace) -> None:
    """Raises InputError for --checkpoints without a prefix cache, and for --speculate together with
    --reproducible."""
    if options.checkpoints:
        states = f"{_named('checkpoints', options.checkpoints)} stores states of cached prefixes"
        if options.no_prefix_cache:
            raise InputError(
                f"{states}, but --no-prefix-cache disables the prefix cache; leave one of them out"
            )
        if options.data > 1:
            raise InputError(
                f"{states}, but {_named('data', options.data)} has no prefix cache; leave "
                "--checkpoints out"
            )
    if options.speculate and options.reproducible:
        raise InputError(
            f"{_named('speculate', options.speculate)} needs steps of a second shape for batches "
            "without drafts, but --reproducible compiles one shape; leave one of them out"
        )


def check_server(options: argparse.Namespace) -> None:
    """Raises InputError for a server option without --port."""
    if options.port is not None:
        return
    server = argparse.ArgumentParser(add_help=False)
    http_options.add(server)
    for action in server._actions:
        if getattr(options, action.dest) != action.default:
            raise InputError(
                f"{action.option_strings[0]} applies only to a server; give --port too, or leave "
                "it out"
            )


def _named(field: str, value: int) -> str:
    return f"--{field.replace('_', '-')} {value}"
