"""The JSON of an answer, whole or in chunks; each endpoint has a form of its own."""

import abc
import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxattn.server.decoding.generation import OutputChunk
from jaxattn.server.decoding.logprobs import Chance, Spell, prompt_logprobs
from jaxattn.server.http.json_fields import JsonFields


@dataclasses.dataclass
class ChoiceText:
    """A choice's text when it is whole."""

    text: str = ""
    finish: str | None = None
    stop: str | int | None = None
    chances: list[Chance] = dataclasses.field(default_factory=list)
    prompt: list[Chance] = dataclasses.field(default_factory=list)

    def add(self, piece: OutputChunk) -> None:
        self.text += piece.text
        self.chances += piece.chances
        self.prompt += piece.prompt
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How a client wants its answer.

    Attributes:
        stream: in events, as it is generated.
        usage: a last chunk counts the tokens.
        each_usage: every chunk counts them.
    """

    stream: bool
    usage: bool
    each_usage: bool


def read_streaming(fields: JsonFields) -> StreamOptions:
    """The fields `stream` and `stream_options`."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise fields.wrong("stream_options", "left out where stream is false")
    each = options.flag("continuous_usage_stats")
    return StreamOptions(stream=stream, usage=options.flag("include_usage"), each_usage=each)


class ResponseBuilder(abc.ABC):
    """Writes answers of one kind.

    Args:
        model: its name.
        fingerprint: see `Service.fingerprint`.
        prompt_tokens: of all prompts.
        spell: the bytes of a token.
        logprobs: how many likely tokens are told with each; None where none are asked for.
        prompt_logprobs: likewise of the prompt's, in vLLM's form.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: str,
        fingerprint: str,
        prompt_tokens: int,
        spell: Spell,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ):
        self._prompt_tokens, self._spell = prompt_tokens, spell
        self._most, self._of_prompt = logprobs, prompt_logprobs
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @abc.abstractmethod
    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        """A choice of an answer in one piece."""

    @abc.abstractmethod
    def choices(self, piece: OutputChunk) -> Iterable[dict[str, Any]]:
        """The choices of the chunks that a piece becomes; of none, where nothing is to say."""

    def whole(self, texts: Sequence[ChoiceText], tokens: int) -> dict[str, Any]:
        """An answer in one piece, for which so many tokens were generated."""
        choices = [self.whole_choice(number, text) for number, text in enumerate(texts)]
        return self._with(self.whole_object, choices) | {"usage": self._usage(tokens)}

    def prompt_field(self, text: ChoiceText) -> dict[str, Any]:
        """The field `prompt_logprobs` of a prompt, where it is asked for."""
        if self._of_prompt is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(text.prompt, self._spell, self._of_prompt)}

    def chunks(
        self, pieces: Iterable[OutputChunk], streaming: StreamOptions, tokens: int
    ) -> list[dict[str, Any]]:
        """The chunks that pieces become."""
        more: dict[str, Any] = {}
        if streaming.each_usage:
            more = {"usage": self._usage(tokens)}
        elif streaming.usage:
            more = {"usage": None}
        return [
            self._with(self.chunk_object, [choice]) | more
            for piece in pieces
            for choice in self.choices(piece)
        ]

    def usage_chunk(self, tokens: int) -> dict[str, Any]:
        """The last chunk, which has no choice."""
        return self._with(self.chunk_object, []) | {"usage": self._usage(tokens)}

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
