"""Continuous batching over compiled steps: requests in, tokens out as they appear.

    with Engine(model, params, Limits(batch=4)) as engine:
        print(engine.plan.total)
        completions = engine.generate([Request(b"def fib(n):"), Request(b"import ")])

`generate` is a loop over `add` and `step`. Each `step` sends a round of the device's steps, and
gives the events of a round before it (execution/overlap_loop.py). A row that finishes frees its
pages and its slot, and the next waiting request takes them (scheduling/scheduler.py). The steps are
executables of fixed shapes, so nothing can be compiled after `start`. State and rows are donated to
each step and come back in the same buffers.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Float

from jaxattn.core.dispatch import Implementation
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.engine.compilation.compiler import OnCompile
from jaxattn.engine.execution.output_processor import Detokenize
from jaxattn.engine.lifecycle import EngineLifecycle
from jaxattn.engine.requests.outputs import (
    Completion,
    Event,
    FinishEvent,
    FinishReason,
    GenerationInterrupted,
    Logprobs,
    TokenEvent,
)
from jaxattn.engine.requests.request import Request
from jaxattn.engine.requests.request_ids import MOST_IDS, assign_request_ids, numbered
from jaxattn.engine.requests.stats import GenerationStats, RequestTimes
from jaxattn.engine.runtime.gc_pause import gc_paused
from jaxattn.engine.runtime.thread_guard import EngineBusyError as EngineBusyError
from jaxattn.engine.startup.engine_build import EngineBuild, prepare
from jaxattn.memory.engine_limits import Limits
from jaxattn.models.interface import Model
from jaxattn.parallel import ALONE, Parallel

OnToken = Callable[[Request, int], None]
OnFinish = Callable[[Completion], None]


class Engine(EngineLifecycle):
    """A model compiled for `Limits`. One thread at a time; another gets an `EngineBusyError`.

    Args:
        model: a `jaxattn.models.Model`, such as `jaxattn.models.Hybrid(config)`.
        params: its parameters; an argument of the steps, never captured.
        limits, devices, implementation, on_compile, workers, parallel: see `prepare`.
        strict: a trace, a compilation or a new buffer after the warm-up raises SealError; otherwise
            it is counted in `seal`.
        detokenize: tokens to text, for requests with stop strings.

    Attributes:
        model, limits: as given; with `utilization`, the limits have the pages that fit.
        plan: what memory the engine takes and why.
        scheduler: rows, waiting requests and pools.
        seal: what was compiled or allocated after the warm-up.
        stats: of the last `generate`, or of what was added since.

    Raises:
        TypeError, ValueError, PlanError, Refusal: see `prepare`.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        limits: Limits | None = None,
        devices: Sequence[jax.Device] | jax.Device | None = None,
        *,
        implementation: Implementation | None = None,
        on_compile: OnCompile | None = None,
        strict: bool = False,
        workers: int | None = None,
        detokenize: Detokenize | None = None,
        parallel: Parallel = ALONE,
    ):
        prepared = prepare(
            model,
            params,
            limits,
            devices,
            implementation=implementation,
            on_compile=on_compile,
            workers=workers,
            parallel=parallel,
            loaded=True,
        )
        self._open(prepared, strict, detokenize)

    @classmethod
    def of(
        cls, prepared: EngineBuild, *, strict: bool = False, detokenize: Detokenize | None = None
    ) -> Self:
        """An engine of what `prepare` made; `start(params)` gives it its parameters."""
        engine = cls.__new__(cls)
        engine._open(prepared, strict, detokenize)
        return engine

    # --- requests in, events out

    def add(self, request: Request) -> int:
        """Queues a request and returns its id. One that can never be served is refused.

        The refusal comes as a `FinishEvent` of the next `step`.

        Raises:
            TypeError: it is no `Request`.
            ValueError: a request with its id is running or waiting.
            EngineBusyError: another thread uses the engine.
            RuntimeError: the engine is closed.
        """
        with self._alone("add", nested=True):
            return self._add(request)

    def abort(self, id: int) -> bool:
        """Ends a request, running or waiting; False if there is none with this id.

        What it generated comes as a `FinishEvent` of the next `step`.

        Raises:
            EngineBusyError: another thread uses the engine.
        """
        with self._alone("abort", nested=True):
            row = next((r for r in self.scheduler.rows.values() if r.request.id == id), None)
            if row is not None:
                self._endings.end(row, FinishReason.ABORTED)
            elif queued := self.scheduler.withdraw(id):
                self._endings.finish(queued.request, FinishReason.ABORTED, of=queued)
            else:
                return False
            return True

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        flying = self._loop is not None and self._loop.in_flight
        return self.scheduler.busy or bool(self._endings.events) or flying

    def step(self) -> list[Event]:
        """Sends a round: at most one prefill step, and a call of decode steps: one token for each
        row that decodes, or up to `Limits.round_steps`.

        Returns:
            What an earlier round told, and first tokens of this one. Up to two rounds that are sent
            are read by later calls.

        Raises:
            EngineBusyError: another thread uses the engine, or a callback called it.
            SealError: the engine is strict and something was compiled or allocated. After this and
                any other error, Ctrl-C too, the rows have ended: their states may have gone on
                without them. Requests that wait are served by the next `step`.
        """
        with self._alone("step"):
            self._start()
            with self._ending_rows():
                return self._step()

    def generate(
        self,
        requests: Iterable[Request],
        *,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[Completion]:
        """Serves all requests; the completions are in the requests' order.

        A request that can never be served is refused, and the others are served. A request
        without an id gets its place in the list.

        Args:
            on_token: called with each token as soon as it is known, stop tokens aside.
            on_finish: called when a request is done or refused.

        Raises:
            TypeError: `requests` is one request, something in it is none, or a callback cannot be
                called.
            ValueError: two requests have the same id.
            GenerationInterrupted: Ctrl-C, at any time. It holds what was generated, and the engine
                stays usable.
            EngineBusyError: another thread uses the engine, a callback called it, or requests that
                were added are not done.
            SealError: the engine is strict and something was compiled or allocated.
        """
        for name, call in (("on_token", on_token), ("on_finish", on_finish)):
            if call is not None and not callable(call):
                raise TypeError(f"generate: {name} must be callable, got {type(call).__name__}")
        with self._alone("generate"):
            if self.busy:
                raise EngineBusyError(
                    "generate: requests that were added are not done; call step() until the engine "
                    "is not busy"
                )
            return self._generate(assign_request_ids(requests), on_token, on_finish)

    def score(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        top: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        starts: Iterable[int] | None = None,
    ) -> list[Sequence[Logprobs | None]]:
        """The log-probabilities of the tokens of texts, each given the tokens before it.

            [found] = engine.score([tokens])
            perplexity = math.exp(-sum(each.token for each in found[1:]) / len(found[1:]))

        Args:
            top: how many likely alternatives are told with each token, 0 to 20.
            temperature, top_k, top_p, min_p: of the distribution, as in `Request`. By default it is
                the model's own. A token that the others leave out has -inf.
            starts: of each text, how many tokens its prompt has. The tokens behind it are replayed
                by decode steps: each has the bits that it had when a row drew it. Engines of
                `Limits(reproducible=True)` do it.

        Returns:
            Of each text what each of its tokens had; None of the first, before which nothing
            stands, and with `starts` of all of the prompt. `jaxattn.logprob_array` makes an array
            of them.

        Raises:
            TypeError, ValueError: see `Request` and `generate`; `starts` are not one for each text,
                from 1 to its length.
            RuntimeError: a text cannot be served, or its logits were not finite; the message says
                which and why.
        """
        options: dict[str, Any] = dict(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            processed_logprobs=True,
        )
        if starts is None:
            requests = [
                Request(each, max_tokens=0, prompt_logprobs=top, **options) for each in prompts
            ]
            return [each.prompt_logprobs for each in self._whole("score", requests)]
        if not isinstance(starts, Iterable):
            raise TypeError(f"score: starts must be integers, one for each text; got {starts!r}")
        requests = _replays(list(prompts), list(starts), logprobs=top, **options)
        done = self._whole("score", requests)
        return [(*(None,) * len(each.request.prompt), *each.logprobs) for each in done]

    def embed(
        self, prompts: Iterable[Sequence[int]], *, pooling: str = "last"
    ) -> Float[np.ndarray, "prompts hidden"]:
        """Embeddings of texts, of the hidden states behind the model's final norm.

            one, other = engine.embed([tokens, others], pooling="mean")
            similarity = one @ other / np.linalg.norm(one) / np.linalg.norm(other)

        Args:
            pooling: "mean" of all tokens, or the "last" token. Which of them is of use depends on
                how the model was trained.

        Returns:
            float32, a row for each text, not normalized.

        Raises:
            TypeError, ValueError: see `Request` and `generate`.
            RuntimeError: a text cannot be served, or its hidden states were not finite; the message
                says which and why.
        """
        requests = [Request(each, max_tokens=0, pooling=pooling) for each in prompts]
        found = np.zeros((len(requests), *self.model.hidden_shape.shape), np.float32)
        for row, each in zip(found, self._whole("embed", requests), strict=True):
            row[:] = each.embedding
        return found

    def _whole(self, what: str, requests: list[Request]) -> list[Completion]:
        """What became of requests for no tokens, all of which were served."""
        done = self.generate(requests)
        for place, each in enumerate(done):
            if each.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(f"{what}: text {place}: {each.finish_reason}: {each.detail}")
        return done

    def _generate(
        self, requests: list[Request], on_token: OnToken | None, on_finish: OnFinish | None
    ) -> list[Completion]:
        self._endings.stats, started = GenerationStats(), time.perf_counter()
        done: dict[int | None, Completion] = {}
        try:
            self._start()
            started = time.perf_counter()
            for request in requests:
                self._add(request)
            while self.busy:
                with gc_paused():
                    self._round(done, on_token, on_finish)
        except KeyboardInterrupt as interrupt:
            self._interrupt(requests, done)
            completions = [done[request.id] for request in requests]
            raise GenerationInterrupted(completions) from interrupt
        finally:
            self._clear()
            self.stats.seconds = time.perf_counter() - started
        return [done[request.id] for request in requests]

    def _round(
        self,
        done: dict[int | None, Completion],
        on_token: OnToken | None,
        on_finish: OnFinish | None,
    ) -> None:
        """A round of `generate`. Its events are gone when it returns."""
        events = self._step()
        ended = [event for event in events if isinstance(event, FinishEvent)]
        for event in ended:  # before a callback can be interrupted
            done.setdefault(event.completion.request.id, event.completion)
        _tell(events, on_token, on_finish)

    def _interrupt(self, requests: list[Request], done: dict[int | None, Completion]) -> None:
        """Ends what is not done: rows with what they generated, the rest with nothing."""
        self._end_rows(FinishReason.INTERRUPTED)
        for event in self._endings.events:
            if isinstance(event, FinishEvent):
                done.setdefault(event.completion.request.id, event.completion)
        for request in requests:
            if request.id not in done:
                done[request.id] = Completion(request, (), FinishReason.INTERRUPTED)

    # --- one round

    def _add(self, request: Request) -> int:
        while self._next_id in self._endings.clocks:
            self._next_id += 1
        request = numbered(request, self._next_id)
        assert request.id is not None
        if request.id in self._endings.clocks:
            raise ValueError(f"a request with id {request.id} is running or waiting")
        self._next_id = (request.id + 1) % MOST_IDS
        self._endings.clocks[request.id] = RequestTimes(time.perf_counter())
        self._submit(request)
        return request.id

    def _step(self) -> list[Event]:
        assert self._loop is not None
        if self.scheduler.busy or self._loop.in_flight:
            self._send_round()
        events, self._endings.events = self._endings.events, []
        return events


def _replays(texts: list[Sequence[int]], starts: list[int], **options: Any) -> list[Request]:
    """Requests of these options whose answers are what stands behind the prompts of texts."""
    if len(starts) != len(texts):
        raise ValueError(f"score: starts has {len(starts)} numbers for {len(texts)} texts")
    for place, (text, start) in enumerate(zip(texts, starts, strict=True)):
        check_sizes("score", **{f"starts[{place}]": start})
        if start > len(text):
            raise ValueError(
                f"score: starts[{place}]={start} is behind the text's {len(text)} tokens"
            )
    return [
        Request(text[:start], max_tokens=len(text) - start, replay=text[start:], **options)
        for text, start in zip(texts, starts, strict=True)
    ]


def _tell(events: Sequence[Event], on_token: OnToken | None, on_finish: OnFinish | None) -> None:
    """Calls back, in the order of the events."""
    for event in events:
        if type(event) is TokenEvent:  # by far the most; 256 rows have 2,048 at a time
            if on_token:
                on_token(event[0], event[1])
        elif on_finish and isinstance(event, FinishEvent):
            on_finish(event.completion)
