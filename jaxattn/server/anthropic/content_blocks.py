"""A message of Anthropic's API: blocks of content, and the events of a stream that make them."""

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from jaxattn.server.decoding.generation import Generation, OutputChunk
from jaxattn.server.decoding.message_events import (
    ContentDelta,
    MessageEvent,
    MessageParser,
    ReasoningDelta,
    ToolCall,
)
from jaxattn.server.http.event_stream import named_events
from jaxattn.server.openai.answer_form import AnswerForm, TokenUsage

type Events = list[dict[str, Any]]

SIGNATURE = "jaxattn"  # clients send it back with the thoughts; nobody reads it


class MessageForm(AnswerForm):
    """The state of one message.

    Args:
        model: its name.
        prompt_tokens: of the conversation.
        parser: of the answer's text.
    """

    def __init__(self, model: str, prompt_tokens: int, parser: MessageParser):
        self._prompt_tokens, self._parser = prompt_tokens, parser
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._last: OutputChunk | None = None
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(prompt_tokens, 0, 0),
        }

    def take(self, piece: OutputChunk) -> None:
        self._events(piece)

    def whole(self, generation: Generation) -> dict[str, Any]:
        used = TokenUsage.of(self._prompt_tokens, generation)
        return self._message | {
            "content": self._content,
            **self._stop(),
            "usage": self._usage(used.prompt, used.cached, used.generated),
        }

    def begin(self) -> bytes:
        return named_events([{"type": "message_start", "message": self._message}])

    def stream(self, pieces: Sequence[OutputChunk], generation: Generation) -> bytes:
        return named_events([event for piece in pieces for event in self._events(piece)])

    def end(self, generation: Generation) -> bytes:
        used = TokenUsage.of(self._prompt_tokens, generation)
        usage = self._usage(used.prompt, used.cached, used.generated)
        delta = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        return named_events([delta, {"type": "message_stop"}])

    @staticmethod
    def _usage(prompt: int, cached: int, generated: int) -> dict[str, int]:
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
        }

    def _stop(self) -> dict[str, Any]:
        """Why the message ended."""
        last = self._last
        stop = last.stop if last is not None and isinstance(last.stop, str) else None
        reason = "end_turn"
        if last is not None and last.finish == "length":
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._content):
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _events(self, piece: OutputChunk) -> Events:
        """What a piece adds to the content."""
        found: Events = []
        events = self._parser.feed(piece.text)
        if piece.finish is not None:
            events, self._last = [*events, *self._parser.finish()], piece
        for event in events:
            found += self._of_event(event)
        if piece.finish is not None:
            found += self._closed()
        return found

    def _of_event(self, event: MessageEvent) -> Events:
        match event:
            case ReasoningDelta(text):
                return self._text("thinking", text)
            case ContentDelta(text):
                return self._text("text", text)
            case ToolCall():
                return self._call(event)
        raise TypeError(f"an event of another kind: {event!r}")

    def _text(self, kind: str, text: str) -> Events:
        found: Events = []
        if not self._is_open or self._content[-1]["type"] != kind:
            found = self._closed() + self._opened({"type": kind, kind: ""})
        self._content[-1][kind] += text
        return [*found, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall) -> Events:
        """The events of a call, which comes whole."""
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        found = self._closed() + self._opened(block)
        block["input"] = orjson.loads(call.arguments)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [*found, self._delta(delta), *self._closed()]

    def _opened(self, block: dict[str, Any]) -> Events:
        self._content.append(block)
        self._is_open = True
        began = {"type": "content_block_start", "index": len(self._content) - 1}
        signed = {"signature": ""} if block["type"] == "thinking" else {}
        return [began | {"content_block": block | signed}]

    def _closed(self) -> Events:
        """The events that end the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        found: Events = []
        if self._content[-1]["type"] == "thinking":
            self._content[-1]["signature"] = SIGNATURE
            found = [self._delta({"type": "signature_delta", "signature": SIGNATURE})]
        return [*found, {"type": "content_block_stop", "index": len(self._content) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        index = len(self._content) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}
