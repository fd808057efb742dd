"""The interface of the classes that turn an answer's pieces into the JSON of an API.

Responses and Messages represent an answer as a list of parts: reasoning, texts and tool calls.
`PartsForm` is their common base class.
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
    """The token counts of an answer.

    Attributes:
        prompt: The tokens of all prompts, each counted once however many choices it has.
        cached: The prompt tokens from the prefix cache, as the mean over the choices.
        generated: The generated tokens of all choices.
    """

    prompt: int
    cached: int
    generated: int

    @classmethod
    def of(cls, prompt: int, collector: OutputCollector) -> "TokenUsage":
        """Returns the counts of a collector so far. `cached` is known once the rows have ended."""
        cached = collector.cached * prompt // collector.prompt_tokens
        return cls(prompt, cached, collector.tokens)


class WholeForm(abc.ABC):
    """The state of a response without streaming: call `take` for every piece, then `whole`."""

    @abc.abstractmethod
    def take(self, piece: OutputChunk) -> None:
        """Adds a piece of the answer."""

    @abc.abstractmethod
    def whole(self, collector: OutputCollector) -> dict[str, Any]:
        """Returns the response, made of all pieces taken."""


class AnswerForm(WholeForm):
    """The state of a response that can also be streamed: call `begin`, then `stream` for the pieces
    as they arrive, then `end`."""

    def begin(self) -> bytes:
        """Returns the events before the first piece."""
        return b""

    @abc.abstractmethod
    def stream(self, pieces: Sequence[OutputChunk], collector: OutputCollector) -> bytes:
        """Returns the events of some pieces."""

    @abc.abstractmethod
    def end(self, collector: OutputCollector) -> bytes:
        """Returns the last events of the stream."""


class PartsForm(AnswerForm):
    """The base class of responses with a list of parts, and of the events that create these parts.

    Args:
        prompt_tokens: The number of tokens of the conversation.
        parser: The parser of the answer's text.

    Attributes:
        thoughts: The API's name for a part with reasoning.
        content: The API's name for a part with text.
        parts: The parts so far. The subclass decides whether this includes the open part.
        kind: The kind of the open part, `thoughts` or `content`; None if no part is open.
        last: The last piece; None until it arrives.
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
        """Begins a part of reasoning or text, and returns its events."""

    @abc.abstractmethod
    def text(self, text: str) -> dict[str, Any]:
        """Adds text to the open part, and returns the event."""

    @abc.abstractmethod
    def closed(self, kind: str, *, cut: bool) -> Events:
        """Ends the open part, and returns its events.

        Args:
            cut: Whether the part ends because the answer has reached its maximum length.
        """

    @abc.abstractmethod
    def call(self, call: ToolCall) -> Events:
        """Adds a complete tool call, and returns its events."""

    @property
    def cut(self) -> bool:
        """Whether the answer ended because it reached its maximum length."""
        return self.last is not None and self.last.finish == "length"

    def usage(self, collector: OutputCollector) -> TokenUsage:
        """Returns the token counts so far."""
        return TokenUsage.of(self._prompt_tokens, collector)

    def take(self, piece: OutputChunk) -> None:
        self.added(piece)

    def stream(self, pieces: Sequence[OutputChunk], collector: OutputCollector) -> bytes:
        return self.written([event for piece in pieces for event in self.added(piece)])

    def written(self, events: Events) -> bytes:
        """Returns the encoded events."""
        return named_events(events)

    def added(self, piece: OutputChunk) -> Events:
        """Adds a piece to the answer, and returns its events."""
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
        """Ends the answer after the text of the last piece, and returns the events."""
        return self._switched(None, cut=self.cut)

    def _switched(self, kind: str | None, *, cut: bool = False) -> Events:
        """Ends the open part and begins one of another kind. None begins no part."""
        if kind == self.kind:
            return []
        before, self.kind = self.kind, kind
        found = [] if before is None else self.closed(before, cut=cut)
        return found if kind is None else found + self.opened(kind)
