"""The HTTP server of `python -m jaxattn.serve --port 8000`, which runs until SIGTERM or Ctrl-C.

It binds the port before it loads anything. While the model loads and compiles, /health answers 503.
This file imports jaxattn.server lazily, because its dependencies need the `server` extra.
"""

import argparse
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from jaxattn import interrupt
from jaxattn.cli.options.parser import InputError
from jaxattn.cli.startup.compilation_cache import enable_compilation_cache, own_folder
from jaxattn.cli.startup.engine_startup import start_engine
from jaxattn.cli.startup.model_source import ModelSource, one_line
from jaxattn.cli.startup.progress_lines import progress
from jaxattn.cli.startup.stage_timings import StageTimings
from jaxattn.engine.distributed.process_group import ProcessGroup
from jaxattn.engine.engine import Engine
from jaxattn.engine.runtime import gc_pause
from jaxattn.engine.runtime.recompilation_guard import SealError
from jaxattn.limits import Limits
from jaxattn.models.interface import Model
from jaxattn.text import SamplingDefaults, Tokenizer

if TYPE_CHECKING:
    from jaxattn.server.settings import ServerSettings

# Options that only apply to the terminal.
OF_TERMINAL = ("prompt", "chat", "system", "stop", "max_tokens", "json")


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError for an option of the terminal together with --port."""
    for name in OF_TERMINAL:
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            raise InputError(
                f"{option} applies only in the terminal, but --port serves over HTTP; leave one of "
                "them out"
            )


def serve(
    model_source: ModelSource,
    model: Model,
    tokenizer: Tokenizer,
    limits: Limits,
    options: argparse.Namespace,
    messages: Console,
    stages: StageTimings,
    process_group: ProcessGroup | None = None,
) -> int:
    """Serves over HTTP; returns 0, or 1 if the shutdown aborted an answer.

    Raises:
        InputError: If the extra is not installed, the port is in use, or the model cannot be
            served.
    """
    settings, embedding = _read_settings(options, model_source), model_source.embedding_defaults()
    from jaxattn.server import uvicorn_server  # installed, since the settings could be read
    from jaxattn.server.runtime.service import ServedModel

    try:
        listener = uvicorn_server.listen(settings.host, settings.port)
    except OSError as error:
        address_flags = f"--host {settings.host} --port {settings.port}"
        raise InputError(f"{address_flags}: {error.strerror or error}") from error
    _warn_of_others(settings, messages)
    stages.ended("opening the port")
    _log_to_stderr(quiet=options.quiet)
    if (
        process_group is None
        and options.compile_cache is None
        and not jax.config.jax_compilation_cache_dir
    ):
        _keep_compiled(messages)

    display = progress(messages)

    def make() -> Engine:
        engine, _ = start_engine(
            model_source,
            model,
            tokenizer,
            limits,
            options,
            messages,
            stages,
            process_group,
            display,
        )
        return engine

    def on_ready() -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        messages.print(stages.line())
        messages.print(f"serving {settings.names[0]} at {address}/v1; chat page at {address}/")
        gc_pause.freeze_gc_heap()  # so far the heap holds the model, modules and JAX's caches

    interrupt.listen(False)  # asyncio handles signals from here on
    try:
        all_completed = uvicorn_server.run(
            ServedModel(
                make_engine=make,
                tokenizer=tokenizer,
                limits=limits,
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_shape.shape[0],
                embedding=embedding,
                defaults=defaults(options, tokenizer.defaults),
                context_length=model.max_position_embeddings,
                progress=display.tasks,
            ),
            settings,
            listener,
            on_ready=on_ready,
        )
    except SealError as error:
        raise InputError(f"--strict: {one_line(error)}") from error
    return 0 if all_completed else 1


def _read_settings(options: argparse.Namespace, model_source: ModelSource) -> "ServerSettings":
    """Returns the server's settings.

    Raises:
        InputError: If the extra is not installed, or the file of API keys cannot be read.
    """
    try:
        from jaxattn.server import uvicorn_server  # noqa: F401  # run needs the whole extra
        from jaxattn.server.http import api_keys
        from jaxattn.server.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise InputError(
            f"--port needs {error.name}, which is not installed: pip install 'jaxattn[server]'"
        ) from error
    try:
        keys = api_keys.read_keys(options.api_key_file)
    except OSError as error:
        raise InputError(f"--api-key-file {options.api_key_file}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--api-key-file: {one_line(error)}") from error
    return ServerSettings(
        host=options.host,
        port=options.port,
        names=tuple(
            options.served_name or [model_source.name or model_source.folder.path.resolve().name]
        ),
        keys=keys,
        origins=tuple(options.cors_origin or ()),
        max_waiting=options.max_queue,
        max_waiting_tokens=options.max_queued_tokens,
        max_body_bytes=options.max_body,
        queue_seconds=options.queue_timeout,
        request_seconds=options.request_timeout,
        drain_seconds=options.drain_timeout,
        stuck_seconds=options.step_timeout,
        tool_parser=options.tool_parser,
        access_log=not options.no_access_log,
    )


def _warn_of_others(settings: "ServerSettings", messages: Console) -> None:
    """Prints a warning if other machines can use the server without a key."""
    if settings.local or settings.keys:
        return
    from jaxattn.server.http import api_keys

    messages.print(
        f"warning: other machines can reach {settings.host}, but the server requires no API key; "
        f"set {api_keys.VARIABLE} or --api-key-file"
    )


def _keep_compiled(messages: Console) -> None:
    """Enables the compilation cache in the user's cache folder, if the folder is writable."""
    try:
        enable_compilation_cache(own_folder())
    except InputError as error:
        messages.print(f"compiled executables are not cached for the next start: {error}")


def defaults(options: argparse.Namespace, model_defaults: SamplingDefaults) -> SamplingDefaults:
    """Returns the sampling defaults of requests: the options, or else the model's defaults."""
    names = [field.name for field in dataclasses.fields(SamplingDefaults)]
    options_given = {name: getattr(options, name) for name in names}
    return dataclasses.replace(
        model_defaults,
        **{name: value for name, value in options_given.items() if value is not None},
    )


def _log_to_stderr(*, quiet: bool) -> None:
    """Sends the lines of the server's loggers to stderr, without a prefix."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("jaxattn.access", "jaxattn.server"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.propagate = False
        log.setLevel(logging.ERROR if quiet else logging.INFO)
