"""The rows of one HTTP request: queued together, read as pieces of text, ended when they are left.

Tokens become text here, on the asyncio side. A piece is what a step of the engine added to a
choice's text: a token, or a few where the engine runs several decode steps per call. Where the
client reads slowly, it is what several steps added.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, Self

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
ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclasses.dataclass(frozen=True, slots=True)
class OutputChunk:
    """What came of a choice.

    Attributes:
        text: final; often empty, while a character or a stop string is incomplete.
        finish: "stop" or "length" in the last piece.
        stop: the string or token that ended it.
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
    embedding: Float[np.ndarray, "hidden"] | None = dataclasses.field(default=None, compare=False)


class ChoiceDetokenizer:
    """One row's text.

    Attributes:
        tokens: that were generated.
        done: whether its last piece was made.
        cached: tokens of its prompt that were not read again; known at its end.
    """

    def __init__(self, number: int, stream: TokenStream, stops: StopStrings):
        self.number, self.tokens, self.cached = number, 0, 0
        self.done = False
        self._stream, self._stops = stream, stops
        self._characters = 0

    def of_prompt(self, event: PromptEvent) -> OutputChunk:
        """The piece with what is told of the prompt."""
        chances = map(Chance, event.request.prompt, event.logprobs)
        return OutputChunk(self.number, "", prompt=tuple(chances))

    def push(self, event: TokenEvent) -> OutputChunk:
        """The piece of a token; the last one if it completes a stop string."""
        self.tokens += 1
        pushed, at = self._stream.push(event.token), self._characters
        self._characters += len(pushed)
        text, stop = self._stops.push(pushed)
        chances = () if event.logprobs is None else (Chance(event.token, event.logprobs, at),)
        self.done = stop is not None
        finish = "stop" if self.done else None
        return OutputChunk(self.number, text, finish, stop, chances, (event.token,))

    def end(self, completion: Completion) -> OutputChunk:
        """The last piece of a row that ended.

        Raises:
            ApiError: it did not end as it should.
        """
        self.done, self.cached = True, completion.cached_tokens
        finish = ENDS.get(completion.finish_reason)
        if finish is None:
            raise failure(completion)
        text, stop = self._stops.push(self._stream.end())
        if stop is not None:
            return OutputChunk(self.number, text, "stop", stop)
        text += self._stops.end()
        # Clients know stop strings and tokens, and none of the engine's own reasons.
        found = completion.detail if finish == "stop" else None
        found = found if isinstance(found, int) else None
        return OutputChunk(self.number, text, finish, found, embedding=completion.embedding)


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


class Generation:
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
        self._given: list[Sequence[Event]] = []
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
        stop_included: bool = False,
    ) -> Self:
        """A generation whose choices have streams and stop strings of their own."""
        choices = [
            ChoiceDetokenizer(number, stream(), StopStrings(stops, included=stop_included))
            for number in range(len(requests))
        ]
        return cls(requests, choices)

    def put(self, events: Sequence[Event]) -> None:
        """What a step gave for these rows."""
        if self._sink is not None and not self._given and self._sink.ready:
            if not any(isinstance(event, FinishEvent) for event in events):
                try:
                    self._sink.take(_joined(map(self._piece, events)))
                except Exception as error:  # of a bug: this answer fails, and no other
                    self._failure = error
                if not self.done and self._failure is None:
                    return
                events = ()  # their pieces have been taken
        self._given.append(events)
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
        found = [piece for events in given for piece in _joined(map(self._piece, events))]
        if sum(map(len, given)) <= PROMPT * len(self._choices):
            return found
        return _joined(found)

    def _piece(self, event: Event) -> OutputChunk | None:
        request = event.completion.request if isinstance(event, FinishEvent) else event.request
        choice = self._choices[request.id]
        if choice.done:  # at a stop string, and then its row ended
            if isinstance(event, FinishEvent):
                choice.cached = event.completion.cached_tokens
            return None
        if isinstance(event, FinishEvent):
            return choice.end(event.completion)
        if isinstance(event, PromptEvent):
            return choice.of_prompt(event)
        return choice.push(event)


def _joined(pieces: Iterable[OutputChunk | None]) -> list[OutputChunk]:
    """One piece of each choice."""
    made = [piece for piece in pieces if piece is not None]
    if len(made) == 1:
        return made
    found: dict[int, OutputChunk] = {}
    for piece in made:
        before = found.get(piece.choice)
        if before is not None:
            piece = dataclasses.replace(
                piece,
                text=before.text + piece.text,
                chances=before.chances + piece.chances,
                ids=before.ids + piece.ids,
                prompt=before.prompt + piece.prompt,
            )
        found[piece.choice] = piece
    return list(found.values())
