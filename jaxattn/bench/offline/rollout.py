"""`python -m jaxattn.bench rollout MODEL`: weight updates, scores and exact mode of an engine.

MODEL is a shipped configuration, the beginning of its name, or a folder with a config.json. Weights
are random, in the model's shapes, and times are those of the wall clock.

    update   new weights from arrays on the same device, until the last byte is written. The bench
             compares this time with the runtime's copies of as many bytes. The device needs room
             for two sets of weights, and the largest parameter once more.
    score    log-probabilities of given texts, compared with reading the same texts as prompts
    exact    the same requests in an engine with default limits and in exact mode, greedy and with
             log-probabilities; then a replay of the rows, whose bits the bench compares

`relative` is the ratio to the row that `of` names. Each value is the median of the repeats. No
engine has a prefix cache, so every prompt is read.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.bench.harness import run_metadata
from jaxattn.bench.harness.command_parser import command_parser
from jaxattn.bench.harness.result_tables import check_files, show, store
from jaxattn.bench.model.config_folder import SMALL
from jaxattn.bench.model.model_lookup import UnknownModelError, find
from jaxattn.bench.model.random_weights import random_params
from jaxattn.bench.offline.jaxattn_engine import check_length
from jaxattn.bench.offline.workload import OfflineWorkload
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import Completion, Logprobs
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.memory.plan import nbytes
from jaxattn.models.families.components.config_fields import ConfigFields
from jaxattn.models.network.decoder_model import DecoderModel
from jaxattn.models.registry import read_model

METHOD = {"name": "the wall clock of an engine's calls", "version": 1}
UPDATE, SCORE, EXACT = MEASURES = ("update", "score", "exact")
SIZES = {  # the default, that of --small, and what it is
    "requests": (128, 3, "number of requests, which decode together"),
    "prompt": (512, 20, "tokens of each prompt"),
    "output": (220, 8, "tokens of each answer"),
    "texts": (24, 2, "number of texts to score"),
    "text": (2048, 40, "tokens of each text"),
    "repeats": (5, 1, "number of runs, of which the bench reports the median"),
}
COPIED = 2**31  # bytes of one of the copies that an update is compared with
SHORTEST = 64  # tokens of a row in the engine of the updates
WARM_UPS = 2  # calls before those that count

Row = dict[str, Any]


def parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, "rollout", __doc__)
    parser.add_argument("name", nargs="?", metavar="MODEL", help="what to run; see above")
    parser.add_argument("--small", action="store_true", help="use a model of one layer on a CPU")
    for name, (default, small, what) in SIZES.items():
        help = f"{what} (default: {default}; with --small {small})"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=help)
    parser.add_argument(
        "--measures", nargs="+", choices=MEASURES, default=list(MEASURES), help="measures to run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args(argv)
    for name, (default, small, _) in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, small if args.small else default)
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive; got {getattr(args, name)}")
    if bool(args.name) == args.small:
        parser.error("give a MODEL, or --small, which has its own model")
    check_files(parser, args)
    try:
        if args.small:
            args.name, args.model = "small", read_model(ConfigFields(SMALL, "small")).model
        else:
            args.name, _, args.model = find(args.name)
    except UnknownModelError as error:
        parser.error(str(error))
    lengths = {SCORE: args.text + 1, EXACT: args.prompt + args.output, UPDATE: SHORTEST}
    args.longest = max(lengths[measure] for measure in args.measures)
    if args.longest > args.model.max_position_embeddings:
        parser.error(
            f"{args.name} supports {args.model.max_position_embeddings:,} tokens; got "
            f"{args.longest:,}: use a smaller --prompt, --output or --text"
        )
    return args


def main(argv: Sequence[str], program: str) -> int:
    args = parse(argv, program)
    # The backend reads these as it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    result = run_metadata.begin("rollout", program, ["rollout", *argv], method=METHOD)
    result |= {"model": args.name, "rows": []}
    for row in measured(args):
        print(row, flush=True)
        result["rows"].append(row)
        store(result, args.json)
    run_metadata.end(result, args.json)
    show(f"jaxattn rollout, {args.name} on {result['device']}", result["rows"])
    return 0


def measured(args: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of all measures, with one engine at a time."""
    model: DecoderModel = args.model
    if UPDATE in args.measures:
        yield from update_rows(model, args.repeats)
    if set(args.measures) == {UPDATE}:
        return
    params = jax.block_until_ready(random_params(model))
    limits = Limits(batch=args.requests, max_model_len=args.longest, prefix_cache=False)
    with Engine(model, params, limits) as engine:
        if SCORE in args.measures:
            yield from score_rows(engine, args)
        if EXACT in args.measures:
            found = {what: run(engine, args, what)[0] for what in KINDS}
            yield from (_row(DEFAULT.format(what), "s", found[what]) for what in KINDS)
    del engine
    if EXACT in args.measures:
        with Engine(model, params, dataclasses.replace(limits, reproducible=True)) as engine:
            for what in KINDS:
                seconds, done = run(engine, args, what)
                of = DEFAULT.format(what)
                yield _row(f"exact mode, {what}", "s", seconds, of, found[what])
            yield from replay_rows(engine, done, seconds, args.repeats)


