"""The command `python -m jaxattn.serve`, which completes prompts or chats in the terminal.

With --port, it serves over HTTP instead (http_server.py). The following is about the terminal.

The generated text goes to stdout (with `--json`, one JSON object instead), everything else to
stderr. Exit codes: 0; 1 if a request was refused, or if stdout or its pipe is closed; 2 for bad
input; 130 after Ctrl-C; 143 after SIGTERM. After the last two, the command still reports the text
generated so far. Before the first token, and at a second Ctrl-C, it ends at once.
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

from jaxattn.cli.exit_codes import code_of, exit_code
from jaxattn.cli.options import contradictions
from jaxattn.cli.options.parallel_options import read_layout
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.options.serve_options import PROGRAM, parser
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
from jaxattn.cli.serve.run_report import RunReport, measure, summary_lines, to_json
from jaxattn.cli.serve.text_stream import TextPrinter, TextStream
from jaxattn.cli.startup import multihost
from jaxattn.cli.startup.compilation_cache import NONE, enable_compilation_cache
from jaxattn.cli.startup.engine_startup import choose_device, share_of_device, start_engine
from jaxattn.cli.startup.model_source import choose, one_line
from jaxattn.cli.startup.stage_timings import StageTimings
from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.outputs import GenerationInterrupted
from jaxattn.engine.requests.request import Request
from jaxattn.engine.runtime.recompilation_guard import SealError
from jaxattn.interrupt import interrupts_raised
from jaxattn.limits import Limits
from jaxattn.text import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code."""
    return exit_code(PROGRAM, lambda: run(parser().parse_args(argv)))


def run(options: argparse.Namespace) -> int:
    """Checks the input, compiles and loads the model, generates and reports."""
    messages = Console(
        stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=options.quiet
    )
    stages = StageTimings()
    stages.ended("imports")
    check_options(options)
    if options.checkpoint is not None:
        messages.print("--checkpoint is now called --model; both work")
    model_source = choose(options)
    distributed_config, platform = multihost.read_place(options, os.environ), "cpu"
    # Several processes connect before they see devices, and choose no sizes.
    if distributed_config is None:
        stages.ended("reading")
        platform = use_device(options)
        stages.ended("device")
    length = model_length(options, model_source.folder.model, platform)
    limits = read_limits(options, length, platform)
    if options.plan:
        if distributed_config is not None:
            use_device(options)
        return show_plan(model_source.folder.model, limits, options)
    tokenizer = model_source.tokenizer()
    prompts: list[Prompt] = []
    if options.port is None:
        check_chat(options, tokenizer)
        if not converses(options):
            prompts = encoded_prompts(options, tokenizer, sys.stdin, length)
        check_prompts(prompts, length, model_source.folder.model.max_position_embeddings)
    stages.ended("prompts")
    if options.device == "cpu":  # before JAX connects to the other processes
        jax.config.update("jax_platforms", "cpu")
    with multihost.joined(distributed_config) as process_group:
        if distributed_config is not None:
            use_device(options)
            stages.ended("device")
        if options.compile_cache not in (None, NONE):
            enable_compilation_cache(options.compile_cache)
        model = model_source.model(tokenizer)
        if process_group is not None:
            process_group.agree(multihost.facts(model_source, limits, read_layout(options)))
        engine_arguments = (
            model_source,
            model,
            tokenizer,
            limits,
            options,
            messages,
            stages,
            process_group,
        )
        if process_group is not None and not process_group.leads:
            engine, _ = start_engine(*engine_arguments)
            engine.follow(process_group)
            return 0
        if options.port is not None:
            return http_server.serve(*engine_arguments)
        engine, compile_seconds = start_engine(*engine_arguments)
        messages.print(stages.line())
        requests = RequestFactory(options, tokenizer, engine.limits.max_model_len)
        return answered(engine, compile_seconds, prompts, requests, messages)


def use_device(options: argparse.Namespace) -> str:
    """Makes JAX use the device of the options, and returns its platform."""
    return choose_device(options.device, options.implementation, share_of_device(options))


