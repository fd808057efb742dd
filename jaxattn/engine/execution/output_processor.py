"""Conversion of the tokens from the device to events, and the end of rows that finish."""

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

NOT_FINITE = "the model's logits contained NaN or infinity"
Detokenize = Callable[[Sequence[int]], str]
# Makes a TokenEvent of (request, token, logprobs, version) in C; TokenEvent(...) runs Python code.
_TOKEN_EVENT: Callable[[tuple[Any, ...]], TokenEvent] = functools.partial(tuple.__new__, TokenEvent)


class OutputProcessor:
    """Converts the results of steps to events.

    Args:
        detokenize: A function from tokens to text, for requests with stop strings.

    Attributes:
        events: The events that no caller has received yet.
        clocks: The times of each unfinished request, by its id.
        stats: The statistics to which the processor adds.
        weights_version: The version of the weights that give the current results.
    """

    def __init__(self, scheduler: Scheduler, detokenize: Detokenize | None):
        self.scheduler, self.detokenize = scheduler, detokenize
        self.events: list[Event] = []
        self.clocks: dict[int, RequestTimes] = {}
        self.stats = GenerationStats()
        self.weights_version = 0

    def process_tokens(
        self, requests: Sequence[Request], texts: Sequence[list[int]], tokens: np.ndarray
    ) -> int:
        """Processes the tokens of steps in which no row ends and the host only passes tokens on.

        Args:
            texts: The generated tokens of each row, which the method extends.
            tokens: int32 [N, b], the tokens of N steps.

        Returns:
            The number of tokens.
        """
        for text, own in zip(texts, tokens.T.tolist(), strict=True):
            text.extend(own)
        # Loops in C, because a call for 256 rows has 2,048 tokens.
        same = itertools.repeat(None), itertools.repeat(self.weights_version)
        of_steps = zip(itertools.cycle(requests), tokens.ravel().tolist(), *same)
        self.events.extend(map(_TOKEN_EVENT, of_steps))
        return tokens.size

    def take(self, rows: Sequence[RunningRequest | None], lines: np.ndarray) -> int:
        """Processes the tokens of a step, a line for each row: int32 [b, n] from `advance`.

        Returns:
            The number of rows that got a token. Rows that have ended do not count, nor do rows
            that replay tokens after a preemption.
        """
        now, num_rows, announce = time.perf_counter(), 0, self.events.append
        tokens, ends, idle = lines[:, 0].tolist(), lines[:, 1].tolist(), int(FinishCode.IDLE)
        for line, (row, token, end) in enumerate(zip(rows, tokens, ends, strict=False)):
            if row is None or row.ended or end == idle:
                continue
            if row.num_silent and not end:
                row.num_silent -= 1
                self.stats.replayed_tokens += 1
                continue
            num_rows += 1
            if row.plain and row.tokens and not end:
                row.tokens.append(token)
                announce(TokenEvent(row.request, token, None, self.weights_version))
                continue
            chances = None
            if row.request.logprobs is not None:
                chances = Logprobs.of(lines[line, 2:], row.request.logprobs)
            self._accept(row, token, end, chances, now)
        return num_rows

    def process_prompt_logprobs(self, scores: Sequence[tuple[RunningRequest, np.ndarray]]) -> None:
        """Adds log-probabilities of prompt tokens; once a prompt is complete, adds its event."""
        for row, lines in scores:
            if row.ended:
                continue
            assert row.prompt_logprobs is not None
            told = row.prompt_logprobs = row.prompt_logprobs.behind(lines)
            if np.isnan(lines[:, 1].view(np.float32)).any():
                self.end(row, FinishReason.NOT_FINITE, NOT_FINITE)
            elif len(told) == len(row.request.prompt):
                self.events.append(PromptEvent(row.request, told, self.weights_version))

    def process_pooled_sums(self, sums: Sequence[tuple[RunningRequest, np.ndarray]]) -> None:
        """Adds the sums of hidden states of prompt tokens to their rows."""
        for row, sum_ in sums:
            if row.ended:
                continue
            row.pooled += sum_
            if not np.isfinite(sum_).all():
                self.end(row, FinishReason.NOT_FINITE, NOT_FINITE)

    def _accept(
        self, row: RunningRequest, token: int, end: int, logprobs: Logprobs | None, now: float
    ) -> None:
        """Adds a row's next token, which may end the row."""
        if end == FinishCode.NOT_FINITE:
            detail = NOT_FINITE
            if row.request.grammar is not None:
                detail += ", or the request's grammar allowed no token"
            self.end(row, FinishReason.NOT_FINITE, detail)
            return
        if not row.request.max_tokens:  # the sampled token is not part of the completion
            self.end(row, FinishReason.LENGTH, "max_tokens")
            return
        if end == FinishCode.STOP or (row.late_stops and token in row.request.stops):
            self.end(row, FinishReason.STOP, token)
            return
        row.tokens.append(token)
        if logprobs is not None:
            row.logprobs.append(logprobs)
        assert row.request.id is not None
        if len(row.tokens) == 1:
            self.clocks[row.request.id].first(now)
        self.events.append(TokenEvent(row.request, token, logprobs, self.weights_version))
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
        """Returns the stop string that the last token completed, or None."""
        if self.detokenize is None:
            return None
        # Even with one byte per token this many hold the longest stop string; 16 more leave room
        # for tokens without text.
        longest = max(len(text.encode()) for text in row.request.stop_strings)
        text = self.detokenize(row.tokens[-longest - 16 :])
        return next((stop for stop in row.request.stop_strings if stop in text), None)

    def end(
        self, row: RunningRequest, reason: FinishReason, detail: str | int | None = None
    ) -> None:
        """Frees a row and finishes its request."""
        if row.request.may_stop and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.scheduler.answers.ended(len(row.tokens))
        self.scheduler.release(row)
        self.finish(row.request, reason, detail, row)

    def end_rows(self, reason: FinishReason, detail: str | None = None) -> None:
        """Ends every row with the tokens that it has generated."""
        for row in self.scheduler.drop_rows():
            if row.request.id in self.clocks:
                self.finish(row.request, reason, detail, row)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        detail: str | int | None = None,
        source: RunningRequest | WaitingRequest | None = None,
    ) -> None:
        """Finishes a request, with the results so far of its row or of its place in the queue."""
        assert request.id is not None
        clock = self.clocks.pop(request.id)
        first, seconds = clock.read(time.perf_counter())
        version = self.weights_version
        done = Completion(request, (), reason, detail, first, seconds, weights_version=version)
        if source is not None:
            queued = (
                None
                if source.admission_time is None
                else source.admission_time - clock.arrival_time
            )
            self.stats.queued_seconds += queued or 0.0
            self.stats.cached_tokens += source.cached_tokens
            done = dataclasses.replace(
                done,
                tokens=tuple(source.tokens),
                logprobs=tuple(source.logprobs),
                prompt_logprobs=source.prompt_logprobs or (),
                cached_tokens=source.cached_tokens,
                seconds_queued=queued,
                embedding=source.embedding,
                older_tokens=source.older_tokens,
            )
        self.events.append(FinishEvent(done))

    def clear(self) -> None:
        """Drops all events and requests."""
        self.events.clear()
        self.clocks.clear()
