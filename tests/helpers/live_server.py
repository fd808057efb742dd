"""A server in a thread of this process, on a free port, including uvicorn and sockets."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from jaxattn.server.app import build
from jaxattn.server.http.uvicorn_connection import UvicornConfig
from jaxattn.server.runtime.engine_worker import EngineProtocol
from jaxattn.server.runtime.service import ServedModel, Service
from jaxattn.server.settings import ServerSettings
from jaxattn.server.uvicorn_server import UvicornServer, listen
from jaxattn.text import ByteTokenizer, SamplingDefaults, Tokenizer
from jaxattn.text.chat_template import ChatTemplate
from jaxattn.text.tokenizer_config import TemplateFile
from jaxattn.text.tokenizer_config import TokenizerConfig as TextSettings
from tests.helpers.scripted_engine import LIMITS

TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class ChatBytes(ByteTokenizer):
    """A byte tokenizer with a chat template."""

    has_chat_template = True
    chat_template = TEMPLATE

    def __init__(self) -> None:
        template = TemplateFile(source=TEMPLATE, path=Path("chat_template.jinja"))
        settings = TextSettings(
            folder=Path("folder"),
            special_tokens={},
            additional_special_tokens=(),
            add_bos=None,
            eos_ids=(),
            defaults=SamplingDefaults(),
            vocab_size=256,
            added={},
            tokenizer_class=None,
            templates={"default": template},
        )
        self._template = ChatTemplate(settings)

    def chat(self, messages, *, tools=None, add_generation_prompt=True, **variables):
        return self.encode(
            self._template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        )


CHAT = ChatBytes()  # shared, so that its process starts only once


def served(
    make: Callable[[], EngineProtocol],
    tokenizer: Tokenizer = CHAT,
    limits=LIMITS,
    longest: int | None = None,
    hidden_size: int | None = None,
    **defaults: float,
) -> ServedModel:
    return ServedModel(
        make_engine=make,
        tokenizer=tokenizer,
        limits=limits,
        vocab_size=256,
        hidden_size=hidden_size,
        context_length=longest,
        defaults=SamplingDefaults(**{"temperature": 0.0, **defaults}),
    )


class LiveServer:
    """A running server, as a test sees it.

    Attributes:
        url: The URL of its root.
        client: A client for its paths.
    """

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, port: int):
        self.service, self.port, self._loop = service, port, loop
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def call(self, work):
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def settle(self) -> None:
        """Waits until the server's loop has run all pending callbacks, and those that follow."""

        async def turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        self.call(turns())

    def post(self, path: str, body: object, **options) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def complete(self, prompt, **fields) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def talk(self, text: str, **fields) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def stream(self, path: str, body: dict) -> list[dict]:
        """The objects of a whole stream, whose last line must be [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return objects(response.text)

    def quiet(self) -> bool:
        """Whether nothing runs or waits once all requests have ended."""

        async def settled() -> bool:
            for _ in range(500):
                busy = self.service.worker.engine is not None and self.service.worker.engine.busy
                if not (self.service.admission.open or self.service.router.collectors or busy):
                    return True
                await asyncio.sleep(0.01)
            return False

        return self.call(settled())


def objects(text: str) -> list[dict]:
    """The objects in a stream's lines."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.contextmanager
def live(
    given: ServedModel, *, wait: bool = True, buffered: int | None = None, **settings
) -> Iterator[LiveServer]:
    """Runs a server during the block.

    Args:
        wait: Whether to wait until the server is ready.
        buffered: The size of the system's send buffer in bytes, for data that a client has not
            read.
    """
    started: list[LiveServer] = []
    ready, end = threading.Event(), threading.Event()

    async def main() -> None:
        bound = listen("127.0.0.1", 0)
        if buffered is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffered)
        chosen = ServerSettings(**{"access_log": False, **settings})
        service = Service(given, chosen)
        server = UvicornServer(UvicornConfig(build(service), chosen, close_seconds=1))
        serving = asyncio.create_task(server.serve([bound]))
        service.start()
        while not server.started:
            await asyncio.sleep(0.005)
        started.append(LiveServer(service, asyncio.get_running_loop(), bound.getsockname()[1]))
        ready.set()
        while not end.is_set():
            await asyncio.sleep(0.01)
        service.stop()
        server.should_exit = True
        await serving
        service.worker.join(10)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(30)
        [server] = started
        if wait:
            server.call(server.service.ready())
        with server.client:
            yield server
    finally:
        end.set()
        thread.join(30)
    assert not thread.is_alive()
