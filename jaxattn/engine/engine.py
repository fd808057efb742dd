"""Continuous batching over compiled steps: takes requests and returns tokens as they are generated.

    with Engine(model, params, Limits(batch=4)) as engine:
        print(engine.plan.total)
        completions = engine.generate([Request(b"def fib(n):"), Request(b"import ")])

`generate` is a loop over `add` and `step`. Each `step` sends a round of steps to the device and
returns the events of an earlier round (execution/overlap_loop.py). A row that finishes frees its
pages and its slot for the next waiting request (scheduling/scheduler.py). The steps are executables
of fixed shapes, so nothing is compiled after `start`. Each step receives the state and the rows as
donated arguments and returns them in the same buffers.
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
from jaxattn.limits import Limits
from jaxattn.models.interface import Model
from jaxattn.parallel import ALONE, Parallel

OnToken = Callable[[Request, int], None]
OnFinish = Callable[[Completion], None]


class Engine(EngineLifecycle):
    """A model compiled for `Limits`. Only one thread may use it at a time.

    A call from a second thread raises `EngineBusyError`.

    Args:
        model: A `jaxattn.models.Model`, such as `jaxattn.models.Hybrid(config)`.
        params: The model's parameters. The steps take them as an argument and never capture them.
        limits, devices, implementation, on_compile, workers, parallel: See `prepare`.
        strict: If True, a trace, a compilation or a new buffer after the warm-up raises SealError.
            Otherwise `seal` only counts it.
        detokenize: A function from tokens to text, which requests with stop strings need.

    Attributes:
        model, limits: The arguments; with `utilization`, the limits hold the pages that fit.
        plan: The device memory that the engine takes, with a reason for each item.
        scheduler: The rows, the waiting requests and the pools of pages and slots.
        seal: The guard that counts compilations and new buffers after the warm-up.
        stats: Statistics since the last call of `generate` began, or since the engine was created.

    Raises:
        TypeError, ValueError, PlanError, Refusal: See `prepare`.
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
        build = prepare(
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
        self._open(build, strict, detokenize)

    @classmethod
    def of(
        cls, prepared: EngineBuild, *, strict: bool = False, detokenize: Detokenize | None = None
    ) -> Self:
        """Creates an engine from the result of `prepare`; `start(params)` supplies parameters."""
        engine = cls.__new__(cls)
        engine._open(prepared, strict, detokenize)
        return engine

    # --- requests in, events out

    def add(self, request: Request) -> int:
        """Queues a request and returns its id.

        If the engine can never serve the request, the next `step` returns a `FinishEvent` with the
        reason `REFUSED`.

        Raises:
            TypeError: `request` is not a `Request`.
            ValueError: A request with the same id is running or waiting.
            EngineBusyError: Another thread uses the engine.
            RuntimeError: The engine is closed.
        """
        with self._exclusive("add", nested=True):
            return self._add(request)

    def abort(self, id: int) -> bool:
        """Ends a running or waiting request. Returns False if no request has this id.

        The next `step` returns a `FinishEvent` with the tokens that the request has generated.

        Raises:
            EngineBusyError: Another thread uses the engine.
        """
        with self._exclusive("abort", nested=True):
            row = next((r for r in self.scheduler.rows.values() if r.request.id == id), None)
            if row is not None:
                self._endings.end(row, FinishReason.ABORTED)
            elif queued := self.scheduler.remove_waiting(id):
                self._endings.finish(queued.request, FinishReason.ABORTED, source=queued)
            else:
                return False
            return True

    @property
    def busy(self) -> bool:
        """Whether there are requests, events or steps in flight for `step` to process."""
        flying = self._loop is not None and self._loop.in_flight
        return self.scheduler.busy or bool(self._endings.events) or flying

    def step(self) -> list[Event]:
        """Sends a round of steps to the device and returns the events of an earlier round.

        A round is at most one prefill step and one call of decode steps. The call gives one token
        to each row that decodes, or up to `Limits.round_steps` tokens.

        Returns:
            The events of an earlier round, and the first tokens of this one. Up to two rounds stay
            in flight; later calls return their events.

        Raises:
            EngineBusyError: Another thread uses the engine, or a callback called it.
            SealError: The engine is strict, and something was compiled or allocated. This and any
                other error, including Ctrl-C, ends all rows, because the device may have advanced
                their states. The next `step` serves the requests that wait.
        """
        with self._exclusive("step"):
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
        """Serves all requests and returns their completions in the same order.

        A request that the engine can never serve is refused; the engine serves the others. A
        request without an id gets its index in the list as its id.

        Args:
            on_token: A function that the engine calls with each token as soon as it is known,
                except stop tokens.
            on_finish: A function that the engine calls when a request is done or refused.

        Raises:
            TypeError: `requests` is a single request, an element is not a request, or a callback
                is not callable.
            ValueError: Two requests have the same id.
            GenerationInterrupted: The user pressed Ctrl-C. The exception holds the results so far,
                and the engine stays usable.
            EngineBusyError: Another thread uses the engine, a callback called it, or requests from
                `add` are not done.
            SealError: The engine is strict, and something was compiled or allocated.
        """
        for name, call in (("on_token", on_token), ("on_finish", on_finish)):
            if call is not None and not callable(call):
                raise TypeError(f"generate: {name} must be callable, got {type(call).__name__}")
        with self._exclusive("generate"):
            if self.busy:
                raise EngineBusyError(
                    "generate: some added requests are not finished; call step() until the "
                    "engine is not busy"
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
        """Returns the log-probability of each token of some texts, given the tokens before it.

            [found] = engine.score([tokens])
            perplexity = math.exp(-sum(each.token for each in found[1:]) / len(found[1:]))

        Args:
            top: The number of most likely tokens to return with each token, 0 to 20.
            temperature, top_k, top_p, min_p: The parameters of the distribution, as in `Request`.
                By default it is the model's own. A token that `top_k`, `top_p` or `min_p` excludes
                has the log-probability -inf.
            starts: The length of each text's prompt. Decode steps replay the tokens after the
                prompt, so each one gets the same bits as when a row sampled it. Only an engine
                with `Limits(reproducible=True)` supports `starts`.

        Returns:
            A sequence for each text, with an entry per token. The entry of the first token is
            None, because no token precedes it; with `starts`, so are those of the whole prompt.
            `jaxattn.logprob_array` converts the result to an array.

        Raises:
            TypeError, ValueError: See `Request` and `generate`; or `starts` does not hold one
                number for each text, from 1 to its length.
            RuntimeError: The engine cannot serve a text, or its logits were not finite. The
                message names the text and the reason.
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
            return [each.prompt_logprobs for each in self._run_to_length("score", requests)]
        if not isinstance(starts, Iterable):
            raise TypeError(f"score: starts must be integers, one for each text; got {starts!r}")
        requests = _replays(list(prompts), list(starts), logprobs=top, **options)
        done = self._run_to_length("score", requests)
        return [(*(None,) * len(each.request.prompt), *each.logprobs) for each in done]

    def embed(
        self, prompts: Iterable[Sequence[int]], *, pooling: str = "last"
    ) -> Float[np.ndarray, "prompts hidden"]:
        """Returns embeddings of texts, pooled from the hidden states after the final norm.

            one, other = engine.embed([tokens, others], pooling="mean")
            similarity = one @ other / np.linalg.norm(one) / np.linalg.norm(other)

        Args:
            pooling: "mean" for the mean of all tokens, or "last" for the last token. The useful
                choice depends on how the model was trained.

        Returns:
            A float32 array with a row for each text, not normalized.

        Raises:
            TypeError, ValueError: See `Request` and `generate`.
            RuntimeError: The engine cannot serve a text, or its hidden states were not finite. The
                message names the text and the reason.
        """
        requests = [Request(each, max_tokens=0, pooling=pooling) for each in prompts]
        found = np.zeros((len(requests), *self.model.hidden_shape.shape), np.float32)
        for row, each in zip(found, self._run_to_length("embed", requests), strict=True):
            row[:] = each.embedding
        return found

    def _run_to_length(self, method_name: str, requests: list[Request]) -> list[Completion]:
        """Serves requests and raises RuntimeError unless each one ended by its length."""
        done = self.generate(requests)
        for place, each in enumerate(done):
            if each.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(
                    f"{method_name}: text {place}: {each.finish_reason}: {each.detail}"
                )
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
        """Runs one round of `generate`, and frees its events before it returns."""
        events = self._step()
        ended = [event for event in events if isinstance(event, FinishEvent)]
        for event in ended:  # before a callback can be interrupted
            done.setdefault(event.completion.request.id, event.completion)
        _run_callbacks(events, on_token, on_finish)

    def _interrupt(self, requests: list[Request], done: dict[int | None, Completion]) -> None:
        """Ends unfinished requests: rows with the tokens they have generated, others with none."""
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
    """Returns requests that replay the tokens after each text's prompt."""
    if len(starts) != len(texts):
        raise ValueError(f"score: starts has {len(starts)} numbers for {len(texts)} texts")
    for place, (text, start) in enumerate(zip(texts, starts, strict=True)):
        check_sizes("score", **{f"starts[{place}]": start})
        if start > len(text):
            raise ValueError(
                f"score: starts[{place}]={start} is after the end of the text of {len(text)} tokens"
            )
    return [
        Request(text[:start], max_tokens=len(text) - start, replay=text[start:], **options)
        for text, start in zip(texts, starts, strict=True)
    ]


def _run_callbacks(
    events: Sequence[Event], on_token: OnToken | None, on_finish: OnFinish | None
) -> None:
    """Calls the callbacks, in the order of the events."""
    for event in events:
        if type(event) is TokenEvent:  # most events; a round of 256 rows has up to 2,048
            if on_token:
                on_token(event[0], event[1])
        elif on_finish and isinstance(event, FinishEvent):
            on_finish(event.completion)
