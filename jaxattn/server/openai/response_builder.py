"""The responses of completions and chats, which have a list of choices, as whole JSON or chunks."""

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
    """The accumulated output of a choice. The fields are those of `OutputChunk`."""

    text: str = ""
    finish: str | None = None
    stop: str | int | None = None
    logprobs: list[Chance] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    prompt: list[Chance] = dataclasses.field(default_factory=list)

    def add(self, piece: OutputChunk) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.ids += piece.ids
        self.prompt += piece.prompt
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The streaming options of a request.

    Attributes:
        stream: Whether to stream the answer as events.
        usage: Whether a last chunk contains the token usage.
        each_usage: Whether every chunk contains the token usage.
    """

    stream: bool
    usage: bool
    each_usage: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerDetails:
    """The optional contents of a response.

    Attributes:
        streaming: The streaming options.
        token_ids: Whether to return token ids.
        logprobs: The number of likely tokens per token; None for no log-probabilities.
        prompt_logprobs: The same for the prompt's tokens, in vLLM's format.
    """

    streaming: StreamOptions
    token_ids: bool
    logprobs: int | None
    prompt_logprobs: int | None


MARK = secrets.token_hex(16)  # a placeholder for text that occurs nowhere else in an event


def read_streaming(fields: JsonFields) -> StreamOptions:
    """Reads the fields `stream` and `stream_options`."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise fields.wrong("stream_options", "left out unless stream is true")
    each = options.flag("continuous_usage_stats")
    return StreamOptions(stream=stream, usage=options.flag("include_usage"), each_usage=each)


class ResponseBuilder(AnswerForm):
    """The base class of the builders of responses with a list of choices.

    Args:
        service: The service that responds.
        prompt_tokens: The number of tokens of all prompts.
        details: The optional contents of the response.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, service: Service, prompt_tokens: int, details: AnswerDetails):
        self._prompt_tokens, self._spell = prompt_tokens, service.tokenizer.token_bytes
        self._num_logprobs, self._num_prompt_logprobs = details.logprobs, details.prompt_logprobs
        self._streaming, self._token_ids = details.streaming, details.token_ids
        self._texts: dict[int, ChoiceText] = {}
        self._started_choices: set[int] = set()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.settings.names[0],
            "system_fingerprint": service.fingerprint,
        }

    @abc.abstractmethod
    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        """Returns a choice of a whole response."""

    @abc.abstractmethod
    def choice(self, piece: OutputChunk, *, begins: bool) -> dict[str, Any] | str | None:
        """Returns the choice of the response chunk for a piece of output; None to send no chunk.

        A returned string stands for the `text_choice` with this text.

        Args:
            begins: Whether the piece is the first of its choice, which always gets a chunk.
        """

    @abc.abstractmethod
    def text_choice(self, number: int, text: str) -> dict[str, Any]:
        """Returns the choice of a response chunk that only adds text."""

    def prompt_field(self, text: ChoiceText) -> dict[str, Any]:
        """Returns the field `prompt_logprobs`, if it was requested."""
        if self._num_prompt_logprobs is None:
            return {}
        return {
            "prompt_logprobs": prompt_logprobs(text.prompt, self._spell, self._num_prompt_logprobs)
        }

    def take(self, piece: OutputChunk) -> None:
        self._texts.setdefault(piece.choice, ChoiceText()).add(piece)

    def whole(self, collector: OutputCollector) -> dict[str, Any]:
        texts = sorted(self._texts.items())
        choices = [
            self._add_token_ids(self.whole_choice(n, text), text.ids, collector.requests[n].prompt)
            for n, text in texts
        ]
        return self._with(self.whole_object, choices) | {"usage": self._usage(collector)}

    def stream(self, pieces: Sequence[OutputChunk], collector: OutputCollector) -> bytes:
        return b"".join([self._event(piece, collector) for piece in pieces])

    def _event(self, piece: OutputChunk, collector: OutputCollector) -> bytes:
        number, extra_fields = piece.choice, dict[str, Any]()
        begins = number not in self._started_choices
        self._started_choices.add(number)
        choice = self.choice(piece, begins=begins)
        if choice is None:
            return b""
        if isinstance(choice, str):
            if not self._token_ids and not self._streaming.each_usage:
                before, after = self._frame(number)
                return before + orjson.dumps(choice) + after
            choice = self.text_choice(number, choice)
        if self._streaming.each_usage:
            extra_fields = {"usage": self._usage(collector)}
        elif self._streaming.usage:
            extra_fields = {"usage": None}
        prompt = collector.requests[number].prompt if begins else None
        choice_fields = self._add_token_ids(choice, piece.ids, prompt)
        return data_events([self._with(self.chunk_object, [choice_fields]) | extra_fields])

    def _frame(self, number: int) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the text in an event that only adds text."""
        found = self._frames.get(number)
        if found is None:
            more = {"usage": None} if self._streaming.usage else {}
            choice = self.text_choice(number, MARK)
            event = data_events([self._with(self.chunk_object, [choice]) | more])
            before, _, after = event.partition(orjson.dumps(MARK))
            found = self._frames[number] = before, after
        return found

    def end(self, collector: OutputCollector) -> bytes:
        if not self._streaming.usage:
            return DONE
        last = self._with(self.chunk_object, []) | {"usage": self._usage(collector)}
        return data_events([last]) + DONE

    def needs_chunk(self, piece: OutputChunk) -> bool:
        """Whether a piece without text still needs a chunk, for log-probabilities or token ids."""
        return bool(piece.logprobs or (self._token_ids and piece.ids))

    def _add_token_ids(
        self, choice: dict[str, Any], ids: Sequence[int], prompt: Sequence[int] | None
    ) -> dict[str, Any]:
        """Adds the token ids of the choice and of a prompt, if they were requested."""
        if self._token_ids:
            choice["token_ids"] = list(ids)
            if prompt is not None:
                choice["prompt_token_ids"] = list(prompt)
        return choice

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self, collector: OutputCollector) -> dict[str, Any]:
        usage = TokenUsage.of(self._prompt_tokens, collector)
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
