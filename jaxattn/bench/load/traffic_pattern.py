"""Arrivals of requests: at given times, or with a fixed number in flight.

An open loop shows the latency that users see: requests arrive at random (a Poisson process), and
times count from when a request was due. A closed loop shows the capacity of a server: it sends the
next request when one has ended.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence

from jaxattn.bench.load.client import RequestOutcome, ServerClient
from jaxattn.bench.load.workload import LoadRequest


@dataclasses.dataclass(frozen=True)
class LoadPattern:
    """An open or a closed loop; exactly one attribute is set.

    Attributes:
        rate: Requests per second of an open loop.
        concurrency: Requests in flight of a closed loop.
    """

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} req/s" if self.rate else f"{self.concurrency} at a time"

    async def drive(
        self, server: ServerClient, asks: Sequence[LoadRequest], seed: int
    ) -> list[RequestOutcome]:
        """Sends the requests and returns their outcomes in the same order."""
        if self.rate is not None:
            return await _open(server, asks, self.rate, seed)
        assert self.concurrency is not None
        return await _closed(server, asks, self.concurrency)


async def _open(
    server: ServerClient, asks: Sequence[LoadRequest], rate: float, seed: int
) -> list[RequestOutcome]:
    luck, due = random.Random(seed), time.perf_counter()
    running = []
    for ask in asks:
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        running.append(asyncio.create_task(server.ask(ask, due)))
        due += luck.expovariate(rate)
    return await asyncio.gather(*running)


async def _closed(
    server: ServerClient, asks: Sequence[LoadRequest], concurrency: int
) -> list[RequestOutcome]:
    found: list[RequestOutcome | None] = [None] * len(asks)
    places = iter(range(len(asks)))

    async def worker() -> None:
        for place in places:
            found[place] = await server.ask(asks[place], time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(asks)))))
    return [outcome for outcome in found if outcome is not None]
