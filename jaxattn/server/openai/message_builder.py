"""A builder of chat messages from the items or blocks of another API."""

from collections.abc import Sequence
from typing import Any

from jaxattn.server.http.errors import bad

MOST_MESSAGES = 4096  # per request
SYSTEM_ROLES = ("system", "developer")
# Fields with the same meaning in every API that is translated to a chat, including vLLM's fields.
SAMPLING_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("priority", "cache_salt", "allowed_token_ids", "bad_words", "structured_outputs"),
    *("truncate_prompt_tokens", "skip_special_tokens", "include_stop_str_in_output"),
)


class MessageList:
    """A growing list of messages in the format of Chat Completions.

    Chat templates expect one system message at the beginning, and then alternating turns of the
    user and the assistant. The list therefore merges successive texts of one role into one
    message, and gives a system text that follows other messages to the user.

    Attributes:
        messages: The messages so far.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """Adds a text of a role."""
        if role in SYSTEM_ROLES:
            begins = not self.messages or self.messages[-1]["role"] == "system"
            role = "system" if begins else "user"
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or last.get("tool_calls"):
            self.messages.append({"role": role, "content": text})
        elif last["content"] is None:
            last["content"] = text
        else:
            last["content"] += text if role == "assistant" else f"\n\n{text}"

    def think(self, text: str) -> None:
        """Adds the assistant's reasoning, which precedes its next text or call."""
        self.messages.append({"role": "assistant", "content": None, "reasoning_content": text})

    def call(self, id: str, name: str, arguments: str) -> None:
        """Adds a tool call of the assistant."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        function = {"name": name, "arguments": arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: str, text: str) -> None:
        """Adds the result of a tool call."""
        self.messages.append({"role": "tool", "tool_call_id": id, "content": text})


def text_of(content: object, path: str, kinds: Sequence[str]) -> str:
    """Returns the text of a message's content.

    Args:
        content: A string or a list of parts.
        path: The path of the content, which errors name.
        kinds: The allowed types of parts.

    Raises:
        ApiError: 400 if the content is neither, or a part has another type or no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(path, f"{path} must be a string or a list of parts; got {_named(content)}")
    return "".join(_part(part, f"{path}[{n}]", kinds) for n, part in enumerate(content))


def _part(part: object, path: str, kinds: Sequence[str]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else _named(part)
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    shown = kind if isinstance(kind, str) else _named(kind)
    if kind not in (*kinds,) or not isinstance(text, str):
        raise bad(
            path,
            f"{path} has the type {shown[:100]!r}; this text model accepts only parts of the "
            f"types {', '.join(kinds)}, each with a string as its text",
        )
    return text


def _named(value: object) -> str:
    return "null" if value is None else type(value).__name__
