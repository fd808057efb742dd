"""The collector of one HTTP request's outputs, which turns tokens into chunks of text.

It runs in the asyncio thread. A chunk contains the text that an engine step added to a choice: one
token, or a few if the engine runs several decode steps per call. For a client that reads slowly,
a chunk covers several steps.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from jaxtyping import Float

from jaxattn.engine.requests.outputs import (
    Completion,
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    TokenEvent,
)
from jaxattn.engine.requests.request import Request
from jaxattn.server.decoding.grammars.grammar_matcher import GrammarMatcher
from jaxattn.server.decoding.logprobs import Chance
from jaxattn.server.decoding.stop_strings import StopStrings
from jaxattn.server.decoding.token_rules import TokenRules
from jaxattn.server.http.errors import ApiError
from jaxattn.text import TokenStream

PROMPT = 16  # up to so many events per choice, `pieces` returns a chunk for each step
type RowEvents = tuple[int, Sequence[Event]]  # a request's id, and its row's events of a step
ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class OutputChunk(NamedTuple):
    """New output of a choice.

    This is a tuple because each row needs one per step, and a dataclass takes three times as long
    to create.

    Attributes:
        choice: The choice's number.
        text: The new final text. It may be empty while a character or stop string is incomplete.
        finish: The finish reason, "stop" or "length", in the last chunk; otherwise None.
        stop: The request's stop string or stop token that ended the choice. None if it ended for
            another reason, such as the model's own stop token.
        logprobs: The tokens' log-probabilities, if requested. `Chance.offset` counts from the
            beginning of the choice's text.
        ids: The ids of the new tokens.
        prompt: The prompt tokens' log-probabilities, if requested. Their offsets are 0.
        embedding: The prompt's embedding, if requested.
    """

    choice: int
    text: str
    finish: str | None = None
    stop: str | int | None = None
    logprobs: tuple[Chance, ...] = ()
    ids: tuple[int, ...] = ()
    prompt: tuple[Chance, ...] = ()
    embedding: Float[np.ndarray, "hidden"] | None = None


class ChoiceDetokenizer:
    """The incremental detokenizer of one row.

    Args:
        number: The choice's number.
        stream: The tokenizer's detokenizer of this text.
        stops: The stop strings; None if there are none.
        stop_tokens: The request's stop tokens.

    Attributes:
        tokens: The number of generated tokens.
        done: Whether `take` has returned the last chunk.
        cached: The number of prompt tokens from the prefix cache, known when the row has ended.
    """

    def __init__(
        self,
        number: int,
        stream: TokenStream,
        stops: StopStrings | None,
        stop_tokens: Sequence[int] = (),
    ):
        self.number, self.tokens, self.cached = number, 0, 0
        self.done = False
        self._stream, self._stops, self._stop_tokens = stream, stops, stop_tokens
        self._characters = 0

    def take(self, events: Sequence[Event]) -> OutputChunk | None:
        """Returns the chunk of a row's events; None if the row is done, or the chunk is empty.

        Raises:
            ApiError: If the row failed or was aborted.
        """
        if self._stops is None and not self.done and _plain(events[0]) and _plain(events[-1]):
            tokens = tuple([event.token for event in events])  # type: ignore[union-attr]
            self.tokens += len(tokens)
            return OutputChunk(self.number, self._stream.push(*tokens), ids=tokens)
        text, ids, token_logprobs = list[str](), list[int](), list[Chance]()
        chunk_fields: dict[str, Any] = {}
        for event in events:
            if self.done:  # the text ended at a stop string before the row's finish event
                if isinstance(event, FinishEvent):
                    self.cached = event.completion.cached_tokens
                continue
            if type(event) is TokenEvent:
                token, logprobs = event[1], event[2]
                self.tokens += 1
                pushed = self._stream.push(token)
                if logprobs is not None:
                    token_logprobs.append(Chance(token, logprobs, self._characters))
                    self._characters += len(pushed)
                ids.append(token)
                if self._stops is not None:
                    pushed, stop = self._stops.push(pushed)
                    if stop is not None:
                        self.done = True
                        chunk_fields |= {"finish": "stop", "stop": stop}
                text.append(pushed)
            elif isinstance(event, FinishEvent):
                chunk_fields |= self._ended(event.completion, text)
            elif isinstance(event, PromptEvent):
                prompt_logprobs = map(Chance, event.request.prompt, event.logprobs)
                chunk_fields["prompt"] = tuple(prompt_logprobs)
        if not (ids or chunk_fields):
            return None
        return OutputChunk(
            self.number,
            "".join(text),
            logprobs=tuple(token_logprobs),
            ids=tuple(ids),
            **chunk_fields,
        )

    def _ended(self, completion: Completion, text: list[str]) -> dict[str, Any]:
        """Appends the rest of the text, and returns the chunk's fields of the row's end."""
        self.done, self.cached = True, completion.cached_tokens
        finish = ENDS.get(completion.finish_reason)
        if finish is None:
            raise failure(completion)
        rest = self._stream.end()
        if self._stops is not None:
            rest, stop = self._stops.push(rest)
            if stop is not None:
                text.append(rest)
                return {"finish": "stop", "stop": stop}
            rest += self._stops.end()
        text.append(rest)
        # Other details do not name a stop token.
        is_request_stop = completion.detail in self._stop_tokens
        stop_token = completion.detail if is_request_stop else None
        return {"finish": finish, "stop": stop_token, "embedding": completion.embedding}


def _plain(event: Event) -> bool:
    """Whether an event is a token without log-probabilities. All events between two such events
    are, too."""
    return type(event) is TokenEvent and event.logprobs is None


def failure(completion: Completion) -> ApiError:
    """Returns the error of a row that failed, was refused or was aborted."""
    grammar = completion.request.grammar
    if isinstance(grammar, GrammarMatcher | TokenRules) and (error := grammar.error):
        return error
    match completion.finish_reason:
        case FinishReason.REFUSED:
            return ApiError(400, str(completion.detail), code="request_refused")
        case FinishReason.ABORTED | FinishReason.INTERRUPTED:
            return ApiError(
                503, "the server is shutting down; the answer is incomplete", code="draining"
            )
        case FinishReason.NOT_FINITE:
            return ApiError(500, f"{completion.detail}", code="not_finite")
    return ApiError(500, "the engine failed; the answer is incomplete", code="engine_error")


class PieceSink(Protocol):
    """The interface of a sink that receives a step's chunks immediately, without waking a task."""

    @property
    def ready(self) -> bool:
        """Whether the sink can take chunks now."""

    def take(self, pieces: Sequence[OutputChunk]) -> None: ...


