"""A model of bytes continues prompts, many at a time, in one compiled step: python -m jaxattn.serve

The generated text goes to stdout (with `--json`, one JSON object instead), all else to stderr.
Exit codes: 0; 1 if a request was refused, or if stdout is closed or its reader left; 2 for bad
input; 130 after Ctrl-C and 143 after SIGTERM. What was generated until then is reported all the
same. Before the first token, and at a second Ctrl-C, the command ends at once.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxattn import interrupt
from jaxattn.cli.command import code_of, exit_code, interrupts_raised
from jaxattn.cli.options import MAX_MODEL_LEN, PROGRAM, InputError, in_options, parser
from jaxattn.cli.prompts import PROMPTS
from jaxattn.cli.report import TextStream, measure, plan_lines, summary_lines, to_json
from jaxattn.core.checks import MOST
from jaxattn.engine.engine import Engine
from jaxattn.engine.request import Completion, GenerationInterrupted, Request
from jaxattn.engine.seal import SealError
from jaxattn.kernels.hopper.machine import require_hopper
from jaxattn.memory.budget import PlanError
from jaxattn.memory.device import device_memory
from jaxattn.memory.limits import Limits
from jaxattn.models import checkpoint
from jaxattn.models.config import HybridConfig
from jaxattn.models.hybrid import Hybrid
from jaxattn.plan import plan
from jaxattn.plan.show import PlotError, print_plan, save_plot

STOP = 0  # the byte that ends every file that the embedded model was trained on
VOCAB_SIZE = 256
CURSOR = b"\x1b[?25h\n"  # shows it: the display of progress hides it, in a line without an end


def read_prompts(
    prompts: Sequence[str] | None, stdin: TextIO | None, most: int = MAX_MODEL_LEN
) -> list[bytes]:
    """The prompts' bytes. Of stdin, which may have no end, at most `most` are read.

    Raises:
        InputError: one is empty, or stdin is asked for twice, closed, or has `most` bytes.
    """
    prompts = PROMPTS if prompts is None else prompts
    if prompts.count("-") > 1:
        raise InputError("--prompt - can be given once: stdin is one prompt")
    found = []
    for place, prompt in enumerate(prompts, 1):
        if prompt != "-":
            data = prompt.encode("utf-8", "surrogateescape")
        elif stdin is None:
            raise InputError("--prompt - reads stdin, which is closed")
        else:
            data = stdin.buffer.read(most)
            if len(data) == most:
                raise InputError(
                    f"--prompt - read {most:,} bytes of stdin, and that is the whole model length: "
                    "shorten the prompt, or give a larger --max-model-len"
                )
        if not data:
            where = "stdin" if prompt == "-" else f"--prompt number {place}"
            raise InputError(f"{where} is empty; a prompt needs at least one byte")
        found.append(data)
    return found


def choose_device(
    device: str, implementation: str | None, utilization: float | None = None
) -> None:
    """Makes JAX use the device, and take as much of its memory as `utilization` says.

    Raises:
        InputError: it is not there, or the implementation cannot run on it.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if utilization is not None:  # read once, when JAX first sees its devices
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{utilization:.4f}")
        # One piece from the start: a pool that grows is in pieces that a large cache may not fit.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        raise InputError(f"JAX finds no device: {_one_line(error)}") from error
    if device == "gpu" and platform != "gpu":
        raise InputError(
            f"--device gpu: JAX sees no GPU, its device is {platform!r}; install jaxattn[cuda13] "
            "or jaxattn[cuda12] on a machine with one"
        )
    if implementation == "mosaic_gpu":
        try:
            require_hopper("--implementation mosaic_gpu", interpret=False)
        except NotImplementedError as error:
            raise InputError(_one_line(error)) from error


def read_config(folder: Path) -> HybridConfig:
    """The model's configuration.

    Raises:
        InputError: it is missing, damaged or not that of a model of bytes.
    """
    try:
        config = checkpoint.read_config(folder)
    except checkpoint.CheckpointError as error:
        raise InputError(_one_line(error)) from error
    if config.vocab_size != VOCAB_SIZE:
        raise InputError(
            f"{folder} is no model of bytes: its vocab_size is {config.vocab_size}, not "
            f"{VOCAB_SIZE}"
        )
    return config


def load_params(folder: Path) -> Any:
    """The model's parameters, on the device.

    Raises:
        InputError: they are missing or damaged.
    """
    try:
        return checkpoint.load(folder)[1]
    except checkpoint.CheckpointError as error:
        raise InputError(_one_line(error)) from error


def model_length(max_model_len: int | None, config: HybridConfig) -> int:
    """The longest row, prompt and continuation together.

    Raises:
        InputError: the model has not that length.
    """
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise InputError(
            f"--max-model-len {max_model_len} is longer than the model's max_position_embeddings, "
            f"{longest}"
        )
    return max_model_len or min(MAX_MODEL_LEN, longest)


