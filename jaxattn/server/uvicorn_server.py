"""Runs a service behind uvicorn until a signal: a drain at the first, an end at the second.

Before the model serves, the first signal ends the process too. uvicorn alone would wait for open
connections without an end, or cut them. Here running answers go on for `drain_seconds`; what is
left gets an error of its own.
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
from jaxattn.server.http.connection import UvicornConfig
from jaxattn.server.runtime.server_state import ServerState
from jaxattn.server.runtime.service import ServedModel, Service
from jaxattn.server.runtime.watchdog import Watchdog
from jaxattn.server.settings import ServerSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_SECONDS = 1e-3  # after which a thread lets another run: the device thread waits no longer
CLOSE_SECONDS = 5
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port in use is known before a model is loaded.

    Raises:
        OSError: the address cannot be had.
    """
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


class UvicornServer(uvicorn.Server):
    """uvicorn without its own ideas of signals; `run` has ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    served: ServedModel,
    settings: ServerSettings,
    bound: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
) -> bool:
    """Serves until a signal or the engine's end.

    Args:
        bound: of `listen`.
        on_ready: called when requests are served.

    Returns:
        Whether every answer came to its end.

    Raises:
        What ended the engine.
    """
    return asyncio.run(_serve(served, settings, bound, on_ready))


async def _serve(
    served: ServedModel,
    settings: ServerSettings,
    bound: socket.socket,
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
            os._exit(128 + number)  # a thread may be compiling, which nothing interrupts
        service.phase = ServerState.DRAINING
        end()

    for each in SIGNALS:
        loop.add_signal_handler(each, on_signal, each)
    watchdog = Watchdog(service.worker.stuck_for, settings.stuck_seconds)
    watchdog.start()
    serving = asyncio.create_task(server.serve([bound]))
    service.start()
    try:
        await service.ready()
        if service.phase is ServerState.READY:
            sys.setswitchinterval(SWITCH_SECONDS)  # not before: threads compile meanwhile
            on_ready()
        error = await ending
        whole = await service.drain(settings.drain_seconds)
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
    return whole
