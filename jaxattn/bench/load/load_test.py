"""A load test: the model, the length of its tokens, a warm-up, then one load after another."""

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

TEXTS = (40, 180)  # characters of the texts from which the length of a token is found
TOP_CONCURRENCY = 128  # as many wait in our server before one is refused
TOP_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the top rate
OnRow = Callable[[dict[str, Any], Sequence[str]], None]


class ServerUnreachable(Exception):
    """The server does not answer as it should."""


@dataclasses.dataclass(frozen=True)
class LoadTest:
    """What a server is asked for, whichever it is.

    Attributes:
        loads: one after another.
        top_first: a first load with `TOP_CONCURRENCY` requests at a time, for the top rate. Without
            `loads` those of `shares` of the top rate follow.
        vocab_size: prompts are token ids below it; None makes them texts, of as many tokens as the
            server's tokenizer finds in them.
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
        """All loads; the facts of the run and its rows.

        Args:
            url: of the server's root, with /v1 or without.
            model: its name; None takes the first that the server lists.

        Raises:
            ServerUnreachable: the server cannot be asked.
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
                # Other prompts for each load: what is in a prefix cache would cost nothing.
                asks = list(self.lengths.asks(self.requests, self.seed, prompt_of, place))
                outcomes = await load.drive(server, asks, self.seed)
                rows.append(measured(str(load), outcomes))
                on_row(rows[-1], [each.error for each in outcomes if each.error])
                if self.top_first and len(loads) == 1:
                    loads += top_rates(rows[-1], self.shares)
        return {"model": model, "characters per token": characters, "rows": rows}


def top_rates(row: Mapping[str, Any], shares: Sequence[float]) -> list[LoadPattern]:
    """Shares of a server's top rate, from a load of many at a time; none if all of them failed."""
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
    """Characters of a token, from what the server counts in a short and in a longer text."""
    luck, lengths, tokens = random.Random(0), [], []
    for characters in TEXTS:
        words = words_of(luck, characters)
        outcome = _checked(await server.ask(LoadRequest(words, 0, 1), time.perf_counter()))
        lengths.append(len(words))
        tokens.append(outcome.prompt)
    more = tokens[1] - tokens[0]  # what a chat's template adds is in both
    return (lengths[1] - lengths[0]) / more if more > 0 else 4.0


def _checked(outcome: RequestOutcome) -> RequestOutcome:
    if outcome.error is not None:
        raise ServerUnreachable(f"a first request failed: {outcome.error}")
    return outcome
