"""Runs a service in uvicorn until a signal: the first one drains the server, the second exits.

Until the server is ready, the first signal exits too. uvicorn itself would wait for open
connections without a limit, or cut them. Here running answers get `drain_seconds` to finish; then
the remaining ones end with an error.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from jaxattn.server.app import build
from jaxattn.server.http.uvicorn_connection import UvicornConfig
from jaxattn.server.runtime.server_state import ServerState
from jaxattn.server.runtime.service import ServedModel, Service
from jaxattn.server.runtime.watchdog import Watchdog
from jaxattn.server.settings import ServerSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_SECONDS = 1e-3  # Python's switch interval: the longest that the device thread waits
CLOSE_SECONDS = 5
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Bind it first, to detect a port in use before loading a model.

    Raises:
        OSError: If the address is not available.
    """
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class UvicornServer(uvicorn.Server):
    """uvicorn's server without its signal handlers; `run` installs others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    served: ServedModel,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
) -> bool:
    """Serves until a signal arrives or the engine ends.

    Args:
        listener: A socket from `listen`.
        on_ready: Called when the server begins to accept requests.

    Returns:
        Whether every answer was completed.

    Raises:
        BaseException: The error that ended the engine.
    """
    return asyncio.run(_serve(served, settings, listener, on_ready))


async def _serve(
    served: ServedModel,
    settings: ServerSettings,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> bool:
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[BaseException | None] = loop.create_future()

    def end(error: BaseException | None = None) -> None:
        if not ending.done():
            ending.set_result(error)

    service = Service(served, settings, on_end=end)
    server = UvicornServer(UvicornConfig(build(service), settings, CLOSE_SECONDS))

    def on_signal(number: int) -> None:
        if service.phase is not ServerState.READY:
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(128 + number)  # a thread may be in a compilation, which cannot be interrupted
        service.phase = ServerState.DRAINING
        end()

    for each in SIGNALS:
        loop.add_signal_handler(each, on_signal, each)
    watchdog = Watchdog(service.worker.get_step_seconds, settings.stuck_seconds)
    watchdog.start()
    serving = asyncio.create_task(server.serve([listener]))
    service.start()
    try:
        await service.ready()
        if service.phase is ServerState.READY:
            sys.setswitchinterval(SWITCH_SECONDS)  # not earlier: until now, threads compile
            on_ready()
        error = await ending
        all_completed = await service.drain(settings.drain_seconds)
    finally:
        server.should_exit = True
        await serving
        service.stop()
        service.worker.join(CLOSE_SECONDS)
        watchdog.stop()
        for each in SIGNALS:
            loop.remove_signal_handler(each)
    if error is not None:
        raise error
    return all_completed
