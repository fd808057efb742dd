"""Events from tokens that the device returned, and the end of rows that finish with them."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxattn.engine.requests.outputs import (
    Completion,
    Event,
    FinishEvent,
    FinishReason,
    Logprobs,
    PromptEvent,
    TokenEvent,
)
from jaxattn.engine.requests.request import Request
from jaxattn.engine.requests.stats import GenerationStats, RequestTimes
from jaxattn.engine.scheduling.request_state import RunningRequest, WaitingRequest
from jaxattn.engine.scheduling.scheduler import Scheduler
from jaxattn.engine.steps.token_selection import FinishCode

NOT_FINITE = "the model's logits held NaN or infinity"
Detokenize = Callable[[Sequence[int]], str]
# Makes one of (request, token, logprobs, version) in C; TokenEvent(...) would run Python.
_TOKEN_EVENT: Callable[[tuple[Any, ...]], TokenEvent] = functools.partial(tuple.__new__, TokenEvent)


class OutputProcessor:
    """Takes what steps told, and makes events of it.

    Args:
        detokenize: tokens to text, for requests with stop strings.

    Attributes:
        events: that nobody has seen yet.
        clocks: of each request that is not done, by its id.
        stats: what it counts in.
        weights_version: of the weights that gave what it takes.
    """

    def __init__(self, scheduler: Scheduler, detokenize: Detokenize | None):
        self.scheduler, self.detokenize = scheduler, detokenize
        self.events: list[Event] = []
        self.clocks: dict[int, RequestTimes] = {}
        self.stats = GenerationStats()
        self.weights_version = 0

    def take_plain(
        self, requests: Sequence[Request], texts: Sequence[list[int]], tokens: np.ndarray
    ) -> int:
        """Takes the tokens of steps in which no row ends, and which the host only hands on.

        Args:
            texts: what each row has generated.
            tokens: int32 [N, b], of N steps.

        Returns:
            How many there are.
        """
        for text, own in zip(texts, tokens.T.tolist(), strict=True):
            text.extend(own)
        # By loops in C: 256 rows have 2,048 tokens in a call.
        same = itertools.repeat(None), itertools.repeat(self.weights_version)
        of_steps = zip(itertools.cycle(requests), tokens.ravel().tolist(), *same)
        self.events.extend(map(_TOKEN_EVENT, of_steps))
        return tokens.size

    def take(self, rows: Sequence[RunningRequest | None], lines: np.ndarray) -> int:
        """The tokens of a step, a line for each row: int32 [b, n] of `advance`.

        Returns:
            How many rows it told of. One that had ended is none of them, nor one that decodes
            again what it said before.
        """
        now, taken, announce = time.perf_counter(), 0, self.events.append
        tokens, ends, idle = lines[:, 0].tolist(), lines[:, 1].tolist(), int(FinishCode.IDLE)
        for line, (row, token, end) in enumerate(zip(rows, tokens, ends, strict=False)):
            if row is None or row.ended or end == idle:
                continue
            if row.silent and not end:
                row.silent -= 1
                self.stats.replayed_tokens += 1
                continue
            taken += 1
            if row.plain and row.tokens and not end:
                row.tokens.append(token)
                announce(TokenEvent(row.request, token, None, self.weights_version))
                continue
            chances = None
            if row.request.logprobs is not None:
                chances = Logprobs.of(lines[line, 2:], row.request.logprobs)
            self._accept(row, token, end, chances, now)
        return taken

    def take_scores(self, found: Sequence[tuple[RunningRequest, np.ndarray]]) -> None:
        """Log-probabilities of rows' next prompt tokens; all of a prompt's are announced."""
        for row, lines in found:
            if row.ended:
                continue
            assert row.prompt_logprobs is not None
            told = row.prompt_logprobs = row.prompt_logprobs.behind(lines)
            if np.isnan(lines[:, 1].view(np.float32)).any():
                self.end(row, FinishReason.NOT_FINITE, NOT_FINITE)
            elif len(told) == len(row.request.prompt):
                self.events.append(PromptEvent(row.request, told, self.weights_version))

    def take_sums(self, found: Sequence[tuple[RunningRequest, np.ndarray]]) -> None:
        """Sums of hidden states of rows' next prompt tokens."""
        for row, sum_ in found:
            if row.ended:
                continue
            row.pooled += sum_
            if not np.isfinite(sum_).all():
                self.end(row, FinishReason.NOT_FINITE, NOT_FINITE)

    def _accept(
        self, row: RunningRequest, token: int, end: int, chances: Logprobs | None, now: float
    ) -> None:
        """A row's next token; it may be the last."""
        if end == FinishCode.NOT_FINITE:
            detail = NOT_FINITE
            if row.request.grammar is not None:
                detail += ", or its grammar allowed no token"
            self.end(row, FinishReason.NOT_FINITE, detail)
            return
        if not row.request.max_tokens:  # what was sampled behind the prompt is no part of it
            self.end(row, FinishReason.LENGTH, "max_tokens")
            return
        if end == FinishCode.STOP or (row.late_stops and token in row.request.stops):
            self.end(row, FinishReason.STOP, token)
            return
        row.tokens.append(token)
        if chances is not None:
            row.logprobs.append(chances)
        assert row.request.id is not None
        if len(row.tokens) == 1:
            self.clocks[row.request.id].first(now)
        self.events.append(TokenEvent(row.request, token, chances, self.weights_version))
        grammar = row.request.grammar
        if grammar is not None and not grammar.accept(token):
            self.end(row, FinishReason.STOP, "grammar")
        elif row.request.stop_strings and (text := self._stop_string(row)):
            self.end(row, FinishReason.STOP, text)
        elif row.request.ends_at is not None and row.request.ends_at(token):
            self.end(row, FinishReason.STOP, "ends_at")
        elif end == FinishCode.LENGTH:
            cut = row.max_tokens < row.request.max_tokens
            self.end(row, FinishReason.LENGTH, "max_model_len" if cut else "max_tokens")

    def _stop_string(self, row: RunningRequest) -> str | None:
        """The stop string that the last token completed."""
        if self.detokenize is None:
            return None
        # Of one byte each, so many tokens hold the longest of them; others give no text at all.
        longest = max(len(text.encode()) for text in row.request.stop_strings)
        text = self.detokenize(row.tokens[-longest - 16 :])
        return next((stop for stop in row.request.stop_strings if stop in text), None)

    def end(
        self, row: RunningRequest, reason: FinishReason, detail: str | int | None = None
    ) -> None:
        """Frees a row; its request is done."""
        if row.request.may_stop and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.scheduler.answers.ended(len(row.tokens))
        self.scheduler.release(row)
        self.finish(row.request, reason, detail, row)

    def end_rows(self, reason: FinishReason, detail: str | None = None) -> None:
        """Ends every row with what it generated."""
        for row in self.scheduler.drop_rows():
            if row.request.id in self.clocks:
                self.finish(row.request, reason, detail, row)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        detail: str | int | None = None,
        of: RunningRequest | WaitingRequest | None = None,
    ) -> None:
        """A request is done, with what a row of it, or its place in the queue, has generated."""
        assert request.id is not None
        clock = self.clocks.pop(request.id)
        first, seconds = clock.read(time.perf_counter())
        version = self.weights_version
        done = Completion(request, (), reason, detail, first, seconds, weights_version=version)
        if of is not None:
            queued = None if of.admitted is None else of.admitted - clock.added
            self.stats.queued_seconds += queued or 0.0
            self.stats.cached_tokens += of.cached_tokens
            done = dataclasses.replace(
                done,
                tokens=tuple(of.tokens),
                logprobs=tuple(of.logprobs),
                prompt_logprobs=of.prompt_logprobs or (),
                cached_tokens=of.cached_tokens,
                seconds_queued=queued,
                embedding=of.embedding,
                older_tokens=of.older_tokens,
            )
        self.events.append(FinishEvent(done))

    def clear(self) -> None:
        """Forgets events and requests."""
        self.events.clear()
        self.clocks.clear()
