"""A load test: finds the model and its characters per token, warms up, then runs each load."""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from jaxattn.bench.load.client import RequestOutcome, ServerClient
from jaxattn.bench.load.metrics import measured
from jaxattn.bench.load.traffic_pattern import LoadPattern
from jaxattn.bench.load.workload import (
    LengthDistribution,
    LoadRequest,
    texts,
    token_ids,
)
from jaxattn.bench.load.workload import text as words_of

TEXTS = (40, 180)  # characters of the texts that measure the characters per token
TOP_CONCURRENCY = 128  # our server queues as many requests before it rejects one
TOP_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the top rate
OnRow = Callable[[dict[str, Any], Sequence[str]], None]


class ServerUnreachable(Exception):
    """Raised if the server cannot be reached or does not answer as expected."""


@dataclasses.dataclass(frozen=True)
class LoadTest:
    """The loads for a server, independent of which server it is.

    Attributes:
        lengths: The lengths of prompts and answers.
        loads: The loads, which run one after another.
        requests: The number of requests per load.
        warmup: The number of requests before the first load.
        seed: The seed of lengths, prompts and arrival times.
        chat: Whether requests are chats rather than completions.
        top_first: Whether a first load with `TOP_CONCURRENCY` requests at a time finds the top
            rate. If `loads` is empty, loads at `shares` of the top rate follow.
        shares: Fractions of the top rate.
        vocab_size: Prompts are token ids below this number. With None, prompts are texts, with a
            length in tokens of the server's tokenizer.
    """

    lengths: LengthDistribution
    loads: tuple[LoadPattern, ...]
    requests: int
    warmup: int
    seed: int
    chat: bool = False
    top_first: bool = False
    shares: tuple[float, ...] = TOP_SHARES
    vocab_size: int | None = None

    async def run(
        self, url: str, model: str | None, key: str | None, on_row: OnRow
    ) -> dict[str, Any]:
        """Runs all loads and returns the facts of the run and its rows.

        Args:
            url: The URL of the server's root, with or without /v1.
            model: The model's name; None takes the first that the server lists.
            key: The API key, or None.
            on_row: Called with each row and the errors of its requests.

        Raises:
            ServerUnreachable: the server cannot be reached, lists no model, or fails a first
                request.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=timeout
        ) as session:
            url = url.rstrip("/").removesuffix("/v1")
            model = model or await _model(session, url)
            server = ServerClient(session, url, model, self.chat)
            if self.vocab_size is None:
                characters = await _characters(server)
                prompt_of = texts(characters)
            else:
                characters, prompt_of = 0.0, token_ids(self.vocab_size)
            for ask in self.lengths.asks(self.warmup, self.seed + 1, prompt_of):
                _checked(await server.ask(ask, time.perf_counter()))
            rows: list[dict[str, Any]] = []
            loads = list(self.loads)
            if self.top_first:
                loads.insert(0, LoadPattern(concurrency=TOP_CONCURRENCY))
            for place, load in enumerate(loads):
                # Each load has other prompts, because prompts in the prefix cache would cost
                # nothing.
                asks = list(self.lengths.asks(self.requests, self.seed, prompt_of, place))
                outcomes = await load.drive(server, asks, self.seed)
                rows.append(measured(str(load), outcomes))
                on_row(rows[-1], [each.error for each in outcomes if each.error])
                if self.top_first and len(loads) == 1:
                    loads += top_rates(rows[-1], self.shares)
        return {"model": model, "characters per token": characters, "rows": rows}


def top_rates(row: Mapping[str, Any], shares: Sequence[float]) -> list[LoadPattern]:
    """Loads at shares of a server's top rate, from the row of a closed loop; none if all failed."""
    top = row.get("req/s", 0.0)
    return [LoadPattern(rate=float(f"{share * top:.3g}")) for share in shares if top]


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
    except (aiohttp.ClientError, OSError) as error:
        raise ServerUnreachable(f"{url} cannot be reached: {error}") from error
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (LookupError, TypeError, ValueError) as error:
        raise ServerUnreachable(f"{url}/v1/models lists no model: {text[:200]}") from error


async def _characters(server: ServerClient) -> float:
    """Characters per token, from the server's token counts of a short and a longer text."""
    luck, lengths, tokens = random.Random(0), [], []
    for characters in TEXTS:
        words = words_of(luck, characters)
        outcome = _checked(await server.ask(LoadRequest(words, 0, 1), time.perf_counter()))
        lengths.append(len(words))
        tokens.append(outcome.prompt)
    more = tokens[1] - tokens[0]  # the difference cancels the tokens of a chat template
    return (lengths[1] - lengths[0]) / more if more > 0 else 4.0


def _checked(outcome: RequestOutcome) -> RequestOutcome:
    if outcome.error is not None:
        raise ServerUnreachable(f"the first request failed: {outcome.error}")
    return outcome
