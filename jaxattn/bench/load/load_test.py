"""A whole run: the model, the length of its tokens, a warm-up, then one load after another."""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from jaxattn import __version__
from jaxattn.bench.load.arrivals import LoadPattern
from jaxattn.bench.load.client import RequestOutcome, ServerClient
from jaxattn.bench.load.metrics import measured
from jaxattn.bench.load.request_lengths import LengthDistribution, LoadRequest
from jaxattn.bench.load.request_lengths import text as words_of

TEXTS = (40, 180)  # characters of the texts from which the length of a token is found
OnRow = Callable[[dict[str, Any], Sequence[str]], None]


class ServerUnreachable(Exception):
    """The server does not answer as it should."""


async def run(args: argparse.Namespace, key: str | None, on_row: OnRow) -> dict[str, Any]:
    """All loads of a command; the facts of the run and its rows.

    Raises:
        ServerUnreachable: the server cannot be asked.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=timeout
    ) as session:
        url = args.url.rstrip("/").removesuffix("/v1")
        model = args.model or await _model(session, url)
        server = ServerClient(session, url, model, args.chat)
        characters = await _characters(server)
        lengths = LengthDistribution(args.prompt_tokens, args.answer_tokens, args.most_tokens)
        loads = [LoadPattern(rate=rate) for rate in args.rate]
        loads += [LoadPattern(concurrency=number) for number in args.concurrency]
        for ask in lengths.asks(args.warmup, args.seed + 1, characters):
            _checked(await server.ask(ask, time.perf_counter()))
        rows = []
        for load in loads:
            asks = list(lengths.asks(args.requests, args.seed, characters))
            outcomes = await load.drive(server, asks, args.seed)
            rows.append(measured(str(load), outcomes))
            on_row(rows[-1], [each.error for each in outcomes if each.error])
    return {
        "what": "serve",
        "jaxattn": __version__,
        "url": args.url,
        "model": model,
        "chat": args.chat,
        "requests": args.requests,
        "seed": args.seed,
        "prompt tokens": args.prompt_tokens or "as ShareGPT",
        "answer tokens": args.answer_tokens or "as ShareGPT",
        "characters per token": characters,
        "rows": rows,
    }


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
