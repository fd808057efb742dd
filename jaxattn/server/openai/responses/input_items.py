"""The translation of requests from the Responses API to Chat Completions.

It skips tools, tool choices and input items that only OpenAI's servers can run, such as
web_search. The model answers without them.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import orjson

from jaxattn.engine.requests.request import MOST_LOGPROBS
from jaxattn.server.decoding.sampling_params import MOST_ID
from jaxattn.server.decoding.tool_choice import MOST_NAME
from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.openai.message_builder import SAMPLING_FIELDS, MessageList, text_of
from jaxattn.server.openai.responses.tools import ResponseTools, read_tool_choice

MOST_ITEMS = 8192
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
ROLES = ("user", "assistant", "system", "developer")
SEALED = "jaxattn-reasoning:"  # prefix of `encrypted_content`, in which clients return reasoning
# Fields with the same meaning in both APIs.
SHARED = (*SAMPLING_FIELDS, "stop", "chat_template_kwargs", "parallel_tool_calls")
# Fields of Chat Completions -> fields of this API, for error messages.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def as_chat(fields: JsonFields, items: Sequence[Any], tools: ResponseTools) -> JsonFields:
    """Returns the request in the format of Chat Completions.

    Args:
        items: The items of the conversation so far and of the request's input.

    Raises:
        ApiError: 400 with the name of the field in this API.
    """
    refuse_unstored(fields)
    chat: dict[str, Any] = {name: fields.values.get(name) for name in SHARED}
    chat["messages"] = _messages(fields, items, tools)
    if tools.tools:
        chat["tools"] = tools.tools
    chat["tool_choice"] = read_tool_choice(fields)
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", 1, MOST_ID)
    chat["response_format"] = _response_format(fields)
    if effort := fields.object("reasoning").text("effort", 32):
        chat["reasoning_effort"] = effort
    if "message.output_text.logprobs" in fields.texts("include", 32, 256):
        chat["logprobs"] = True
        chat["top_logprobs"] = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    return JsonFields(chat)


def refuse_unstored(fields: JsonFields) -> None:
    """Raises ApiError 400 for fields that refer to objects which this server does not store."""
    if fields.flag("background"):
        raise bad(
            "background", "background is not supported; leave it out, and use stream: true instead"
        )
    for name in ("conversation", "prompt"):
        if fields.given(name):
            raise bad(name, f"{name} is not supported, because the server stores only responses")


def input_items(fields: JsonFields) -> list[Any]:
    """Returns the items of `input`. A string becomes a message of the user.

    Raises:
        ApiError: 400 if the field is missing, or not a list of 1 to `MOST_ITEMS` items.
    """
    given = fields.values.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > MOST_ITEMS:
        raise fields.wrong("input", f"a string, or a list of 1 to {MOST_ITEMS:,} items")
    return given


def _messages(
    fields: JsonFields, items: Sequence[Any], tools: ResponseTools
) -> list[dict[str, Any]]:
    message_list = MessageList()
    if instructions := fields.text("instructions"):
        message_list.say("system", instructions)
    num_previous = len(items) - len(input_items(fields))
    for place, item in enumerate(items):
        path = f"input[{place - num_previous}]" if place >= num_previous else "previous_response_id"
        if not isinstance(item, dict):
            raise bad(path, f"{path} must be an object; got {type(item).__name__}")
        _add(message_list, JsonFields(item, path), tools)
    return message_list.messages


def _add(message_list: MessageList, item: JsonFields, tools: ResponseTools) -> None:
    kind = item.values.get("type")
    if kind in (None, "message"):
        role = item.chosen("role", ROLES)
        if role is None:
            raise item.wrong("role", f"one of {', '.join(ROLES)}")
        message_list.say(role, text_of(item.values.get("content"), item.name("content"), TEXTS))
    elif kind == "reasoning":
        if thoughts := _read_reasoning(item):
            message_list.think(thoughts)
    elif kind in ("function_call", "custom_tool_call"):
        id, name = item.text("call_id", 256), item.text("name", MOST_NAME)
        if not id or not name:
            raise item.wrong("name" if id else "call_id", "a nonempty string")
        arguments = item.text("arguments") or "{}"
        if kind == "custom_tool_call":
            arguments = _custom_arguments(item.text("input") or "")
        message_list.call(id, tools.in_chat(name, item.text("namespace", MOST_NAME)), arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        id = item.text("call_id", 256)
        if not id:
            raise item.wrong("call_id", "a nonempty string")
        message_list.result(id, text_of(item.values.get("output"), item.name("output"), TEXTS))
    elif not isinstance(kind, str) or not _hosted(kind):
        raise item.wrong(
            "type", "the type of a message, a reasoning item, a tool call or a tool output"
        )


def _hosted(kind: str) -> bool:
    """Whether items of a kind belong to tools that OpenAI's servers run."""
    ends = ("_call", "_output", "_tools", "_approval_request", "_approval_response")
    return kind.endswith(ends) or kind.startswith(("compaction", "program", "configuration_"))


def _read_reasoning(item: JsonFields) -> str:
    """Returns a reasoning item's text: its content, else `encrypted_content`, else its summary."""
    if content := item.values.get("content"):
        return text_of(content, item.name("content"), TEXTS)
    if text := unsealed(item.values.get("encrypted_content")):
        return text
    return text_of(item.values.get("summary") or [], item.name("summary"), TEXTS)


def sealed(text: str) -> str:
    """Encodes reasoning as `encrypted_content`, without encryption: the client has the text."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unsealed(value: object) -> str:
    """Decodes a result of `sealed`; returns an empty string for any other value."""
    if not isinstance(value, str) or not value.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(value[len(SEALED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _custom_arguments(text: str) -> str:
    return orjson.dumps({"input": text}).decode()


def _response_format(fields: JsonFields) -> dict[str, Any] | None:
    format_ = fields.object("text").object("format")
    kind = format_.chosen("type", ("text", "json_object", "json_schema"))
    if kind != "json_schema":
        return None if kind is None else {"type": kind}
    if not format_.given("schema"):
        raise format_.wrong("schema", "a JSON schema")
    schema = format_.object("schema").values
    name = format_.text("name", 256) or "response"
    return {"type": kind, "json_schema": {"name": name, "schema": schema}}