def check_prompts(prompts: Sequence[bytes], length: int, longest: int) -> None:
    """Raises InputError if a prompt leaves nothing of `length` to generate."""
    for place, prompt in enumerate(prompts, 1):
        if len(prompt) >= length:
            raise InputError(
                f"prompt {place} has {len(prompt)} bytes and the model length is {length}, with at "
                f"least one byte to generate; the model goes up to --max-model-len {longest}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return exit_code(PROGRAM, lambda: run(parser().parse_args(argv)))


def run(options: argparse.Namespace) -> int:
    """Checks everything, compiles, generates and reports."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal need not know all of Unicode
    messages = Console(
        stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=options.quiet
    )
    if options.plot and not options.plan:
        raise InputError("--plot draws a plan: give --plan too")
    folder = options.checkpoint or checkpoint.EMBEDDED
    config = read_config(folder)
    length = model_length(options.max_model_len, config)
    limits = read_limits(options, length)
    prompts: list[bytes] = []
    if not options.plan:
        prompts = read_prompts(options.prompt, sys.stdin, length)
        check_prompts(prompts, length, config.max_position_embeddings)
    choose_device(options.device, options.implementation, options.utilization)
    if options.plan:
        return show_plan(config, limits, options)
    if options.compile_cache:
        keep_compiled(options.compile_cache)
    params = load_params(folder)
    requests = [
        Request(
            prompt,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=(options.seed + place) % 2**32,
            stop_tokens=STOP,
            id=place,
        )
        for place, prompt in enumerate(prompts)
    ]
    engine, compile_seconds = start_engine(config, params, limits, options, messages)

    stream = TextStream(messages if options.json else Console(), requests)
    interrupted = None
    try:
        with interrupts_raised() as asked:

            def on_token(request: Request, token: int) -> None:
                asked.check()
                stream.token(request, token)

            completions = engine.generate(requests, on_token=on_token, on_finish=stream.finish)
        interrupted = asked.code
    except GenerationInterrupted as ended:
        completions, interrupted = ended.completions, code_of(ended)
    except SealError as error:
        raise InputError(f"--strict: {_one_line(error)}") from error
    stream.close()
    measured = measure()
    for line in summary_lines(engine, completions, measured):
        messages.print(line)
    if options.json:
        settings = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        }
        result = to_json(engine, completions, measured, settings, compile_seconds)
        print(json.dumps(result), flush=True)
    if interrupted and options.quiet:  # else the summary says it
        print("interrupted", file=sys.stderr)
    return interrupted or int(any(map(_refused, completions)))


def read_limits(options: argparse.Namespace, length: int) -> Limits:
    """The engine's limits.

    Raises:
        InputError: they make no sense; it names the options.
    """
    try:
        limits = Limits(
            batch=options.batch,
            max_model_len=length,
            num_pages=options.num_pages,
            prefill_chunk=options.prefill_chunk,
            utilization=options.utilization,
            decode_buckets=options.decode_buckets or (),
            prefill_buckets=options.prefill_buckets or (),
        )
    except ValueError as error:
        raise InputError(in_options(error)) from error
    if limits.pages > MOST:
        raise InputError(
            f"--batch {limits.batch} times --max-model-len {limits.max_model_len} is "
            f"{limits.pages:,} pages, and an int32 numbers {MOST:,}: make one of them smaller, or "
            "give --num-pages"
        )
    return limits


def show_plan(config: HybridConfig, limits: Limits, options: argparse.Namespace) -> int:
    """Prints the plan from shapes alone; 2 if it does not fit."""
    if limits.utilization is None:  # as the server does, which shrinks no cache unasked
        limits = dataclasses.replace(limits, num_pages=limits.pages)
    memory = device_memory(jax.devices()[0])
    if memory is None:
        raise InputError("--plan: nothing says how much memory this device has")
    refused = None
    try:
        found = plan(Hybrid(config), memory, limits)
    except PlanError as error:
        assert error.plan is not None
        found, refused = error.plan, error
    if options.json:
        print(json.dumps(found.to_dict() | {"fits": refused is None}), flush=True)
    else:
        print_plan(_wide(Console(highlight=False)), found)
    if options.plot:
        try:
            save_plot(found, options.plot)
        except PlotError as error:
            raise InputError(str(error)) from error
    if refused is not None:
        raise InputError(in_options(refused))
    return 0


def _wide(console: Console) -> Console:
    """In a file or a pipe, lines as wide as the table wants."""
    if not console.is_terminal:
        console.width = 140
    return console


def keep_compiled(folder: Path) -> None:
    """Makes JAX keep what it compiles and tunes in a folder.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--compile-cache {folder}: {error.strerror or error}") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def start_engine(
    config: HybridConfig,
    params: Any,
    limits: Limits,
    options: argparse.Namespace,
    messages: Console,
) -> tuple[Engine, dict[str, float]]:
    """A compiled engine, whose plan was printed before its state was allocated."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=messages, disable=options.quiet)
    compile_seconds: dict[str, float] = {}
    tasks: dict[str, Any] = {}

    def on_compile(name: str, seconds: float | None) -> None:
        progress.start()  # not earlier: an empty progress display prints an empty line
        if messages.is_terminal and not messages.is_dumb_terminal:
            interrupt.before_end(CURSOR)
        if seconds is None:
            tasks[name] = progress.add_task(f"compiling {name}", total=1)
        else:
            compile_seconds[name] = seconds
            progress.update(tasks[name], completed=1)

    try:
        engine = Engine(
            Hybrid(config),
            params,
            limits,
            implementation=options.implementation,
            on_compile=on_compile,
            strict=options.strict,
            # A CPU compiles one step with all its cores; for a GPU several threads help.
            workers=4 if jax.default_backend() == "gpu" else 1,
        )
    except PlanError as error:
        if error.plan is not None:
            print_plan(_wide(messages), error.plan)
        raise InputError(in_options(error)) from error
    except NotImplementedError as error:
        raise InputError(_one_line(error)) from error
    finally:
        if tasks:
            progress.stop()
        interrupt.before_end(None)
    for line in plan_lines(engine.plan):
        messages.print(line)
    engine.start()
    return engine, compile_seconds


def _refused(completion: Completion) -> bool:
    return completion.finish_reason.startswith("refused")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
