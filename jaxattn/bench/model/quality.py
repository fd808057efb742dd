"""`python -m jaxattn.bench quality MODEL TEXT`: perplexity of a text for each format of the cache.

MODEL is a folder or a GGUF file with real weights, and TEXT a UTF-8 file. The command splits the
text into rows of --context tokens, which the model processes twice: by decode steps of one token,
and by prefill in chunks. Decode steps attend to the cache. In prefill, MLA attends to the tokens of
the same chunk before they are quantized, so only a --chunk below --context shows the format's cost.

`perplexity` has a confidence interval of 95%, from the spread of the rows' means. `over auto` is
the ratio to the perplexity of the model's own format by decode steps, on the same tokens; its
interval comes from the rows' differences and is much narrower. `top-1 %` is how often the likeliest
token is the same. The line of auto by prefill shows how rounding by itself changes both.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.result_tables import check_files, show, store
from jaxattn.bench.model.text_scorer import TextScorer, TextScores
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.startup.model_source import ModelSource, read, refusals
from jaxattn.core.cache.formats import CACHE_FORMATS
from jaxattn.models.loading.loader import ModelFolder
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.text import Tokenizer

Z = 1.96  # for a 95% interval
METHOD: dict[str, Any] = {"name": "perplexity of rows of one length", "version": 1}


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "quality", __doc__)
    parser.add_argument(
        "model",
        type=Path,
        help="a folder with config.json, safetensors and a tokenizer, or a GGUF file",
    )
    parser.add_argument("text", type=Path, help="a UTF-8 text file")
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=CACHE_FORMATS,
        metavar="FORMAT",
        help="formats to compare with auto (default: all that the model supports)",
    )
    parser.add_argument("--context", type=int, default=512, help="tokens per row")
    parser.add_argument(
        "--rows", type=int, default=8, help="rows that the model processes together"
    )
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prefill chunk")
    parser.add_argument(
        "--tokens", type=int, help="number of tokens of the text to use (default: all)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of weights and matrix products"
    )
    parser.add_argument(
        "--implementation",
        choices=("mosaic_gpu", "xla"),
        help="which decode kernels run (default: the best for the device)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    args = parser.parse_args(argv)
    for name, least in (("context", 2), ("rows", 1), ("chunk", 1), ("tokens", 2)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}; got {value}")
    check_files(parser, args)
    return args


def main(argv: Sequence[str], program: str) -> int:
    args = parse(argv, program)
    try:
        with refusals():
            folder = read(args.model, args.dtype, None)
        tokenizer = ModelSource(folder=folder).tokenizer()
        rows = rows_of(tokenizer, args.text, args.context, args.tokens)
        formats = formats_of(folder.model, args.kv_cache_dtype)
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = run_metadata.begin(
        "quality", program, ["quality", *argv], seed=None, method=METHOD
    )
    result |= {"model": args.model.name, "text": args.text.name, "windows": len(rows), "rows": []}
    result |= {"context": rows.shape[1], "tokens": rows.size}
    reference: TextScores | None = None
    for name in formats:
        begin = time.perf_counter()
        for by, scores in measure(folder, name, rows, args).items():
            reference = reference or scores
            result["rows"].append({"cache": name, "by": by, **line(scores, reference)})
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        store(result, args.json)
    run_metadata.end(result, args.json)
    title = f"{args.model.name}: {len(rows)} rows of {rows.shape[1]} tokens of {args.text.name}"
    show(title, result["rows"])
    return 0


def rows_of(
    tokenizer: Tokenizer, text: Path, context: int, max_tokens: int | None
) -> "np.ndarray[Any, Any]":
    """The text's tokens as int32 [rows, context], each row after a BOS if the tokenizer adds one.

    The tokens after the last full row are dropped.

    Raises:
        InputError: the file cannot be read, or has too few tokens.
    """
    try:
        content = text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {text}: {error}") from error
    bos_tokens = tokenizer.encode("")
    tokens = tokenizer.encode(content)[len(bos_tokens) :][:max_tokens]
    width = min(context - len(bos_tokens), len(tokens))
    if width < 1:
        raise InputError(f"{text} has {len(tokens)} tokens; it needs at least 2")
    count = len(tokens) // width
    body = np.array(tokens[: count * width], np.int32).reshape(count, width)
    return np.concatenate([np.tile(np.array(bos_tokens, np.int32), (count, 1)), body], axis=1)


def formats_of(model: DecoderModel, requested_formats: Sequence[str] | None) -> list[str]:
    """The formats to measure, the model's own first.

    Raises:
        InputError: the model does not support a requested format.
    """
    if requested_formats is None:
        formats_per_mixer = [
            set(m.cache_formats) for m in model.spec.mixers.values() if m.cache_formats
        ]
        common_formats = set[str].intersection(*formats_per_mixer) if formats_per_mixer else set()
        requested_formats = [name for name in CACHE_FORMATS if name in common_formats]
    distinct_formats = []
    for name in requested_formats:
        try:
            if name != "auto" and model.with_cache_format(name).caches != model.caches:
                distinct_formats.append(name)
        except ValueError as error:
            raise InputError(str(error)) from error
    return ["auto", *distinct_formats]


def measure(
    folder: ModelFolder, name: str, rows: "np.ndarray[Any, Any]", args: argparse.Namespace
) -> dict[str, TextScores]:
    """The scores of the rows by decode steps and by prefill, with a cache in this format."""
    own = folder.in_cache_format(name)
    scorer = TextScorer(
        own.model,
        own.open().place(),
        rows=min(args.rows, len(rows)),
        context=rows.shape[1],
        chunk=args.chunk,
        implementation=args.implementation,
    )
    return {"decode": scorer.by_decode(rows), "prefill": scorer.by_prefill(rows)}


def line(scores: TextScores, reference: TextScores) -> dict[str, Any]:
    """A row of the table."""
    loss, loss_interval = interval(-scores.logprobs)
    ratio, ratio_interval = interval(reference.logprobs - scores.logprobs)
    same, same_interval = interval(scores.best == reference.best)
    return {
        "perplexity": math.exp(loss),
        "from": math.exp(loss - loss_interval),
        "to": math.exp(loss + loss_interval),
        "over auto": f"{math.exp(ratio):.4f}",
        "ratio from": f"{math.exp(ratio - ratio_interval):.4f}",
        "ratio to": f"{math.exp(ratio + ratio_interval):.4f}",
        "top-1 %": f"{100 * same:.2f}",
        "top-1 ±": f"{100 * same_interval:.2f}",
        "nats": loss,
    }


def interval(values: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """(mean, half of the 95% interval) of values [rows, tokens].

    The interval comes from the spread of the rows' means, because a row's tokens are not
    independent.
    """
    means = values.astype(np.float64).mean(axis=1)
    if len(means) < 2:
        return float(means.mean()), math.nan
    return float(means.mean()), Z * float(means.std(ddof=1)) / math.sqrt(len(means))
