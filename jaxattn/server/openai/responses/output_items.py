"""The responses of the Responses API: output items and their stream events."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from jaxattn.server.decoding.logprobs import Chance, Spell, chat_logprobs
from jaxattn.server.decoding.message_events import MessageParser, ToolCall
from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.http.error_responses import OpenAIErrors
from jaxattn.server.http.errors import ApiError
from jaxattn.server.openai.part_list_response import Events, PartsForm
from jaxattn.server.openai.responses.input_items import sealed
from jaxattn.server.openai.responses.tools import ResponseTools


class ResponseForm(PartsForm):
    """The state of one response, whose parts are its complete output items.

    Args:
        head: The request fields that the response repeats.
        prompt_tokens: The number of the prompt's tokens.
        parser: The parser of the answer's text.
        tools: The request's tools.
        seals: Whether reasoning items get `encrypted_content`, so that clients can return them.
        spell: Returns the bytes of a token; None without log-probabilities.
        on_done: Called with the completed response.
    """

    thoughts, content = "reasoning", "message"

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
        super().__init__(prompt_tokens, parser)
        self._tools, self._seals, self._spell, self._on_done = tools, seals, spell, on_done
        self._item, self._part = dict[str, Any](), dict[str, Any]()  # the latest with text
        self._reasoning_tokens = self._sequence = 0
        self._pending_logprobs: list[Chance] = []  # of tokens whose text is not complete yet
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

    def whole(self, collector: OutputCollector) -> dict[str, Any]:
        truncated, usage = self.truncated, self.usage(collector)
        response = self._response | {
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": self.parts,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage.prompt + usage.generated,
            },
        }
        if not truncated:
            response["completed_at"] = int(time.time())
        self._on_done(response)
        return response

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self.written([{"type": kind, "response": self._response} for kind in kinds])

    def end(self, collector: OutputCollector) -> bytes:
        response = self.whole(collector)
        return self.written([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that an error ends."""
        said = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response, "status": "failed", "error": said, "output": self.parts}
        return self.written([{"type": "response.failed", "response": response}])

    def written(self, events: Events) -> bytes:
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
        return super().written(events)

    def added(self, piece: OutputChunk) -> Events:
        self._pending_logprobs += piece.logprobs
        found = super().added(piece)
        self._count(piece)
        return found

    def ended(self, piece: OutputChunk) -> Events:
        self._count(piece)
        found = super().ended(piece)
        if not self.parts:  # an empty answer still needs a message
            found += self.opened(self.content) + self.closed(self.content, truncated=False)
        return found

    def _count(self, piece: OutputChunk) -> None:
        if self.kind == self.thoughts:
            self._reasoning_tokens += len(piece.ids)

    def opened(self, kind: str) -> Events:
        if kind == self.thoughts:
            item = {"id": _id("rs"), "type": kind, "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["status"] = "in_progress"
        self._item, self._part = item, part
        added = {"type": "response.content_part.added", **self._at(), "part": dict(part)}
        return [self._item_event("added", dict(item)), added]

    def text(self, text: str) -> dict[str, Any]:
        self._part["text"] += text
        more: dict[str, Any] = {}
        if self.kind == self.content:
            more["logprobs"] = []
            if self._spell is not None:
                more["logprobs"] = chat_logprobs(self._pending_logprobs, self._spell)["content"]
                self._part["logprobs"] += more["logprobs"]
        self._pending_logprobs = []
        return {"type": f"{self._stem}.delta", **self._at(), "delta": text, **more}

    def closed(self, kind: str, *, truncated: bool) -> Events:
        item, part, at = self._item, self._part, self._at()
        item["content"], item["status"] = [part], "incomplete" if truncated else "completed"
        if kind == self.thoughts and self._seals:
            item["encrypted_content"] = sealed(part["text"])
        done: dict[str, Any] = {"type": f"{self._stem}.done", **at, "text": part["text"]}
        if kind == self.content:
            done["logprobs"] = part["logprobs"]
        ended = {"type": "response.content_part.done", **at, "part": part}
        found = [done, ended, self._item_event("done", item)]
        self.parts.append(item)
        return found

    def call(self, call: ToolCall) -> Events:
        self._pending_logprobs = []
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
        at = {"item_id": item["id"], "output_index": len(self.parts)}
        found = [
            self._item_event("added", item | {field: "", "status": "in_progress"}),
            {"type": f"{stem}.delta", **at, "delta": text},
            {"type": f"{stem}.done", **at, field: text, "name": item["name"]},
            self._item_event("done", item),
        ]
        self.parts.append(item)
        return found

    def _item_event(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": len(self.parts), "item": item}

    def _at(self) -> dict[str, Any]:
        """Returns the fields that locate the open part."""
        place = {"output_index": len(self.parts), "content_index": 0}
        return {"item_id": self._item["id"], **place}

    @property
    def _stem(self) -> str:
        """The beginning of the names of the open part's events."""
        return f"response.{self._part['type']}"


class ResponseErrors(OpenAIErrors):
    """The error format of a stream that has begun, which ends with a failed response."""

    def __init__(self, form: ResponseForm):
        self._form = form

    def stream_end(self, error: ApiError) -> bytes:
        return self._form.failed(error)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _custom_input(arguments: str) -> str:
    """Returns the input of a custom tool's call, which the model writes as `{"input": text}`."""
    try:
        values = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    found = values.get("input") if isinstance(values, dict) else None
    return found if isinstance(found, str) else arguments