class OutputCollector:
    """The engine requests of one HTTP request, and their output.

    Args:
        requests: One request per choice, in the choices' order.
        choices: The detokenizer of each choice.
    """

    def __init__(self, requests: Sequence[Request], choices: Sequence[ChoiceDetokenizer]):
        self.requests = requests
        self._choices: Mapping[int | None, ChoiceDetokenizer] = {
            request.id: choice for request, choice in zip(requests, choices, strict=True)
        }
        self._pending: list[Sequence[RowEvents]] = []
        self._sink: PieceSink | None = None
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        stream: Callable[[], TokenStream],
        stops: Sequence[str],
        *,
        stop_tokens: Sequence[int] = (),
        stop_included: bool = False,
    ) -> Self:
        """Returns a collector with one detokenizer and one stop-string filter per choice."""
        choices = [
            ChoiceDetokenizer(
                number,
                stream(),
                StopStrings(stops, included=stop_included) if stops else None,
                stop_tokens,
            )
            for number in range(len(requests))
        ]
        return cls(requests, choices)

    def put(self, rows: Sequence[RowEvents]) -> None:
        """Adds a step's events, for `pieces` or directly for a ready sink. A row's end is always
        for `pieces`."""
        sink = self._sink
        ends = [own for _, own in rows if type(own[-1]) is FinishEvent]
        if sink is not None and not ends and not self._pending and sink.ready:
            try:
                pieces = self._pieces(rows)
                sink.take(pieces)
                if not [piece for piece in pieces if piece.finish is not None]:
                    return
            except Exception as error:  # a bug here fails only this answer
                self._failure = error
            rows = ()  # the sink has their chunks
        self._pending.append(rows)
        self._arrived.set()

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self._choices.values())

    @property
    def tokens(self) -> int:
        """The number of generated tokens of all choices."""
        return sum(choice.tokens for choice in self._choices.values())

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens of all choices. Each choice counts its prompt."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def cached(self) -> int:
        """The number of prompt tokens from the prefix cache, of all choices that have ended."""
        return sum(choice.cached for choice in self._choices.values())

    @property
    def open(self) -> list[int]:
        """The ids of the rows that are not done."""
        return [id for id, choice in self._choices.items() if id is not None and not choice.done]

    async def pieces(
        self, seconds: float | None, sink: PieceSink | None = None
    ) -> list[OutputChunk]:
        """Waits for output, and returns the chunks since the last call, one per choice and step.

        If much output has accumulated, as for a slow client, it returns one chunk per choice.

        Args:
            seconds: The time limit, after which the list is empty; None waits without a limit.
            sink: Takes chunks during the wait, until a row ends.

        Raises:
            ApiError: If a row failed or was aborted.
        """
        if not self._pending:
            self._arrived.clear()
            self._sink = sink
            try:
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return []
            finally:
                self._sink = None
        if self._failure is not None:
            raise self._failure
        pending, self._pending = self._pending, []
        if sum(len(row_events) for rows in pending for _, row_events in rows) <= PROMPT * len(
            self._choices
        ):
            return [piece for rows in pending for piece in self._pieces(rows)]
        joined: dict[int, list[Event]] = {}
        for rows in pending:
            for id, own in rows:
                joined.setdefault(id, []).extend(own)
        return self._pieces(list(joined.items()))

    def _pieces(self, rows: Sequence[RowEvents]) -> list[OutputChunk]:
        """Returns the chunks of the rows' events."""
        made = [self._choices[id].take(own) for id, own in rows]
        return [piece for piece in made if piece is not None]
