"""The interface between an answer's pieces and the JSON that one API writes for them."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxattn.server.decoding.generation import Generation, OutputChunk


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
    def of(cls, prompt: int, generation: Generation) -> "TokenUsage":
        """What a generation has used so far; `cached` is known when a row has ended."""
        cached = generation.cached * prompt // generation.prompt_tokens
        return cls(prompt, cached, generation.tokens)


class WholeForm(abc.ABC):
    """The state of one answer in one piece: `take` for all pieces, then `whole`."""

    @abc.abstractmethod
    def take(self, piece: OutputChunk) -> None:
        """Keeps a piece of an answer in one piece."""

    @abc.abstractmethod
    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece, of what was taken."""


class AnswerForm(WholeForm):
    """The state of one answer on its way to the client, whole or as a stream: `begin`, `stream` for
    the pieces as they come, then `end`."""

    def begin(self) -> bytes:
        """The events before the first piece."""
        return b""

    @abc.abstractmethod
    def stream(self, pieces: Sequence[OutputChunk], generation: Generation) -> bytes:
        """The events that pieces become."""

    @abc.abstractmethod
    def end(self, generation: Generation) -> bytes:
        """The last events of a stream."""
