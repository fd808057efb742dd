"""The events that a model's message consists of: reasoning, content and tool calls.

A `MessageParser` turns the text of one choice into events while the text arrives. Whole answers
and streams use the same parser and therefore have the same parts. Each API encodes the events in
its own format.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call, which a parser returns after the call's last character.

    Attributes:
        index: The call's number within the message, from 0.
        id: The id that the tool's result refers to.
        name: The function's name.
        arguments: The arguments as the text of a JSON object.
    """

    index: int
    id: str
    name: str
    arguments: str

    @property
    def json(self) -> dict[str, Any]:
        """The call in the format of Chat Completions, without its index."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


type MessageEvent = ReasoningDelta | ContentDelta | ToolCall


class MessageParser(Protocol):
    """The interface of parsers that divide a choice's text into events. Each text needs its own
    parser."""

    def feed(self, text: str) -> list[MessageEvent]:
        """Parses a piece of the text, and returns the events that have become certain."""

    def finish(self) -> list[MessageEvent]:
        """Returns the remaining events, after the last piece. An incomplete call is content."""


@dataclasses.dataclass
class MessageParts:
    """A whole message, assembled from its events."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)

    def add(self, events: Iterable[MessageEvent]) -> None:
        for event in events:
            match event:
                case ReasoningDelta():
                    self.reasoning += event.text
                case ContentDelta():
                    self.content += event.text
                case ToolCall():
                    self.calls.append(event)