def answered(
    engine: Engine,
    compile_seconds: dict[str, float],
    prompts: Sequence[Prompt],
    requests: RequestFactory,
    messages: Console,
) -> int:
    """Generates and reports in the terminal, and returns the exit code."""
    options, limits = requests.options, engine.limits
    printer = TextPrinter(messages if options.json else Console())
    try:
        if converses(options):
            report, interrupted = talk(engine, requests, printer, messages)
        else:
            report, interrupted = complete(engine, requests, prompts, printer)
    except SealError as error:
        raise InputError(f"--strict: {one_line(error)}") from error
    for line in summary_lines(report):
        messages.print(line)
    if options.json:
        print(json.dumps(to_json(report, settings(requests, limits), compile_seconds)), flush=True)
    if interrupted and options.quiet:  # otherwise the summary reports it
        print("interrupted", file=sys.stderr)
    return interrupted or int(report.refused)


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError if options contradict each other, or an option requires another one."""
    if jax.config.jax_disable_jit:
        raise InputError("JAX_DISABLE_JIT is set, but jaxattn serves only compiled steps; unset it")
    if options.model is not None and options.checkpoint is not None:
        raise InputError("--checkpoint is an older name of --model; give only one of them")
    contradictions.check_server(options)
    contradictions.check_sizes(options)
    contradictions.check_reuse(options)
    if options.port is not None:
        http_server.check_options(options)
    if options.plot and not options.plan:
        raise InputError("--plot draws the memory plan; give --plan too")
    if options.system is not None and not options.chat:
        raise InputError("--system is the first message of a chat; give --chat too")
    if "" in (options.stop or ()):
        raise InputError("--stop is empty, which would match any text; give a nonempty string")


def check_chat(options: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Raises InputError if the options ask for a chat that is not possible."""
    if options.chat and not tokenizer.has_chat_template:
        raise InputError(
            "--chat: this model has no chat template and only continues text; leave --chat out"
        )
    if converses(options) and sys.stdin is None:
        raise InputError("--chat without --prompt reads stdin, but stdin is closed")


def settings(requests: RequestFactory, limits: Limits) -> dict[str, Any]:
    """Returns the options, with the values in effect for those that the user did not set."""
    options_given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(requests.options).items()
    }
    values_in_effect = {
        "max_tokens": requests.max_tokens,
        "max_model_len": requests.length,
        "batch": limits.batch,
    }
    return options_given | values_in_effect | requests.sampling


def complete(
    engine: Engine, requests: RequestFactory, prompts: Sequence[Prompt], printer: TextPrinter
) -> tuple[RunReport, int | None]:
    """Completes the prompts; returns the report, and the exit code for Ctrl-C or SIGTERM or None.

    Raises:
        SealError: If the engine is strict, and compiled or allocated anything.
    """
    engine_requests = [
        requests.request(prompt.tokens, place) for place, prompt in enumerate(prompts)
    ]
    chat = requests.options.chat
    stream = TextStream(printer, requests.tokenizer, engine_requests, prompts, chat=chat)
    try:
        with interrupts_raised() as interrupt_request:

            def on_token(request: Request, token: int) -> None:
                interrupt_request.check()
                stream.token(request, token)

            completions = engine.generate(
                engine_requests, on_token=on_token, on_finish=stream.finish
            )
        interrupted = interrupt_request.code
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
        measured_bytes=measure(),
    )
    return run, interrupted


def talk(
    engine: Engine, requests: RequestFactory, printer: TextPrinter, messages: Console
) -> tuple[RunReport, int | None]:
    """Holds a conversation in the terminal; returns the same as `complete`.

    Raises:
        SealError: If the engine is strict, and compiled or allocated anything.
    """
    conversation = Conversation(
        engine=engine,
        requests=requests,
        printer=printer,
        messages=messages,
        history=opening(requests.options),
    )
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    conversation.hold(turns(sys.stdin, is_interactive=terminal and not requests.options.json))
    run = RunReport(
        engine=engine,
        tokenizer=requests.tokenizer,
        completions=conversation.completions,
        stats=conversation.stats,
        texts=conversation.texts,
        measured_bytes=measure(),
    )
    return run, conversation.interrupted


if __name__ == "__main__":
    sys.exit(main())
