"""Messages of a chat, put together from the items or blocks of another API."""

from collections.abc import Iterable
from typing import Any

from jaxattn.server.http.errors import bad

SYSTEM_ROLES = ("system", "developer")


class MessageList:
    """Messages in the form of Chat Completions, one after another.

    Thoughts, content and calls that follow each other become one message of the assistant. System
    texts that stand before all other messages become one message, since templates take only one.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """A message of text."""
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == role and not last.get("tool_calls"):
            last["content"] = (last["content"] or "") + text
        elif role in SYSTEM_ROLES and all(each["role"] == "system" for each in self.messages):
            if self.messages:
                last["content"] += f"\n\n{text}"
            else:
                self.messages.append({"role": "system", "content": text})
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Thoughts of the assistant, before what follows them."""
        self.messages.append({"role": "assistant", "content": None, "reasoning_content": text})

    def call(self, id: str, name: str, arguments: str) -> None:
        """A call of a tool by the assistant."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        function = {"name": name, "arguments": arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: str, text: str) -> None:
        """The result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": id, "content": text})


def text_of(content: object, where: str, kinds: Iterable[str]) -> str:
    """A content as a text.

    Args:
        content: a text, or a list of parts.
        where: the content's place, which errors name.
        kinds: types of parts that have a text.

    Raises:
        ApiError: 400, it is neither, or a part has no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, f"{where} must be a text or a list of parts; got {_named(content)}")
    return "".join(_part(part, f"{where}[{n}]", kinds) for n, part in enumerate(content))


def _part(part: object, where: str, kinds: Iterable[str]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else _named(part)
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(text, str):
        shown = kind if isinstance(kind, str) else _named(kind)
        raise bad(
            where,
            f"{where} is a part of the type {shown[:100]!r}; a model of text takes parts of the "
            f"types {', '.join(kinds)} with a text",
        )
    return text


def _named(value: object) -> str:
    return "null" if value is None else type(value).__name__
