"""The base class of responses that represent an answer as a list of parts.

Responses and Messages have three kinds of parts: reasoning, texts and tool calls.
"""

import abc
from collections.abc import Sequence
from typing import Any

from jaxattn.server.decoding.message_events import MessageParser, ReasoningDelta, ToolCall
from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.http.event_stream import named_events
from jaxattn.server.openai.response_interface import AnswerForm, TokenUsage

type Events = list[dict[str, Any]]


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
        last_chunk: The last piece; None until it arrives.
    """

    thoughts: str
    content: str

    def __init__(self, prompt_tokens: int, parser: MessageParser):
        self._prompt_tokens, self._parser = prompt_tokens, parser
        self.parts: Events = []
        self.kind: str | None = None
        self.last_chunk: OutputChunk | None = None

    @abc.abstractmethod
    def opened(self, kind: str) -> Events:
        """Begins a part of reasoning or text, and returns its events."""

    @abc.abstractmethod
    def text(self, text: str) -> dict[str, Any]:
        """Adds text to the open part, and returns the event."""

    @abc.abstractmethod
    def closed(self, kind: str, *, truncated: bool) -> Events:
        """Ends the open part, and returns its events.

        Args:
            truncated: Whether the part ends because the answer has reached its maximum length.
        """

    @abc.abstractmethod
    def call(self, call: ToolCall) -> Events:
        """Adds a complete tool call, and returns its events."""

    @property
    def truncated(self) -> bool:
        """Whether the answer ended because it reached its maximum length."""
        return self.last_chunk is not None and self.last_chunk.finish == "length"

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
            events, self.last_chunk = [*events, *self._parser.finish()], piece
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
        return self._switched(None, truncated=self.truncated)

    def _switched(self, kind: str | None, *, truncated: bool = False) -> Events:
        """Ends the open part and begins one of another kind. None begins no part."""
        if kind == self.kind:
            return []
        before, self.kind = self.kind, kind
        found = [] if before is None else self.closed(before, truncated=truncated)
        return found if kind is None else found + self.opened(kind)
