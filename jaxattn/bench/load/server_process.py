"""Starting and stopping a server with its default options for a bench."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxattn.bench.harness.speedup_report import OURS
from jaxattn.bench.harness.subprocess_group import child_process

LAST_LINES = 20  # of a server's output, shown if it does not start


class ServerStartError(Exception):
    """Raised if a server ended before it was ready, or was not ready in time."""


def command(
    engine: str, folder: Path, port: int, peer_options: Mapping[str, Any]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """(the command of an engine's server, additional environment variables)."""
    if engine == OURS:
        ours = [sys.executable, "-m", "jaxattn.bench.load.random_server", str(folder)]
        return [*ours, "--port", str(port)], {}
    from jaxattn.bench.baselines import vllm_engine, vllm_server

    return vllm_server.server_command(folder, port, peer_options), vllm_engine.ENVIRONMENT


@contextlib.contextmanager
def started(
    engine: str,
    folder: Path,
    *,
    peer_options: Mapping[str, Any],
    environment: Mapping[str, str],
    limit: float,
) -> Iterator[tuple[str, float]]:
    """Starts a server with random weights, which ends with the context.

    Args:
        folder: A folder of `config_folder`, whose name is the model's name.
        peer_options: Additional options of vLLM.
        environment: Additional environment variables.
        limit: Maximum number of seconds until the server is ready.

    Yields:
        (URL, seconds until the server was ready).

    Raises:
        ServerStartError: the server did not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line, more = command(engine, folder, port, peer_options)
    begin = time.perf_counter()
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile("w+") as log,  # an access log would hide the rows
        child_process(
            line, {**environment, **more}, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        while not _healthy(url):
            if (code := process.poll()) is not None:
                raise ServerStartError(f"{engine}'s server exited with code {code}{_said(log)}")
            if time.perf_counter() - begin > limit:
                raise ServerStartError(
                    f"{engine}'s server was not ready after --limit {limit:g} s{_said(log)}"
                )
            time.sleep(0.2)
        seconds = time.perf_counter() - begin
        if engine != OURS:
            _prepare(engine, url)
        yield url, seconds


def _prepare(engine: str, url: str) -> None:
    """Scales the random weights of a baseline's server to ordinary size."""
    from jaxattn.bench.baselines import vllm_server

    try:
        vllm_server.prepare_server(url)
    except OSError as error:
        raise ServerStartError(
            f"{engine}'s server could not change its weights: {error}"
        ) from error


def _said(log: IO[str]) -> str:
    """The last lines of a server's output, for an error message."""
    log.seek(0)
    lines = log.read().splitlines()[-LAST_LINES:]
    return "".join(f"\n  {line}" for line in lines)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # includes status 503 while the server starts
        return False
