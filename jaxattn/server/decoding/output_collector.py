"""The rows of one HTTP request: queued together, read as pieces of text, ended when they are left.

Tokens become text here, on the asyncio side. A piece is what a step of the engine added to a
choice's text: a token, or a few where the engine runs several decode steps per call. Where the
client reads slowly, it is what several steps added.
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
from jaxattn.server.decoding.logprobs import Chance
from jaxattn.server.decoding.stop_strings import StopStrings
from jaxattn.server.decoding.structured_outputs import GrammarMatcher
from jaxattn.server.decoding.token_rules import TokenRules
from jaxattn.server.http.errors import ApiError
from jaxattn.text import TokenStream

PROMPT = 16  # events of a choice that a client who reads at once may find
type RowEvents = tuple[int, Sequence[Event]]  # a request's id, and what a step gave for its row
ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class OutputChunk(NamedTuple):
    """What came of a choice.

    A tuple, since it is made in a third of a dataclass's time, for each row in each step.

    Attributes:
        text: final; often empty, while a character or a stop string is incomplete.
        finish: "stop" or "length" in the last piece.
        stop: the request's stop string or stop token that ended it; None where something else did,
            such as the model's own stop token.
        chances: of its tokens, if the request asked for them; `Chance.offset` counts from the
            beginning of the choice's own text.
        ids: its tokens.
        prompt: of the prompt's, if the request asked for them; their offsets are 0.
        embedding: of the prompt, if the request asked for it.
    """

    choice: int
    text: str
    finish: str | None = None
    stop: str | int | None = None
    chances: tuple[Chance, ...] = ()
    ids: tuple[int, ...] = ()
    prompt: tuple[Chance, ...] = ()
    embedding: Float[np.ndarray, "hidden"] | None = None


class ChoiceDetokenizer:
    """One row's text.

    Args:
        stops: that cut it; None where there are none.
        stop_tokens: of the request.

    Attributes:
        tokens: that were generated.
        done: whether its last piece was made.
        cached: tokens of its prompt that were not read again; known at its end.
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
        """The piece of what the row gave; None where it is done already, or gave nothing.

        Raises:
            ApiError: it did not end as it should.
        """
        if self._stops is None and not self.done and _plain(events[0]) and _plain(events[-1]):
            tokens = tuple([event.token for event in events])  # type: ignore[union-attr]
            self.tokens += len(tokens)
            return OutputChunk(self.number, self._stream.push(*tokens), ids=tokens)
        text, ids, chances = list[str](), list[int](), list[Chance]()
        more: dict[str, Any] = {}
        for event in events:
            if self.done:  # at a stop string, and then its row ended
                if isinstance(event, FinishEvent):
                    self.cached = event.completion.cached_tokens
                continue
            if type(event) is TokenEvent:
                token, logprobs = event[1], event[2]
                self.tokens += 1
                pushed = self._stream.push(token)
                if logprobs is not None:
                    chances.append(Chance(token, logprobs, self._characters))
                    self._characters += len(pushed)
                ids.append(token)
                if self._stops is not None:
                    pushed, stop = self._stops.push(pushed)
                    if stop is not None:
                        self.done, more = True, more | {"finish": "stop", "stop": stop}
                text.append(pushed)
            elif isinstance(event, FinishEvent):
                more |= self._ended(event.completion, text)
            elif isinstance(event, PromptEvent):
                told = map(Chance, event.request.prompt, event.logprobs)
                more["prompt"] = tuple(told)
        if not (ids or more):
            return None
        return OutputChunk(
            self.number, "".join(text), chances=tuple(chances), ids=tuple(ids), **more
        )

    def _ended(self, completion: Completion, text: list[str]) -> dict[str, Any]:
        """How a row ended, after the rest of its text."""
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
        asked = completion.detail in self._stop_tokens  # the engine's own reasons are none
        found = completion.detail if asked else None
        return {"finish": finish, "stop": found, "embedding": completion.embedding}


def _plain(event: Event) -> bool:
    """Whether an event is a token alone. What stands between two such events is so too."""
    return type(event) is TokenEvent and event.logprobs is None


def failure(completion: Completion) -> ApiError:
    """The error of a row that was not served to its end."""
    grammar = completion.request.grammar
    if isinstance(grammar, GrammarMatcher | TokenRules) and (error := grammar.error):
        return error
    match completion.finish_reason:
        case FinishReason.REFUSED:
            return ApiError(400, str(completion.detail), code="request_refused")
        case FinishReason.ABORTED | FinishReason.INTERRUPTED:
            return ApiError(503, "the server is shutting down; the answer is cut", code="draining")
        case FinishReason.NOT_FINITE:
            return ApiError(500, f"{completion.detail}", code="not_finite")
    return ApiError(500, "the engine failed; the answer is cut", code="engine_error")


class PieceSink(Protocol):
    """Takes the pieces of a step where they are made, without a task's wake-up."""

    @property
    def ready(self) -> bool:
        """Whether it can take some now."""

    def take(self, pieces: Sequence[OutputChunk]) -> None: ...


class OutputCollector:
    """Rows of the engine, and their text.

    Args:
        requests: one for each choice, in their order.
        choices: their texts.
    """

    def __init__(self, requests: Sequence[Request], choices: Sequence[ChoiceDetokenizer]):
        self.requests = requests
        self._choices: Mapping[int | None, ChoiceDetokenizer] = {
            request.id: choice for request, choice in zip(requests, choices, strict=True)
        }
        self._given: list[Sequence[RowEvents]] = []
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
        """A collector whose choices have streams and stop strings of their own."""
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
        """What a step gave for these rows."""
        sink = self._sink
        ends = [own for _, own in rows if type(own[-1]) is FinishEvent]
        if sink is not None and not ends and not self._given and sink.ready:
            try:
                pieces = self._pieces(rows)
                sink.take(pieces)
                if not [piece for piece in pieces if piece.finish is not None]:
                    return
            except Exception as error:  # of a bug: this answer fails, and no other
                self._failure = error
            rows = ()  # their pieces have been taken
        self._given.append(rows)
        self._arrived.set()

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self._choices.values())

    @property
    def tokens(self) -> int:
        """Generated, of all choices."""
        return sum(choice.tokens for choice in self._choices.values())

    @property
    def prompt_tokens(self) -> int:
        """Of all choices: each reads the prompt."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def cached(self) -> int:
        """Tokens of the prompts that were not read again, of all choices that have ended."""
        return sum(choice.cached for choice in self._choices.values())

    @property
    def open(self) -> list[int]:
        """The ids of rows whose end has not been read."""
        return [id for id, choice in self._choices.items() if id is not None and not choice.done]

    async def pieces(
        self, seconds: float | None, sink: PieceSink | None = None
    ) -> list[OutputChunk]:
        """What has come since the last call, a piece of each choice for each step; none after
        `seconds`.

        A client that reads slowly gets what has come for a choice in one piece.

        Args:
            sink: takes pieces in the meantime, until a row ends.

        Raises:
            ApiError: a row did not end as it should.
        """
        if not self._given:
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
        given, self._given = self._given, []
        if sum(len(own) for rows in given for _, own in rows) <= PROMPT * len(self._choices):
            return [piece for rows in given for piece in self._pieces(rows)]
        joined: dict[int, list[Event]] = {}
        for rows in given:
            for id, own in rows:
                joined.setdefault(id, []).extend(own)
        return self._pieces(list(joined.items()))

    def _pieces(self, rows: Sequence[RowEvents]) -> list[OutputChunk]:
        """A piece of each row."""
        made = [self._choices[id].take(own) for id, own in rows]
        return [piece for piece in made if piece is not None]
