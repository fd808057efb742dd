"""The writer of responses, which queues an answer's rows and writes their output as it arrives.

It sends the HTTP status with the first piece, so that a row that is refused or fails at once still
gets an error status. If the first piece takes longer, the stream begins with a comment.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.http.chunk_writer import ChunkWriter
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.event_stream import PING
from jaxattn.server.http.request import ClientClosed, HttpRequest
from jaxattn.server.openai.response_interface import AnswerForm, WholeForm
from jaxattn.server.runtime.admission import AdmissionToken
from jaxattn.server.runtime.service import Service


class StreamSink:
    """A `PieceSink` that writes pieces directly to the connection; see `OutputCollector.pieces`."""

    def __init__(self, form: AnswerForm, collector: OutputCollector, chunks: ChunkWriter):
        self._form, self._collector, self._chunks = form, collector, chunks

    @property
    def ready(self) -> bool:
        return self._chunks.ready

    def take(self, pieces: Sequence[OutputChunk]) -> None:
        if data := self._form.stream(pieces, self._collector):
            self._chunks.write(data)


@dataclasses.dataclass(kw_only=True)
class ResponseWriter:
    """The writer of one response.

    Attributes:
        service: The service that runs the rows.
        exchange: The HTTP request.
        ticket: The request's place in the admission control.
        collector: The collector of the rows, which are not queued yet.
        form: The response's state; an `AnswerForm` if the answer is streamed.
        arrived: The time of the request's arrival, as `time.perf_counter()`.
        streamed: Whether to stream the answer.
        num_choices: The number of choices to count in the admission control; None for one per row.
        first_chunk_time: The time of the first piece; None before it.
    """

    service: Service
    exchange: HttpRequest
    ticket: AdmissionToken
    collector: OutputCollector
    form: WholeForm
    arrived: float
    streamed: bool = False
    num_choices: int | None = None
    first_chunk_time: float | None = None

    async def give(self) -> None:
        """Queues the rows, and writes their output until they end or the client disconnects.

        Raises:
            ApiError: If a row was refused or failed, or a time limit was exceeded.
            ClientClosed: If the client disconnected.
        """
        collector = self.collector
        places = len(collector.requests) if self.num_choices is None else self.num_choices
        self.ticket.grow(places, collector.prompt_tokens)
        work = self._stream() if self.streamed else self._whole()
        try:
            with self.service.running(collector, self.arrived):
                await self.exchange.attended(work)
            self.service.admission.answered(time.perf_counter() - self.arrived)
        except ClientClosed:
            self.service.metrics.left()
            raise
        finally:
            self._log()

    async def _whole(self) -> None:
        while not self.collector.done:
            for piece in await self._pieces():
                self.form.take(piece)
        await self.exchange.json(self.form.whole(self.collector))

    async def _stream(self) -> None:
        pieces, form = await self._pieces(), self.form
        assert isinstance(form, AnswerForm)
        await self.exchange.begin_events()
        begin, num_sent_tokens = form.begin(), 0
        chunks = self.exchange.chunks()
        sink = None if chunks is None else StreamSink(form, self.collector, chunks)
        while True:
            data = begin + form.stream(pieces, self.collector)
            if self.collector.done:
                break
            idle = not pieces and self.collector.tokens == num_sent_tokens
            await self.exchange.stream(data or (PING if idle else b""))
            num_sent_tokens = self.collector.tokens
            begin, pieces = b"", await self._pieces(sink)
        await self.exchange.stream(data + form.end(self.collector), more_body=False)

    async def _pieces(self, sink: StreamSink | None = None) -> list[OutputChunk]:
        """Returns the next pieces; none if it is time for a keep-alive comment."""
        limit, waits = self._limit(), self.service.settings.ping_seconds
        remaining_seconds = self.arrived + limit - time.perf_counter()
        pieces = (
            await self.collector.pieces(min(waits, remaining_seconds), sink)
            if remaining_seconds > 0
            else []
        )
        if not pieces and not self.collector.done and remaining_seconds <= waits:
            raise ApiError(504, f"the answer took longer than {limit:g} s", code="timeout")
        if pieces and self.first_chunk_time is None:
            self.first_chunk_time = time.perf_counter()
            self.ticket.begun()
        return pieces

    def _limit(self) -> float:
        """Returns the time limit in seconds from the request's arrival."""
        settings = self.service.settings
        limits = [
            settings.request_seconds,
            settings.queue_seconds if self.first_chunk_time is None else None,
        ]
        return min((limit for limit in limits if limit is not None), default=math.inf)

    def _log(self) -> None:
        log = self.exchange.log
        log |= {"prompt_tokens": self.collector.prompt_tokens, "tokens": self.collector.tokens}
        log |= {"choices": len(self.collector.requests)}
        if self.first_chunk_time is not None:
            log["first_token_ms"] = round(1e3 * (self.first_chunk_time - self.arrived), 1)