# ------------------------------------------------------------------------------------ new weights


def update_rows(model: DecoderModel, repeats: int) -> Iterator[Row]:
    """Rows of an update from arrays on the device, copied and shared."""
    limits = Limits(batch=1, max_model_len=SHORTEST, prefill_chunk=SHORTEST)
    with Engine(model, random_params(model), limits) as engine:
        engine.start()
        buffers = engine._weights
        assert buffers is not None
        new = random_params(model, seed=1)
        total = nbytes(new)

        def update(*, share: bool = False) -> None:
            engine.update(new, share=share)
            jax.block_until_ready(buffers.leaves)

        took = _median(update, repeats)
        shared = _median(lambda: update(share=True), repeats, before=update)
    del engine, buffers, new
    x = jnp.zeros(min(COPIED, total), jnp.uint8)
    times = -(-total // x.nbytes)

    def copy() -> None:
        for _ in range(times):
            y = jax.device_put(x, x.device, may_alias=False)
        jax.block_until_ready(y)

    copied = _median(copy, repeats) * total / (times * x.nbytes)
    what = f"{total / 1e9:.2f} GB"
    of = f"copy of {what} by the runtime"
    yield _row(of, "ms", copied * 1e3)
    yield _row(f"update of {what}", "ms", took * 1e3, of, copied * 1e3)
    yield _row("update that shares all arrays", "ms", shared * 1e3, of, copied * 1e3)


# ------------------------------------------------------------------------- scores and exact mode


def score_rows(engine: Engine, args: argparse.Namespace) -> Iterator[Row]:
    """Rows of texts that are read as prompts, and scored."""
    tokens = args.texts * args.text
    prompts = _texts(args, SCORE, args.texts, args.text)
    read = _median(
        lambda: _generated(engine, (Request(text, max_tokens=1) for text in next(prompts))),
        args.repeats,
    )
    scored = _median(lambda: engine.score(next(prompts)), args.repeats)
    of = "texts as prompts"
    yield _row(of, "tokens/s", tokens / read)
    yield _row("score", "tokens/s", tokens / scored, of, tokens / read)


TOLD = "log-probabilities"
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, TOLD: {"logprobs": 0, "temperature": 1.0}}
DEFAULT = "default limits, {}"


def run(engine: Engine, args: argparse.Namespace, what: str) -> tuple[float, list[Completion]]:
    """(seconds for all requests, those of the last run)."""
    prompts = _texts(args, what, args.requests, args.prompt)
    done: list[Completion] = []

    def generate() -> None:
        options = {"max_tokens": args.output, **KINDS[what]}
        done[:] = _generated(engine, (Request(text, **options) for text in next(prompts)))

    return _median(generate, args.repeats), done


def replay_rows(
    engine: Engine, done: Sequence[Completion], seconds: float, repeats: int
) -> Iterator[Row]:
    """Rows of a replay of finished requests, and of the log-probabilities that it changes."""
    texts = [[*each.request.prompt, *each.tokens] for each in done]
    starts = [len(each.request.prompt) for each in done]
    took = _median(lambda: engine.score(texts, starts=starts), repeats)
    yield _row("replay of all rows", "s", took, f"exact mode, {TOLD}", seconds)
    again = engine.score(texts, starts=starts)
    pairs = [
        pair
        for each, found, start in zip(done, again, starts, strict=True)
        for pair in zip(each.logprobs, found[start:], strict=True)
    ]
    differing = sum(new is None or _bits(old) != _bits(new) for old, new in pairs)
    yield _row(f"log-probabilities that differ, of {len(pairs):,}", "", float(differing))


def _generated(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """Serves all requests.

    Raises:
        MeasureError: an answer is shorter than requested.
    """
    done = engine.generate(requests)
    for each in done:
        check_length(each)
    return done


def _texts(
    args: argparse.Namespace, what: str, count: int, tokens: int
) -> Iterator[list[Sequence[int]]]:
    """New random texts each time."""
    for repeat in itertools.count():
        lengths = [(tokens, 0)] * count
        drawn = OfflineWorkload().draw(what, lengths, args.model.vocab_size, repeat)
        yield [each.prompt for each in drawn]


def _bits(found: Logprobs) -> bytes:
    return np.float32(found.token).tobytes()


def _median(
    call: Callable[[], Any], repeats: int, *, before: Callable[[], Any] = lambda: None
) -> float:
    """The median of a call's seconds, without those of the first calls and of `before`."""
    found = []
    for _ in range(WARM_UPS + repeats):
        before()
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[WARM_UPS:])


def _row(what: str, unit: str, value: float, of: str = "", than: float | None = None) -> Row:
    relative = value / than if than else ""
    return {"what": what, "value": value, "unit": unit, "relative": relative, "of": of}
