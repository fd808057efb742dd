"""From queued rows to an answer: pieces are read as they come, and written in one form or another.

The status is sent with the first piece, so that a row that is refused or fails at once still has
one of its own. Where the first piece takes longer, the stream begins with a comment.
"""

import dataclasses
import math
import time

from jaxattn.server.decoding.generation import Generation, OutputChunk
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.request import ClientClosed, HttpRequest
from jaxattn.server.openai.response_builder import ChoiceText, ResponseBuilder, StreamOptions
from jaxattn.server.runtime.admission import AdmissionToken
from jaxattn.server.runtime.service import Service


@dataclasses.dataclass(kw_only=True)
class ResponseWriter:
    """One answer in the making.

    Attributes:
        arrived: when the request came, of `time.perf_counter`.
        begun: when its first piece came.
    """

    service: Service
    exchange: HttpRequest
    ticket: AdmissionToken
    generation: Generation
    form: ResponseBuilder
    streaming: StreamOptions
    arrived: float
    begun: float | None = None

    async def give(self) -> None:
        """Queues the rows, and writes what they give until they end or the client leaves.

        Raises:
            ApiError: a row was refused or failed, or a time limit has passed.
            ClientClosed: the client left.
        """
        generation = self.generation
        self.ticket.grow(len(generation.requests), self.prompt_tokens)
        work = self._stream() if self.streaming.stream else self._whole()
        try:
            with self.service.running(generation, self.arrived):
                await self.exchange.attended(work)
            self.service.admission.answered(time.perf_counter() - self.arrived)
        except ClientClosed:
            self.service.metrics.left()
            raise
        finally:
            self._log()

    @property
    def prompt_tokens(self) -> int:
        """Of all choices: each reads the prompt."""
        return sum(len(request.prompt) for request in self.generation.requests)

    async def _whole(self) -> None:
        texts = [ChoiceText() for _ in self.generation.requests]
        while not self.generation.done:
            for piece in await self._pieces():
                texts[piece.choice].add(piece)
        await self.exchange.json(self.form.whole(texts, self.generation.tokens))

    async def _stream(self) -> None:
        pieces = await self._pieces()
        await self.exchange.begin_events()
        while True:
            if pieces:
                chunks = self.form.chunks(pieces, self.streaming, self.generation.tokens)
                await self.exchange.events(chunks)
            else:
                await self.exchange.ping()
            if self.generation.done:
                break
            pieces = await self._pieces()
        if self.streaming.usage:
            await self.exchange.events([self.form.usage_chunk(self.generation.tokens)])
        await self.exchange.end_events()

    async def _pieces(self) -> list[OutputChunk]:
        """The next pieces, or none when it is time for a comment."""
        limit, waits = self._limit(), self.service.settings.ping_seconds
        left = self.arrived + limit - time.perf_counter()
        pieces = await self.generation.pieces(min(waits, left)) if left > 0 else []
        if not pieces and left <= waits:
            raise ApiError(504, f"the answer took longer than {limit:g} s", code="timeout")
        if pieces and self.begun is None:
            self.begun = time.perf_counter()
            self.ticket.begun()
        return pieces

    def _limit(self) -> float:
        """Seconds from the request's arrival to the time that is too late."""
        settings = self.service.settings
        limits = [settings.request_seconds, settings.queue_seconds if self.begun is None else None]
        return min((limit for limit in limits if limit is not None), default=math.inf)

    def _log(self) -> None:
        log = self.exchange.log
        log |= {"prompt_tokens": self.prompt_tokens, "tokens": self.generation.tokens}
        log |= {"choices": len(self.generation.requests)}
        if self.begun is not None:
            log["first_token_ms"] = round(1e3 * (self.begun - self.arrived), 1)
