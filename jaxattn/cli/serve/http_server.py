"""`python -m jaxattn.serve --port 8000`: the model behind HTTP, until SIGTERM or Ctrl-C.

The port is bound before anything is loaded. While the model is loaded and compiled, /health says
503. This file imports jaxattn.server when it is asked for: the package's base has not what the
server imports.
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
from jaxattn.memory.engine_limits import Limits
from jaxattn.models.interface import Model
from jaxattn.text import SamplingDefaults, Tokenizer

if TYPE_CHECKING:
    from jaxattn.server.settings import ServerSettings

# Options of the terminal, which say what to continue.
OF_TERMINAL = ("prompt", "chat", "system", "stop", "max_tokens", "json")


def check_options(options: argparse.Namespace) -> None:
    """Raises InputError where an option of the terminal comes with --port."""
    for name in OF_TERMINAL:
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} is for the terminal, and --port serves over HTTP instead")


def serve(
    chosen: ModelSource,
    model: Model,
    tokenizer: Tokenizer,
    limits: Limits,
    options: argparse.Namespace,
    messages: Console,
    stages: StageTimings,
    crew: ProcessGroup | None = None,
) -> int:
    """Serves over HTTP; returns 0, or 1 if an answer was cut at the end.

    Raises:
        InputError: the extra is not installed, the port is taken, or the model cannot be served.
    """
    settings, embedding = _read_settings(options, chosen), chosen.embedding_defaults()
    from jaxattn.server import uvicorn_server  # installed, since the settings could be read
    from jaxattn.server.runtime.service import ServedModel

    try:
        bound = uvicorn_server.listen(settings.host, settings.port)
    except OSError as error:
        where = f"--host {settings.host} --port {settings.port}"
        raise InputError(f"{where}: {error.strerror or error}") from error
    _warn_of_others(settings, messages)
    stages.ended("opening the port")
    _log_to_stderr(quiet=options.quiet)
    if crew is None and options.compile_cache is None and not jax.config.jax_compilation_cache_dir:
        _keep_compiled(messages)

    display = progress(messages)

    def make() -> Engine:
        engine, _ = start_engine(
            chosen, model, tokenizer, limits, options, messages, stages, crew, display
        )
        return engine

    def on_ready() -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{bound.getsockname()[1]}"
        messages.print(stages.line())
        messages.print(f"serving {settings.names[0]} at {address}/v1; a page to chat at {address}/")
        gc_pause.freeze_gc_heap()  # model, modules and what JAX keeps of them; requests come after

    interrupt.listen(False)  # asyncio hears of signals from here on
    try:
        whole = uvicorn_server.run(
            ServedModel(
                make=make,
                tokenizer=tokenizer,
                limits=limits,
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_shape.shape[0],
                embedding=embedding,
                defaults=defaults(options, tokenizer.defaults),
                longest=model.max_position_embeddings,
                progress=display.tasks,
            ),
            settings,
            bound,
            on_ready=on_ready,
        )
    except SealError as error:
        raise InputError(f"--strict: {one_line(error)}") from error
    return 0 if whole else 1


def _read_settings(options: argparse.Namespace, chosen: ModelSource) -> "ServerSettings":
    """The server's settings.

    Raises:
        InputError: the extra is not installed, or a file of keys cannot be read.
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
        given = api_keys.read_keys(options.api_key_file)
    except OSError as error:
        raise InputError(f"--api-key-file {options.api_key_file}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--api-key-file: {one_line(error)}") from error
    return ServerSettings(
        host=options.host,
        port=options.port,
        names=tuple(options.served_name or [chosen.name or chosen.folder.path.resolve().name]),
        keys=given,
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
    """Says that others can use the server, where they can."""
    if settings.local or settings.keys:
        return
    from jaxattn.server.http import api_keys

    messages.print(
        f"warning: {settings.host} can be reached by others, and no key is asked for; set "
        f"{api_keys.VARIABLE} or --api-key-file"
    )


def _keep_compiled(messages: Console) -> None:
    """Keeps executables in the user's cache folder, if it can be written."""
    try:
        enable_compilation_cache(own_folder())
    except InputError as error:
        messages.print(f"nothing is kept for the next start: {error}")


def defaults(options: argparse.Namespace, own: SamplingDefaults) -> SamplingDefaults:
    """How requests are sampled that do not say it: as the options say, else as the model wants."""
    names = [field.name for field in dataclasses.fields(SamplingDefaults)]
    given = {name: getattr(options, name) for name in names}
    return dataclasses.replace(
        own, **{name: value for name, value in given.items() if value is not None}
    )


def _log_to_stderr(*, quiet: bool) -> None:
    """Lines of the server's loggers, each as it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("jaxattn.access", "jaxattn.server"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.propagate = False
        log.setLevel(logging.ERROR if quiet else logging.INFO)
