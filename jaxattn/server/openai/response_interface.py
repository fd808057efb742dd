"""The interface between an answer's pieces and the JSON that one API writes for them.

Responses and Messages write an answer as a list of parts: thoughts, texts and calls. `PartsForm` is
what both have in common.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxattn.server.decoding.message_events import MessageParser, ReasoningDelta, ToolCall
from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.http.event_stream import named_events

type Events = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of an answer.

    Attributes:
        prompt: of each prompt once, however many answers it has.
        cached: of the prompts, that were found in the cache of prefixes; a mean over choices.
        generated: of all choices.
    """

    prompt: int
    cached: int
    generated: int

    @classmethod
    def of(cls, prompt: int, generation: OutputCollector) -> "TokenUsage":
        """What a generation has used so far; `cached` is known when a row has ended."""
        cached = generation.cached * prompt // generation.prompt_tokens
        return cls(prompt, cached, generation.tokens)


class WholeForm(abc.ABC):
    """The state of one answer in one piece: `take` for all pieces, then `whole`."""

    @abc.abstractmethod
    def take(self, piece: OutputChunk) -> None:
        """Keeps a piece of an answer in one piece."""

    @abc.abstractmethod
    def whole(self, generation: OutputCollector) -> dict[str, Any]:
        """The answer in one piece, of what was taken."""


class AnswerForm(WholeForm):
    """The state of one answer on its way to the client, whole or as a stream: `begin`, `stream` for
    the pieces as they come, then `end`."""

    def begin(self) -> bytes:
        """The events before the first piece."""
        return b""

    @abc.abstractmethod
    def stream(self, pieces: Sequence[OutputChunk], generation: OutputCollector) -> bytes:
        """The events that pieces become."""

    @abc.abstractmethod
    def end(self, generation: OutputCollector) -> bytes:
        """The last events of a stream."""


class PartsForm(AnswerForm):
    """An answer as a list of parts, and a stream of the events that make them.

    Args:
        prompt_tokens: of the conversation.
        parser: of the answer's text.

    Attributes:
        thoughts: the kind of a part of thoughts, in this API's own word.
        content: the kind of a part of text.
        parts: those that have begun, or those that are complete.
        kind: of the part of text that is open; None where none is.
        last: the last piece, when it has come.
    """

    thoughts: str
    content: str

    def __init__(self, prompt_tokens: int, parser: MessageParser):
        self._prompt_tokens, self._parser = prompt_tokens, parser
        self.parts: Events = []
        self.kind: str | None = None
        self.last: OutputChunk | None = None

    @abc.abstractmethod
    def opened(self, kind: str) -> Events:
        """Begins a part of text."""

    @abc.abstractmethod
    def text(self, text: str) -> dict[str, Any]:
        """Adds a text to the open part."""

    @abc.abstractmethod
    def closed(self, kind: str, *, cut: bool) -> Events:
        """Ends the open part.

        Args:
            cut: the answer ends there, since it is as long as it may be.
        """

    @abc.abstractmethod
    def call(self, call: ToolCall) -> Events:
        """Adds a call, which comes whole."""

    @property
    def cut(self) -> bool:
        """Whether the answer's length ended it."""
        return self.last is not None and self.last.finish == "length"

    def usage(self, generation: OutputCollector) -> TokenUsage:
        """The tokens so far."""
        return TokenUsage.of(self._prompt_tokens, generation)

    def take(self, piece: OutputChunk) -> None:
        self.added(piece)

    def stream(self, pieces: Sequence[OutputChunk], generation: OutputCollector) -> bytes:
        return self.written([event for piece in pieces for event in self.added(piece)])

    def written(self, events: Events) -> bytes:
        """The bytes of events."""
        return named_events(events)

    def added(self, piece: OutputChunk) -> Events:
        """What a piece adds to the answer."""
        found: Events = []
        events = self._parser.feed(piece.text)
        if piece.finish is not None:
            events, self.last = [*events, *self._parser.finish()], piece
        for event in events:
            if isinstance(event, ToolCall):
                found += self._switched(None) + self.call(event)
                continue
            kind = self.thoughts if isinstance(event, ReasoningDelta) else self.content
            found += self._switched(kind)
            found.append(self.text(event.text))
        return found if piece.finish is None else found + self.ended(piece)

    def ended(self, piece: OutputChunk) -> Events:
        """What ends the answer, after the text of the last piece."""
        return self._switched(None, cut=self.cut)

    def _switched(self, kind: str | None, *, cut: bool = False) -> Events:
        """Ends the open part and begins one of another kind."""
        if kind == self.kind:
            return []
        before, self.kind = self.kind, kind
        found = [] if before is None else self.closed(before, cut=cut)
        return found if kind is None else found + self.opened(kind)
