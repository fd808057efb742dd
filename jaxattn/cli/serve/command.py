"""A model continues prompts or chats, many at a time, in one compiled step: python -m jaxattn.serve

With --port it serves over HTTP (http_server.py). Else what follows holds.

The generated text goes to stdout (with `--json`, one JSON object instead), all else to stderr.
Exit codes: 0; 1 if a request was refused, or if stdout is closed or its reader left; 2 for bad
input; 130 after Ctrl-C and 143 after SIGTERM. What was generated until then is reported all the
same. Before the first token, and at a second Ctrl-C, the command ends at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxattn.cli.exit_codes import code_of, exit_code, interrupts_raised
from jaxattn.cli.options import contradictions
from jaxattn.cli.options.parallel_config import read_layout
from jaxattn.cli.options.parser import PROGRAM, InputError
from jaxattn.cli.options.serve_options import parser
from jaxattn.cli.plan_report import show_plan
from jaxattn.cli.serve import http_server
from jaxattn.cli.serve.chat_session import Conversation, turns
from jaxattn.cli.serve.request_inputs import (
    Prompt,
    RequestFactory,
    check_prompts,
    converses,
    encoded_prompts,
    model_length,
    opening,
    read_limits,
)
from jaxattn.cli.serve.text_stream import TextPrinter, TextStream
from jaxattn.cli.startup import multihost
from jaxattn.cli.startup.compilation_cache import NONE, enable_compilation_cache
from jaxattn.cli.startup.engine_startup import choose_device, share_of_device, start_engine
from jaxattn.cli.startup.model_source import choose, one_line
from jaxattn.cli.startup.run_report import RunReport, measure, summary_lines, to_json
from jaxattn.cli.startup.stage_timings import StageTimings
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import GenerationInterrupted
from jaxattn.engine.requests.request import Request
from jaxattn.engine.runtime.recompilation_guard import SealError
from jaxattn.memory.engine_limits import Limits
from jaxattn.text import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return exit_code(PROGRAM, lambda: run(parser().parse_args(argv)))


def run(options: argparse.Namespace) -> int:
    """Checks everything, compiles and loads, generates and reports."""
    messages = Console(
        stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=options.quiet
    )
    stages = StageTimings()
    stages.ended("imports")
    check_options(options)
    if options.checkpoint is not None:
        messages.print("--checkpoint is called --model now; both work")
    chosen = choose(options)
    place, platform = multihost.read_place(options, os.environ), "cpu"
    if place is None:  # several processes meet first, and choose nothing: all need the same
        stages.ended("reading")
        platform = use_device(options)
        stages.ended("device")
    length = model_length(options, chosen.folder.model, platform)
    limits = read_limits(options, length, platform)
    if options.plan:
        if place is not None:
            use_device(options)
        return show_plan(chosen.folder.model, limits, options)
    tokenizer = chosen.tokenizer()
    prompts: list[Prompt] = []
    if options.port is None:
        check_chat(options, tokenizer)
        if not converses(options):
            prompts = encoded_prompts(options, tokenizer, sys.stdin, length)
        check_prompts(prompts, length, chosen.folder.model.max_position_embeddings)
    stages.ended("prompts")
    if options.device == "cpu":  # before JAX meets the other processes
        jax.config.update("jax_platforms", "cpu")
    with multihost.joined(place) as crew:
        if place is not None:
            use_device(options)
            stages.ended("device")
        if options.compile_cache not in (None, NONE):
            enable_compilation_cache(options.compile_cache)
        model = chosen.model(tokenizer)
        if crew is not None:
            crew.agree(multihost.facts(chosen, limits, read_layout(options)))
        given = chosen, model, tokenizer, limits, options, messages, stages, crew
        if crew is not None and not crew.leads:
            engine, _ = start_engine(*given)
            engine.follow(crew)
            return 0
        if options.port is not None:
            return http_server.serve(*given)
        engine, compile_seconds = start_engine(*given)
        messages.print(stages.line())
        requests = RequestFactory(options, tokenizer, engine.limits.max_model_len)
        return answered(engine, compile_seconds, prompts, requests, messages)


def use_device(options: argparse.Namespace) -> str:
    """Makes JAX use the device of the options; returns its platform."""
    return choose_device(options.device, options.implementation, share_of_device(options))


def answered(
    engine: Engine,
    compile_seconds: dict[str, float],
    prompts: Sequence[Prompt],
    requests: RequestFactory,
    messages: Console,
) -> int:
    """Generates and reports, in the terminal; returns the exit code."""
    options, limits = requests.options, engine.limits
    printer = TextPrinter(messages if options.json else Console())
    try:
        if converses(options):
            done, interrupted = talk(engine, requests, printer, messages)
        else:
            done, interrupted = complete(engine, requests, prompts, printer)
    except SealError as error:
        raise InputError(f"--strict: {one_line(error)}") from error
    for line in summary_lines(done):
        messages.print(line)
    if options.json:
        print(json.dumps(to_json(done, settings(requests, limits), compile_seconds)), flush=True)
    if interrupted and options.quiet:  # else the summary says it
        print("interrupted", file=sys.stderr)
    return interrupted or int(done.refused)


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError where options contradict each other, or one wants another."""
    if jax.config.jax_disable_jit:
        raise InputError("JAX_DISABLE_JIT is set, and only compiled steps are served; unset it")
    if options.model is not None and options.checkpoint is not None:
        raise InputError("--checkpoint is another word for --model: give one of them")
    contradictions.check_server(options)
    contradictions.check_sizes(options)
    contradictions.check_reuse(options)
    if options.port is not None:
        http_server.check_options(options)
    if options.plot and not options.plan:
        raise InputError("--plot draws a plan: give --plan too")
    if options.system is not None and not options.chat:
        raise InputError("--system is the first message of a chat: give --chat too")
    if "" in (options.stop or ()):
        raise InputError("--stop is empty, which would end every text")


