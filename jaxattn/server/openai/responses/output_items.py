"""A response of the Responses API: output items, and the events of a stream that make them."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from jaxattn.server.decoding.generation import Generation, OutputChunk
from jaxattn.server.decoding.logprobs import Chance, Spell, chat_logprobs
from jaxattn.server.decoding.message_events import (
    ContentDelta,
    MessageEvent,
    MessageParser,
    ReasoningDelta,
    ToolCall,
)
from jaxattn.server.http.error_forms import OpenAIErrors
from jaxattn.server.http.errors import ApiError
from jaxattn.server.http.event_stream import named_events
from jaxattn.server.openai.answer_form import AnswerForm, TokenUsage
from jaxattn.server.openai.responses.input_items import sealed
from jaxattn.server.openai.responses.tools import ResponseTools

type Events = list[dict[str, Any]]


@dataclasses.dataclass
class OutputItem:
    """An item whose text is not complete.

    Attributes:
        item: as the response has it.
        part: of its content, to which deltas are added.
        text: so far.
    """

    item: dict[str, Any]
    part: dict[str, Any]
    text: str = ""


class ResponseForm(AnswerForm):
    """The state of one response.

    Args:
        head: what the response repeats of its request.
        prompt_tokens: of the conversation.
        parser: of the answer's text.
        tools: of the request.
        seals: reasoning items have `encrypted_content`, with which a client brings them back.
        spell: the bytes of a token, where log-probabilities are asked for.
        on_done: called with the response when it is complete.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        prompt_tokens: int,
        parser: MessageParser,
        tools: ResponseTools,
        *,
        seals: bool = False,
        spell: Spell | None = None,
        on_done: Callable[[dict[str, Any]], None] = lambda response: None,
    ):
        self._prompt_tokens, self._parser = prompt_tokens, parser
        self._tools, self._seals, self._spell, self._on_done = tools, seals, spell, on_done
        self._output: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._finish: str | None = None
        self._reasoning_tokens = self._sequence = 0
        self._chances: list[Chance] = []  # of tokens whose text has not come yet
        self._response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **head,
            "output": [],
            "usage": None,
        }

    def take(self, piece: OutputChunk) -> None:
        self._events(piece)

    def whole(self, generation: Generation) -> dict[str, Any]:
        return self._completed(generation)

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self._response} for kind in kinds])

    def stream(self, pieces: Sequence[OutputChunk], generation: Generation) -> bytes:
        return self._numbered([event for piece in pieces for event in self._events(piece)])

    def end(self, generation: Generation) -> bytes:
        response = self._completed(generation)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that an error cuts."""
        said = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response, "status": "failed", "error": said, "output": self._output}
        return self._numbered([{"type": "response.failed", "response": response}])

    def _numbered(self, events: Events) -> bytes:
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
        return named_events(events)

    def _completed(self, generation: Generation) -> dict[str, Any]:
        cut = self._finish == "length"
        usage = TokenUsage.of(self._prompt_tokens, generation)
        response = self._response | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage.prompt + usage.generated,
            },
        }
        if not cut:
            response["completed_at"] = int(time.time())
        self._on_done(response)
        return response

    def _events(self, piece: OutputChunk) -> Events:
        """What a piece adds to the output."""
        found: Events = []
        self._chances += piece.chances
        events = self._parser.feed(piece.text)
        if piece.finish is not None:
            events = [*events, *self._parser.finish()]
            self._finish = piece.finish
        for event in events:
            found += self._of_event(event)
        if self._open is not None and self._open.item["type"] == "reasoning":
            self._reasoning_tokens += len(piece.ids)
        if piece.finish is not None:
            found += self._closed("incomplete" if piece.finish == "length" else "completed")
            if not self._output:  # an answer without a text is a message all the same
                found += self._opened("message") + self._closed("completed")
        return found

    def _of_event(self, event: MessageEvent) -> Events:
        match event:
            case ReasoningDelta(text):
                self._chances = []
                return self._text("reasoning", text, {})
            case ContentDelta(text):
                more: dict[str, Any] = {"logprobs": []}
                if self._spell is not None:
                    more["logprobs"] = chat_logprobs(self._chances, self._spell)["content"]
                    self._chances = []
                return self._text("message", text, more)
            case ToolCall():
                self._chances = []
                return self._closed("completed") + self._call(event)
        raise TypeError(f"an event of another kind: {event!r}")

    def _text(self, kind: str, text: str, more: dict[str, Any]) -> Events:
        found: Events = []
        if self._open is None or self._open.item["type"] != kind:
            found = self._closed("completed") + self._opened(kind)
        assert self._open is not None
        self._open.text += text
        if more.get("logprobs"):
            self._open.part["logprobs"] += more["logprobs"]
        return [*found, {"type": f"{_stem(kind)}.delta", **self._at(), "delta": text, **more}]

    def _opened(self, kind: str) -> Events:
        """The events that begin an item of text, and its one part."""
        if kind == "reasoning":
            item = {"id": _id("rs"), "type": kind, "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["status"] = "in_progress"
        self._open = OutputItem(item, part)
        return [
            self._item_event("added", dict(item)),
            {"type": "response.content_part.added", **self._at(), "part": dict(part)},
        ]

    def _closed(self, status: str) -> Events:
        """The events that end the item of text, if one is open."""
        if self._open is None:
            return []
        item, part, at = self._open.item, self._open.part, self._at()
        part["text"], item["content"], item["status"] = self._open.text, [part], status
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(part["text"])
        done: dict[str, Any] = {"type": f"{_stem(item['type'])}.done", **at, "text": part["text"]}
        if item["type"] == "message":
            done["logprobs"] = part["logprobs"]
        found = [
            done,
            {"type": "response.content_part.done", **at, "part": part},
            self._item_event("done", item),
        ]
        self._output.append(item)
        self._open = None
        return found

    def _call(self, call: ToolCall) -> Events:
        """The events of a call, which comes whole."""
        custom = self._tools.is_custom(call.name)
        kind, field = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
        text = _custom_input(call.arguments) if custom else call.arguments
        item = {
            "id": _id("ctc" if custom else "fc"),
            "type": kind,
            "call_id": call.id,
            **self._tools.named(call.name),
            field: text,
            "status": "completed",
        }
        stem = f"response.{kind}_{field}"
        at = {"item_id": item["id"], "output_index": len(self._output)}
        found = [
            self._item_event("added", item | {field: "", "status": "in_progress"}),
            {"type": f"{stem}.delta", **at, "delta": text},
            {"type": f"{stem}.done", **at, field: text, "name": item["name"]},
            self._item_event("done", item),
        ]
        self._output.append(item)
        return found

    def _item_event(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": len(self._output), "item": item}

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        place = {"output_index": len(self._output), "content_index": 0}
        return {"item_id": self._open.item["id"], **place}


class ResponseErrors(OpenAIErrors):
    """Errors of a stream that has begun: the response has failed."""

    def __init__(self, form: ResponseForm):
        self._form = form

    def stream_end(self, error: ApiError) -> bytes:
        return self._form.failed(error)


def _stem(kind: str) -> str:
    return "response.reasoning_text" if kind == "reasoning" else "response.output_text"


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _custom_input(arguments: str) -> str:
    """The text of a custom tool's call, which the model wrote as `{"input": text}`."""
    try:
        values = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    found = values.get("input") if isinstance(values, dict) else None
    return found if isinstance(found, str) else arguments
