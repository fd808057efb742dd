"""The responses of Anthropic's Messages API: messages of content blocks, and their events."""

import secrets
from typing import Any

import orjson

from jaxattn.server.decoding.message_events import MessageParser, ToolCall
from jaxattn.server.decoding.output_collector import OutputCollector
from jaxattn.server.openai.part_list_response import Events, PartsForm
from jaxattn.server.openai.response_interface import TokenUsage

SIGNATURE = "jaxattn"  # clients send it back with the reasoning; the server ignores it


class MessageForm(PartsForm):
    """The state of one message, whose parts are content blocks.

    Args:
        model: The model's name in the response.
        prompt_tokens: The number of the prompt's tokens.
        parser: The parser of the answer's text.
    """

    thoughts, content = "thinking", "text"

    def __init__(self, model: str, prompt_tokens: int, parser: MessageParser):
        super().__init__(prompt_tokens, parser)
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(TokenUsage(prompt_tokens, 0, 0)),
        }

    def whole(self, collector: OutputCollector) -> dict[str, Any]:
        told = {"content": self.parts, **self._stop(), "usage": _usage(self.usage(collector))}
        return self._message | told

    def begin(self) -> bytes:
        return self.written([{"type": "message_start", "message": self._message}])

    def end(self, collector: OutputCollector) -> bytes:
        usage = _usage(self.usage(collector))
        delta = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        return self.written([delta, {"type": "message_stop"}])

    def _stop(self) -> dict[str, Any]:
        """Returns the fields with the reason why the message ended."""
        stop = self.last_chunk.stop if self.last_chunk is not None else None
        stop = stop if isinstance(stop, str) else None
        reason = "end_turn" if stop is None else "stop_sequence"
        if self.truncated:
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self.parts):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def opened(self, kind: str) -> Events:
        return [self._begun({"type": kind, kind: ""})]

    def text(self, text: str) -> dict[str, Any]:
        kind = self.parts[-1]["type"]
        self.parts[-1][kind] += text
        return self._delta({"type": f"{kind}_delta", kind: text})

    def closed(self, kind: str, *, truncated: bool) -> Events:
        found: Events = []
        if kind == self.thoughts:
            self.parts[-1]["signature"] = SIGNATURE
            found = [self._delta({"type": "signature_delta", "signature": SIGNATURE})]
        return [*found, self._event("stop")]

    def call(self, call: ToolCall) -> Events:
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        begun = self._begun(block)
        block["input"] = orjson.loads(call.arguments)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [begun, self._delta(delta), self._event("stop")]

    def _begun(self, block: dict[str, Any]) -> dict[str, Any]:
        self.parts.append(block)
        signed = {"signature": ""} if block["type"] == self.thoughts else {}
        return self._event("start") | {"content_block": block | signed}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._event("delta") | {"delta": delta}

    def _event(self, what: str) -> dict[str, Any]:
        """Returns an event of the last block."""
        return {"type": f"content_block_{what}", "index": len(self.parts) - 1}


def _usage(tokens: TokenUsage) -> dict[str, int]:
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.generated,
    }
