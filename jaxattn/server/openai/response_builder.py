"""The JSON of completions and chats, whole or in chunks: an answer with a list of choices."""

import abc
import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from jaxattn.server.decoding.logprobs import Chance, prompt_logprobs
from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.http.event_stream import DONE, data_events
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.openai.response_interface import AnswerForm, TokenUsage
from jaxattn.server.runtime.service import Service


@dataclasses.dataclass
class ChoiceText:
    """A choice's text when it is whole."""

    text: str = ""
    finish: str | None = None
    stop: str | int | None = None
    chances: list[Chance] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    prompt: list[Chance] = dataclasses.field(default_factory=list)

    def add(self, piece: OutputChunk) -> None:
        self.text += piece.text
        self.chances += piece.chances
        self.ids += piece.ids
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerDetails:
    """What an answer tells beside its text.

    Attributes:
        streaming: what a stream tells.
        token_ids: whether the client wants to know all token ids.
        logprobs: how many likely tokens are told with each; None where none are asked for.
        prompt_logprobs: likewise of the prompt's, in vLLM's form.
    """

    streaming: StreamOptions
    token_ids: bool
    logprobs: int | None
    prompt_logprobs: int | None


MARK = secrets.token_hex(16)  # stands for a text that nothing else in an event has


def read_streaming(fields: JsonFields) -> StreamOptions:
    """The fields `stream` and `stream_options`."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise fields.wrong("stream_options", "left out where stream is false")
    each = options.flag("continuous_usage_stats")
    return StreamOptions(stream=stream, usage=options.flag("include_usage"), each_usage=each)


class ResponseBuilder(AnswerForm):
    """Writes answers of one kind, with a list of choices.

    Args:
        service: that answers.
        prompt_tokens: of all prompts.
        details: what is told beside the text.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, service: Service, prompt_tokens: int, details: AnswerDetails):
        self._prompt_tokens, self._spell = prompt_tokens, service.tokenizer.token_bytes
        self._most, self._of_prompt = details.logprobs, details.prompt_logprobs
        self._streaming, self._token_ids = details.streaming, details.token_ids
        self._texts: dict[int, ChoiceText] = {}
        self._begun: set[int] = set()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.settings.names[0],
            "system_fingerprint": service.fingerprint,
        }

    @abc.abstractmethod
    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        """A choice of an answer in one piece."""

    @abc.abstractmethod
    def choice(self, piece: OutputChunk, *, begins: bool) -> dict[str, Any] | str | None:
        """The choice of the chunk that a piece becomes; None where there is nothing to say.

        A text stands for `text_choice` of it.

        Args:
            begins: it is the first piece of its choice, which always has a chunk.
        """

    @abc.abstractmethod
    def text_choice(self, number: int, text: str) -> dict[str, Any]:
        """A chunk's choice with more text, and nothing else."""

    def prompt_field(self, text: ChoiceText) -> dict[str, Any]:
        """The field `prompt_logprobs` of a prompt, where it is asked for."""
        if self._of_prompt is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(text.prompt, self._spell, self._of_prompt)}

    def take(self, piece: OutputChunk) -> None:
        self._texts.setdefault(piece.choice, ChoiceText()).add(piece)

    def whole(self, generation: OutputCollector) -> dict[str, Any]:
        texts = sorted(self._texts.items())
        choices = [
            self._told(self.whole_choice(n, text), text.ids, generation.requests[n].prompt)
            for n, text in texts
        ]
        return self._with(self.whole_object, choices) | {"usage": self._usage(generation)}

    def stream(self, pieces: Sequence[OutputChunk], generation: OutputCollector) -> bytes:
        return b"".join([self._event(piece, generation) for piece in pieces])

    def _event(self, piece: OutputChunk, generation: OutputCollector) -> bytes:
        number, more = piece.choice, dict[str, Any]()
        begins = number not in self._begun
        self._begun.add(number)
        choice = self.choice(piece, begins=begins)
        if choice is None:
            return b""
        if isinstance(choice, str):
            if not self._token_ids and not self._streaming.each_usage:
                before, after = self._frame(number)
                return before + orjson.dumps(choice) + after
            choice = self.text_choice(number, choice)
        if self._streaming.each_usage:
            more = {"usage": self._usage(generation)}
        elif self._streaming.usage:
            more = {"usage": None}
        prompt = generation.requests[number].prompt if begins else None
        told = self._told(choice, piece.ids, prompt)
        return data_events([self._with(self.chunk_object, [told]) | more])

    def _frame(self, number: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text in the event of `text_choice`."""
        found = self._frames.get(number)
        if found is None:
            more = {"usage": None} if self._streaming.usage else {}
            choice = self.text_choice(number, MARK)
            event = data_events([self._with(self.chunk_object, [choice]) | more])
            before, _, after = event.partition(orjson.dumps(MARK))
            found = self._frames[number] = before, after
        return found

    def end(self, generation: OutputCollector) -> bytes:
        if not self._streaming.usage:
            return DONE
        last = self._with(self.chunk_object, []) | {"usage": self._usage(generation)}
        return data_events([last]) + DONE

    def told_of(self, piece: OutputChunk) -> bool:
        """Whether a piece without text has more to tell: log-probabilities or token ids."""
        return bool(piece.chances or (self._token_ids and piece.ids))

    def _told(
        self, choice: dict[str, Any], ids: Sequence[int], prompt: Sequence[int] | None
    ) -> dict[str, Any]:
        """The choice with its token ids, where they are asked for, and those of a prompt."""
        if self._token_ids:
            choice["token_ids"] = list(ids)
            if prompt is not None:
                choice["prompt_token_ids"] = list(prompt)
        return choice

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self, generation: OutputCollector) -> dict[str, Any]:
        usage = TokenUsage.of(self._prompt_tokens, generation)
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
