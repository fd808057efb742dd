"""One streamed request, with the arrival time of each of its chunks."""

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from jaxattn.bench.load.workload import LoadRequest

DATA, DONE = b"data:", b"[DONE]"


@dataclasses.dataclass
class RequestOutcome:
    """The outcome of a request. Times are those of `time.perf_counter`.

    Attributes:
        due: The time at which the request should have been sent.
        sent: The time at which it was sent.
        ended: The time at which its stream ended.
        chunks: The arrival times of the chunks with a choice; the first is that of the first token.
        prompt: The number of prompt tokens, as the server counts them.
        answer: The number of output tokens, as the server counts them, or else the number of
            chunks.
        error: The error message, or None.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[float] = dataclasses.field(default_factory=list)
    prompt: int = 0
    answer: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds from `due` to the first token."""
        return self.chunks[0] - self.due

    @property
    def whole(self) -> float:
        """Seconds from `due` to the end."""
        return self.ended - self.due

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first, also if several tokens share a chunk."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.answer - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclasses.dataclass(frozen=True)
class ServerClient:
    """A client of the server that is measured.

    Attributes:
        session: The HTTP session.
        url: The URL of the server's root, without /v1.
        model: The name of the model.
        chat: Whether requests go to /v1/chat/completions rather than /v1/completions.
    """

    session: aiohttp.ClientSession
    url: str
    model: str
    chat: bool

    async def ask(self, ask: LoadRequest, due: float) -> RequestOutcome:
        """Sends a request and reads its stream."""
        outcome = RequestOutcome(due, sent=time.perf_counter())
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        try:
            async with self.session.post(self.url + path, json=self._body(ask)) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    outcome.error = f"status {response.status}: {text}"
                else:
                    await _read(response, outcome)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()
        if outcome.error is None and not outcome.chunks:
            outcome.error = "the answer has no token"
        outcome.answer = outcome.answer or len(outcome.chunks)
        return outcome

    def _body(self, ask: LoadRequest) -> Mapping[str, Any]:
        body = {
            "model": self.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if self.chat:
            messages = [{"role": "user", "content": ask.prompt}]
            return body | {"messages": messages, "max_completion_tokens": ask.answer}
        return body | {"prompt": ask.prompt, "max_tokens": ask.answer}


async def _read(response: aiohttp.ClientResponse, outcome: RequestOutcome) -> None:
    async for line in response.content:
        if not line.startswith(DATA):
            continue
        now, data = time.perf_counter(), line[len(DATA) :].strip()
        if data == DONE:
            return
        event = json.loads(data)
        if event.get("error"):
            outcome.error = str(event["error"].get("message", event["error"]))[:200]
            return
        if event.get("choices"):
            outcome.chunks.append(now)
        if usage := event.get("usage"):
            outcome.prompt = usage.get("prompt_tokens", 0)
            outcome.answer = usage.get("completion_tokens", 0)
    if outcome.error is None:
        outcome.error = "the stream ended without [DONE]"
