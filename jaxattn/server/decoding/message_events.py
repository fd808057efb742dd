"""The parts of a model's message - thoughts, content, tool calls - as events, one after another.

A `MessageParser` turns the text of one choice into events while the text arrives. A whole answer
and a stream go through the same parser, so that both have the same parts. Each API writes the
events in a form of its own.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's thoughts."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer itself."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, whole: a parser gives it when its last character has been read.

    Attributes:
        index: its number among the calls of the message, from 0.
        id: that the result of the tool will name.
        arguments: the text of a JSON object.
    """

    index: int
    id: str
    name: str
    arguments: str

    @property
    def json(self) -> dict[str, Any]:
        """The call in the form of Chat Completions, without its index."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


type MessageEvent = ReasoningDelta | ContentDelta | ToolCall


class MessageParser(Protocol):
    """Divides the text of one choice into events. A parser belongs to one text."""

    def feed(self, text: str) -> list[MessageEvent]:
        """The events that are certain after this piece of the text; often none."""

    def finish(self) -> list[MessageEvent]:
        """The remaining events, after the last piece. What is no whole call is content."""


@dataclasses.dataclass
class MessageParts:
    """A message put together from its events."""

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
