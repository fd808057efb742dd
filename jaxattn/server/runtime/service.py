"""The service that the routes call: one model, its worker, admission control and metrics."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxattn import __version__
from jaxattn.engine.requests.request import Grammar, Request
from jaxattn.limits import Limits
from jaxattn.models.loading.pooling_config import PoolingConfig
from jaxattn.server.decoding.grammars.grammar_matcher import GrammarVocabulary
from jaxattn.server.decoding.message_format import MessageFormat
from jaxattn.server.decoding.output_collector import OutputCollector
from jaxattn.server.decoding.sampling_params import SamplingParams
from jaxattn.server.decoding.stop_strings import StopText
from jaxattn.server.decoding.token_rules import TokenLimits
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.runtime.admission import AdmissionControl, AdmissionToken
from jaxattn.server.runtime.engine_worker import EngineProtocol, EngineWorker
from jaxattn.server.runtime.event_router import EventRouter
from jaxattn.server.runtime.metrics import ServerMetrics
from jaxattn.server.runtime.response_store import ResponseStore
from jaxattn.server.runtime.server_state import ServerState, unavailable
from jaxattn.server.settings import ServerSettings
from jaxattn.text import SamplingDefaults, Tokenizer, TokenStream

LOG = logging.getLogger("jaxattn.server")
MOST_IDS = 2**31
TEXT_THREADS = 4
CUT_SECONDS = 5.0  # in which the clients of aborted answers get their errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a service runs, and its defaults.

    Attributes:
        make_engine: Creates and starts the engine. The device thread calls it.
        tokenizer: The model's tokenizer.
        limits: The engine's limits. The engine fills in those that are left open when it starts.
        vocab_size: The model's vocabulary size.
        defaults: The sampling parameters of requests that set none.
        hidden_size: The dimension of the model's embeddings; None if it gives no embeddings.
        embedding: The default pooling and normalization of embeddings.
        context_length: The model's own context length, independent of `limits`; None if unknown.
        progress: Returns the progress of `make_engine`, for the page: JSON objects with the name of
            a task, the amounts `done` and `of`, and whether these are `bytes`.
    """

    make_engine: Callable[[], EngineProtocol]
    tokenizer: Tokenizer
    limits: Limits
    vocab_size: int
    defaults: SamplingDefaults
    hidden_size: int | None = None
    embedding: PoolingConfig = PoolingConfig()
    context_length: int | None = None
    progress: Callable[[], Sequence[Mapping[str, Any]]] = tuple


