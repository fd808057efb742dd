"""The interface of the classes that turn an answer's pieces into the JSON of an API."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector


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
