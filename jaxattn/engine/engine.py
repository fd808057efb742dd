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
    """A model that is compiled for `Limits`, and its scheduler.

    Only one thread may use an engine at a time. Calls from a second thread raise `EngineBusyError`.

    Args:
        model: a `jaxattn.models.Model`, such as `jaxattn.models.Hybrid(config)`.
        params: the model's parameters. They are arguments of the steps, never constants.
        limits, devices, implementation, on_compile, workers, parallel: see `prepare`.
        strict: if True, a trace, a compilation or a new buffer after the warm-up raises SealError;
            otherwise `seal` counts it.
        detokenize: converts tokens to text, for requests with stop strings.

    Attributes:
        model, limits: as given; with `utilization`, the limits have the number of pages that fit.
        plan: the memory that the engine needs, with reasons.
        scheduler: rows, waiting requests and pools.
        seal: the traces, compilations and new buffers after the warm-up.
        stats: statistics of the last `generate`, or of the requests that were added since.

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
        """An engine from the result of `prepare`; `start(params)` then sets the parameters."""
        engine = cls.__new__(cls)
        engine._open(prepared, strict, detokenize)
        return engine

    # --- requests in, events out

    def add(self, request: Request) -> int:
        """Queues a request and returns its id. The engine rejects a request that it can never
        serve.

        The next `step` returns the rejection as a `FinishEvent`.

        Raises:
            TypeError: the argument is not a `Request`.
            ValueError: a request with this id is running or waiting.
            EngineBusyError: another thread uses the engine.
            RuntimeError: the engine is closed.
        """
        with self._alone("add", nested=True):
            return self._add(request)

    def abort(self, id: int) -> bool:
        """Ends a running or waiting request. Returns False if no request has this id.

        The next `step` returns the generated tokens in a `FinishEvent`.

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
        """Sends a round: at most one step that reads prompts, and one call of decode steps.

        A call of decode steps generates one token for each row that decodes, or up to
        `Limits.round_steps` tokens.

        Returns:
            The events of an earlier round, and the first tokens of this round. Later calls return
            the events of up to two rounds that are in flight.

        Raises:
            EngineBusyError: another thread uses the engine, or a callback called this method.
            SealError: the engine is strict, and something was compiled or allocated. After this
                error and any other one, including Ctrl-C, all rows have ended, because their states
                may be ahead of their tokens. The next `step` serves the waiting requests.
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
        """Serves all requests, and returns their completions in the order of the requests.

        The engine rejects a request that it can never serve, and serves the other ones. The id of a
        request without one is its index in the list.

        Args:
            on_token: called with each token as soon as it is known, except for stop tokens.
            on_finish: called when a request has finished or was rejected.

        Raises:
            TypeError: `requests` is a single request, an item is not a request, or a callback is
                not callable.
            ValueError: two requests have the same id.
            GenerationInterrupted: Ctrl-C, at any time. The exception has the generated tokens, and
                the engine stays usable.
            EngineBusyError: another thread uses the engine, a callback called this method, or
                requests from `add` have not finished.
            SealError: the engine is strict, and something was compiled or allocated.
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
            top: the number of likely alternatives that are returned with each token, 0 to 20.
            temperature, top_k, top_p, min_p: parameters of the distribution, as in `Request`. The
                default is the model's own distribution. Tokens that `top_k`, `top_p` or `min_p`
                exclude have -inf.
            starts: for each text, the number of tokens of its prompt. Decode steps replay the later
                tokens, so each token has the same bits as when a row drew the token. Only engines
                with `Limits(reproducible=True)` support `starts`.

        Returns:
            For each text, a sequence with an entry per token. The entry is None for the first
            token, which has no token before it, and with `starts` for all tokens of the prompt.
            `jaxattn.logprob_array` converts the sequences to an array.

        Raises:
            TypeError, ValueError: see `Request` and `generate`. ValueError also if `starts` does
                not have one number per text, from 1 to the text's length.
            RuntimeError: the engine cannot serve a text, or its logits were not finite; the message
                has the text and the reason.
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
        """Embeddings of texts: pooled hidden states after the model's final norm.

            one, other = engine.embed([tokens, others], pooling="mean")
            similarity = one @ other / np.linalg.norm(one) / np.linalg.norm(other)

        Args:
            pooling: "mean" of all tokens, or the "last" token. The training of the model determines
                which of both is useful.

        Returns:
            float32, one row per text, not normalized.

        Raises:
            TypeError, ValueError: see `Request` and `generate`.
            RuntimeError: the engine cannot serve a text, or its hidden states were not finite; the
                message has the text and the reason.
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
