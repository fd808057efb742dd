"""Calls of tools in a model's text: found while it comes, and turned into OpenAI's objects.

Models are taught to write them between <tool_call> and </tool_call>, in one of three ways:

    {"name": "f", "arguments": {"x": 1}}                              (Hermes, Qwen3)
    <function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>     (Qwen3-Coder, Qwen3.5)
    f\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>               (GLM)

What cannot be read as a call stays text.
"""

import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from jaxattn.server.decoding.message_events import ContentDelta, MessageEvent, ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)")
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolMatch:
    """One call.

    Attributes:
        arguments: an object of JSON, as a text.
        id: that the answer of the tool will name.
    """

    name: str
    arguments: str
    id: str

    @property
    def json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolParser:
    """Divides one choice's text into content and calls.

    Args:
        tools: of the request; their schemas say which arguments are texts.

    Attributes:
        calls: all that were found.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self._tools = tools
        self._held = ""
        self._inside = False
        self.calls: list[ToolMatch] = []

    def push(self, text: str) -> tuple[str, list[ToolMatch]]:
        """(content that is final, calls that ended with this text)."""
        self._held += text
        content, calls = "", []
        while True:
            mark = END if self._inside else BEGIN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            if not self._inside:
                content += before.rstrip()
            elif call := self._read(before):
                calls.append(call)
            else:
                content += BEGIN + before + END
            self._held, self._inside = after, not self._inside
        self.calls += calls
        if not self._inside:
            content += self._final()
        return content, calls

    def end(self) -> str:
        """What was held, after the last text: it is no call."""
        held = (BEGIN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return "" if self.calls and not held.strip() else held

    def _final(self) -> str:
        """The text that cannot be the beginning of a call, nor space before one."""
        held = self._held
        begun = next((n for n in range(len(BEGIN) - 1, 0, -1) if held.endswith(BEGIN[:n])), 0)
        known = held[: len(held) - begun].rstrip()
        self._held = held[len(known) :]
        return known

    def _read(self, text: str) -> ToolMatch | None:
        found = _hermes(text) or self._tagged(text)
        if found is None:
            return None
        name, arguments = found
        spelled = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        return ToolMatch(name, spelled, f"call_{secrets.token_hex(12)}")

    def _tagged(self, text: str) -> tuple[str, dict[str, Any]] | None:
        if match := _FUNCTION.match(text):
            name, pairs = match[1].strip(), _PARAMETER.findall(match[2])
        elif match := _NAME.match(text):
            name, pairs = match[1], _ARGUMENT.findall(text)
        else:
            return None
        kinds = self._kinds(name)
        return name, {key: _value(value, kinds.get(key)) for key, value in pairs}

    def _kinds(self, name: str) -> dict[str, object]:
        """The types of a tool's parameters, as its schema has them."""
        for tool in self._tools:
            function = tool.get("function")
            if isinstance(function, dict) and function.get("name") == name:
                parameters = function.get("parameters")
                known = parameters.get("properties") if isinstance(parameters, dict) else None
                pairs = known.items() if isinstance(known, dict) else ()
                return {key: each.get("type") for key, each in pairs if isinstance(each, dict)}
        return {}


class ToolCallReader:
    """The events of a choice's text; a `MessageParser` without thoughts."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self._parser = ToolParser(tools) if tools else None

    def feed(self, text: str) -> list[MessageEvent]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        content, calls = self._parser.push(text)
        begin = len(self._parser.calls) - len(calls)
        found: list[MessageEvent] = [ContentDelta(content)] if content else []
        return found + [
            ToolCall(begin + place, call.id, call.name, call.arguments)
            for place, call in enumerate(calls)
        ]

    def finish(self) -> list[MessageEvent]:
        content = self._parser.end() if self._parser else ""
        return [ContentDelta(content)] if content else []


def _hermes(text: str) -> tuple[str, Any] | None:
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], call.get("arguments") or {}


def _value(text: str, kind: object) -> Any:
    """An argument: a text where the schema says so, else what it reads as."""
    if kind == "string":
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