def check_chat(options: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Raises InputError where a chat is asked for that cannot be held."""
    if options.chat and not tokenizer.has_chat_template:
        raise InputError(
            "--chat: this model has no chat template; it continues texts: leave --chat out"
        )
    if converses(options) and sys.stdin is None:
        raise InputError("--chat without --prompt reads stdin, which is closed")


def settings(requests: RequestFactory, limits: Limits) -> dict[str, Any]:
    """The options, with what stands for those that were not given."""
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(requests.options).items()
    }
    found = {
        "max_tokens": requests.max_tokens,
        "max_model_len": requests.length,
        "batch": limits.batch,
    }
    return given | found | requests.sampling


def complete(
    engine: Engine, requests: RequestFactory, prompts: Sequence[Prompt], printer: TextPrinter
) -> tuple[RunReport, int | None]:
    """(what became of the prompts, the exit code that Ctrl-C or SIGTERM asked for).

    Raises:
        SealError: the engine is strict, and something was compiled or allocated.
    """
    given = [requests.request(prompt.tokens, place) for place, prompt in enumerate(prompts)]
    chat = requests.options.chat
    stream = TextStream(printer, requests.tokenizer, given, prompts, chat=chat)
    try:
        with interrupts_raised() as asked:

            def on_token(request: Request, token: int) -> None:
                asked.check()
                stream.token(request, token)

            completions = engine.generate(given, on_token=on_token, on_finish=stream.finish)
        interrupted = asked.code
    except GenerationInterrupted as ended:
        completions, interrupted = ended.completions, code_of(ended)
    stream.close()
    texts = {place: prompt.text for place, prompt in enumerate(prompts) if prompt.text is not None}
    run = RunReport(
        engine=engine,
        tokenizer=requests.tokenizer,
        completions=completions,
        stats=engine.stats,
        texts=texts,
        measured=measure(),
    )
    return run, interrupted


def talk(
    engine: Engine, requests: RequestFactory, printer: TextPrinter, messages: Console
) -> tuple[RunReport, int | None]:
    """A conversation in the terminal; returns what `complete` does.

    Raises:
        SealError: the engine is strict, and something was compiled or allocated.
    """
    held = Conversation(
        engine=engine,
        requests=requests,
        printer=printer,
        messages=messages,
        history=opening(requests.options),
    )
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    held.hold(turns(sys.stdin, asks=terminal and not requests.options.json))
    run = RunReport(
        engine=engine,
        tokenizer=requests.tokenizer,
        completions=held.completions,
        stats=held.stats,
        texts=held.texts,
        measured=measure(),
    )
    return run, held.interrupted


if __name__ == "__main__":
    sys.exit(main())