class Service:
    """A model served over HTTP. Call its methods on the event loop.

    Args:
        on_end: Called on the event loop when the device thread has ended, with its error or None.

    Attributes:
        phase: The server's state.
        started: The start time, as `time.time()` in whole seconds.
        message_format: The format in which the model writes reasoning and tool calls.
        router: Routes the engine's events to the collectors of the open requests.
        fingerprint: A hash of everything except the weights that decides a seeded answer: the
            model's name, the limits, and the versions of JAX and jaxattn.
    """

    def __init__(
        self,
        served: ServedModel,
        settings: ServerSettings,
        *,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ):
        limits = served.limits
        self.served, self.tokenizer, self.limits = served, served.tokenizer, limits
        self.settings, self.phase, self.started = settings, ServerState.STARTING, int(time.time())
        self.metrics = ServerMetrics(settings.names[0])
        self.admission = AdmissionControl(
            limits.batch, settings.max_waiting, settings.max_waiting_tokens
        )
        self.fingerprint = _fingerprint(settings, limits)
        self.responses = ResponseStore()
        self.message_format = MessageFormat.of(served.tokenizer.chat_template, settings.tool_parser)
        self.vocabulary = GrammarVocabulary(served.tokenizer, self.message_format.thoughts)
        self._on_end, self._idle, self._ready = on_end, asyncio.Event(), asyncio.Event()
        self.router = EventRouter(self.metrics, self._from_thread)
        self._numbers, self._aborted = itertools.count(), False
        self._loop = asyncio.get_running_loop()
        self._texts = ThreadPoolExecutor(TEXT_THREADS, "text")
        self.worker = EngineWorker(
            served.make_engine,
            on_ready=lambda: self._from_thread(self._be_ready),
            on_report=self.router.report,
            on_end=lambda error: self._from_thread(self._ended, error),
        )

    # --- life

    def start(self) -> None:
        """Starts the device thread. `ready` waits for its engine."""
        self.worker.start()

    async def ready(self) -> None:
        """Waits until the server accepts requests, or the engine has failed to start."""
        await self._ready.wait()

    async def drain(self, seconds: float) -> bool:
        """Stops accepting requests, and waits for the open ones; aborts them after `seconds`.

        Returns:
            Whether all requests ended without an abort.
        """
        if self.phase is not ServerState.FAILED:
            self.phase = ServerState.DRAINING
        completed = await self._emptied(seconds)
        if not completed:
            self._aborted = True
            self.worker.abort(list(self.router.collectors))
            await self._emptied(CUT_SECONDS)
        return completed

    async def _emptied(self, seconds: float) -> bool:
        """Waits until no request is open; returns False if that takes longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self.admission.open:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Ends the device thread after its current step."""
        self.worker.stop()
        self._texts.shutdown(wait=False, cancel_futures=True)

    def _from_thread(self, call: Callable[..., None], *arguments: object) -> None:
        """Schedules a call on the event loop, from the device thread. Does nothing if the loop is
        closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _be_ready(self) -> None:
        engine = self.worker.engine
        assert engine is not None
        self.limits = engine.limits
        self.admission.set_rows(engine.limits.batch)
        self.fingerprint = _fingerprint(self.settings, engine.limits)
        self.metrics.ready(engine.limits, engine.plan)
        if self.phase is ServerState.STARTING:
            self.phase = ServerState.READY
        self._ready.set()

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.phase = ServerState.FAILED
        self.router.fail(str(error))
        self._ready.set()
        self._on_end(error)

    # --- requests

    @contextlib.contextmanager
    def entered(self) -> Iterator[AdmissionToken]:
        """Admits one request for the duration of the `with` block.

        Raises:
            ApiError: 503 if the server is not ready, 429 if the queue is full.
        """
        if self.phase is not ServerState.READY:
            raise unavailable(self.phase)
        try:
            with self.admission.enter() as ticket:
                yield ticket
        finally:
            self._idle.set()

    async def in_thread[T](self, call: Callable[[], T]) -> T:
        """Runs `call` in a thread pool. For work of the tokenizer or the chat template, which would
        block the event loop."""
        return await self._loop.run_in_executor(self._texts, call)

    def check_model(self, fields: JsonFields) -> None:
        """Raises ApiError 404 if the request's `model` is none of the served names."""
        name = fields.text("model")
        if name is not None and name not in self.settings.names:
            raise ApiError(
                404,
                f"this server does not serve the model {name[:200]!r}; use "
                f"{' or '.join(self.settings.names)}",
                param="model",
                code="model_not_found",
            )

    def shortened(self, fields: JsonFields, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the last `truncate_prompt_tokens` tokens of a prompt. The value -1 keeps as many
        as fit into a row together with one generated token."""
        num_tokens = fields.integer("truncate_prompt_tokens", -1, MOST_IDS)
        if num_tokens == 0:
            raise fields.wrong("truncate_prompt_tokens", "at least 1, or -1 for the model length")
        if num_tokens == -1:
            num_tokens = self.limits.longest_row - 1
        return prompt if num_tokens is None else prompt[-num_tokens:]

    def room(self, prompt: Sequence[int], param: str, min_new_tokens: int = 1) -> int:
        """Returns the maximum number of tokens that can follow a prompt.

        Raises:
            ApiError: 400 if the prompt is empty, if fewer than `min_new_tokens` tokens can follow
                it, or if a token id is outside of the vocabulary.
        """
        if not prompt:
            raise bad(param, f"{param} is empty; it needs at least one token")
        max_tokens = self.limits.longest_row
        if len(prompt) + min_new_tokens > max_tokens:
            generated = ", including at least one generated token" if min_new_tokens else ""
            raise bad(
                param,
                f"{param} has {len(prompt):,} tokens, but the model length is "
                f"{max_tokens:,}{generated}; {self._longer_rows()}",
                code="context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= self.served.vocab_size:
            raise bad(param, f"{param} has a token outside of 0 to {self.served.vocab_size - 1:,}")
        return max_tokens - len(prompt)

    def _longer_rows(self) -> str:
        """Returns the advice for a prompt that is too long: shorten it, or raise which limit."""
        limits = self.limits
        if limits.longest_row < limits.max_model_len:
            capacity = limits.pages * limits.page_tokens
            return (
                "make it shorter, or increase --num-pages or --utilization of the server: its "
                f"cache has room for {capacity:,} tokens"
            )
        context_length = self.served.context_length
        if context_length is None or limits.max_model_len < context_length:
            most = "" if context_length is None else f", up to the model's {context_length:,}"
            return f"make it shorter, or start the server with a larger --max-model-len{most}"
        return f"make it shorter: the model supports at most {context_length:,} tokens"

    async def collector(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        continues: bool,
        grammar: tuple[str, str] | None = None,
        shown: Sequence[str] = (),
    ) -> OutputCollector:
        """Returns a collector of `sampling.choices` requests per prompt, which are not queued yet.

        Args:
            max_new_tokens: For each prompt, the result of `room`.
            continues: Whether the text continues the prompt's text. The answer of a chat does not.
            grammar: The grammar of every row, and the field that asked for it.
            shown: The special tokens that stay in the text.

        Raises:
            ApiError: 400 if the grammar cannot be compiled.
        """
        grammars: list[Grammar | None] = [None] * (len(prompts) * sampling.choices)
        if grammar is not None:
            text, param = grammar
            grammars[:] = await self.in_thread(
                lambda: self.vocabulary.matchers(text, param, len(grammars))
            )
        if sampling.limits != TokenLimits():
            ends = sampling.ends(self.tokenizer.stop_tokens)
            rules = await self.in_thread(lambda: sampling.limits.rules(ends, self.tokenizer.encode))
            if rules is not None:
                grammars = [rules.around(each) for each in grammars]
        row_grammars = iter(grammars)

        def stream() -> TokenStream:
            return self.tokenizer.stream(
                skip_special_tokens=sampling.skip_special, continues=continues, shown=shown
            )

        requests = [
            sampling.request(
                prompt,
                choice=choice,
                id=self._free_id(),
                max_new_tokens=room,
                model_stop_tokens=self.tokenizer.stop_tokens,
                ends_at=StopText(stream(), sampling.stops) if sampling.stops else None,
                grammar=next(row_grammars),
            )
            for prompt, room in zip(prompts, max_new_tokens, strict=True)
            for choice in range(sampling.choices)
        ]
        return OutputCollector.of(
            requests,
            stream,
            sampling.stops,
            stop_tokens=sampling.stop_tokens,
            stop_included=sampling.stop_included,
        )

    def embeddings(
        self, prompts: Sequence[Sequence[int]], pooling: str, *, priority: int, salt: str
    ) -> OutputCollector:
        """Returns a collector with one embedding request per prompt, which are not queued yet.

        Prompts beyond the first batch get a lower priority, so that other requests can overtake
        them.
        """
        rows = self.limits.batch
        requests = [
            Request(
                prompt,
                max_tokens=0,
                pooling=pooling,
                priority=priority if place < rows else min(priority + 1, MOST_IDS - 1),
                cache_salt=salt,
                id=self._free_id(),
            )
            for place, prompt in enumerate(prompts)
        ]
        return OutputCollector.of(requests, self.tokenizer.stream, ())

    @contextlib.contextmanager
    def running(self, collector: OutputCollector, arrived: float) -> Iterator[None]:
        """Queues a collector's requests, and at the end of the `with` block aborts the unfinished.

        Raises:
            ApiError: 503 if the server has aborted its requests to shut down, or the engine has
                failed.
        """
        if self._aborted or self.phase is ServerState.FAILED:
            raise unavailable(self.phase)
        requests = collector.requests
        ids = [request.id for request in requests if request.id is not None]
        self.router.collectors.update(dict.fromkeys(ids, collector))
        most = max(request.max_tokens for request in requests)
        self.metrics.asked(ids, [len(request.prompt) for request in requests], most, arrived)
        self.worker.submit(requests)
        try:
            yield
        finally:
            if left := collector.open:
                self.worker.abort(left)

    def _free_id(self) -> int:
        """Returns an id that no open request has, from 0 to 2**31 - 1."""
        return next(id for n in self._numbers if (id := n % MOST_IDS) not in self.router.collectors)


def _fingerprint(settings: ServerSettings, limits: Limits) -> str:
    decides = (settings.names[0], limits, jax.__version__, __version__)
    return f"fp_{hashlib.sha256(repr(decides).encode()).hexdigest()[:12]}"
