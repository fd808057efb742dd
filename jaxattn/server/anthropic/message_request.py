"""The translation of requests from Anthropic's Messages API to Chat Completions.

It skips tools and blocks that only Anthropic's servers can run, such as web_search. The model
answers without them.
"""

from typing import Any

import orjson

from jaxattn.server.decoding.sampling_params import MOST_ID
from jaxattn.server.decoding.tool_choice import MOST_TOOLS
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.openai.message_builder import (
    MOST_MESSAGES,
    SAMPLING_FIELDS,
    MessageList,
    text_of,
)

TEXTS = ("text",)
ROLES = ("user", "assistant", "system")
SKIPPED = ("redacted_thinking", "server_tool_use", "container_upload", "tool_reference")
# Fields of Chat Completions -> fields of this API, for error messages.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


def as_chat(fields: JsonFields) -> JsonFields:
    """Returns the request in the format of Chat Completions.

    Raises:
        ApiError: 400 with the name of the field in this API.
    """
    chat: dict[str, Any] = {name: fields.values.get(name) for name in SAMPLING_FIELDS}
    chat["messages"] = _messages(fields)
    if chat["messages"][-1]["role"] == "assistant":  # the answer continues this message
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools := _tools(fields):
        chat["tools"] = tools
    chat |= _tool_choice(fields)
    chat["max_completion_tokens"] = fields.integer("max_tokens", 1, MOST_ID)
    chat["stop"] = fields.values.get("stop_sequences")
    chat |= _output(fields)
    thinks = _wants_reasoning(fields)
    chat["chat_template_kwargs"] = {
        "enable_thinking": thinks,
        "thinking": thinks,
        **fields.object("chat_template_kwargs").values,
    }
    return JsonFields(chat)


def _wants_reasoning(fields: JsonFields) -> bool:
    """Whether the model should reason, if its template has this option. By default it does not, as
    clients without the field take the first block for the answer's text."""
    kinds = ("enabled", "adaptive", "between_tools", "disabled")
    return fields.object("thinking").chosen("type", kinds) not in (None, "disabled")


def _messages(fields: JsonFields) -> list[dict[str, Any]]:
    given = fields.objects("messages", MOST_MESSAGES)
    if not given:
        raise fields.wrong("messages", "a list of at least one message")
    message_list = MessageList()
    if (system := fields.values.get("system")) is not None:
        if text := text_of(system, "system", TEXTS):
            message_list.say("system", text)
    for place, message in enumerate(given):
        reader = JsonFields(message, f"messages[{place}]")
        role = reader.chosen("role", ROLES)
        if role is None:
            raise reader.wrong("role", f"one of {', '.join(ROLES)}")
        _add(message_list, role, reader)
    if not message_list.messages:
        raise fields.wrong(
            "messages",
            "a list with at least one message that has text, a tool call or a tool result",
        )
    return message_list.messages


def _add(message_list: MessageList, role: str, message: JsonFields) -> None:
    content, content_path = message.values.get("content"), message.name("content")
    if isinstance(content, str) or not isinstance(content, list):
        message_list.say(role, text_of(content, content_path, TEXTS))
        return
    pending_texts: list[str] = []  # successive texts, which become one message

    def flush() -> None:
        if pending_texts:
            message_list.say(role, "".join(pending_texts))
            pending_texts.clear()

    for place, block in enumerate(content):
        name = f"{content_path}[{place}]"
        reader = JsonFields(block, name) if isinstance(block, dict) else None
        kind = reader.values.get("type") if reader else None
        if reader is None or kind == "text":
            pending_texts.append(
                text_of([block], content_path, TEXTS) if kind else text_of(block, name, TEXTS)
            )
        elif kind == "document":
            pending_texts.append(_document(reader))
        elif kind == "thinking":
            flush()
            if thoughts := reader.text("thinking"):
                message_list.think(thoughts)
        elif kind == "tool_use":
            flush()
            arguments = orjson.dumps(reader.object("input").values).decode()
            message_list.call(_needed(reader, "id"), _needed(reader, "name"), arguments)
        elif kind == "tool_result":
            flush()
            result = reader.values.get("content")
            text = "" if result is None else text_of(_texts(result), f"{name}.content", TEXTS)
            message_list.result(_needed(reader, "tool_use_id"), text)
        elif not isinstance(kind, str) or not (kind in SKIPPED or kind.endswith("_tool_result")):
            text_of([block], content_path, TEXTS)  # raises the error for an unsupported block
    flush()


def _texts(content: object) -> object:
    """Returns the content of a tool result without its tool references."""
    if not isinstance(content, list):
        return content
    return [
        each
        for each in content
        if not (isinstance(each, dict) and each.get("type") == "tool_reference")
    ]


def _document(block: JsonFields) -> str:
    source = block.object("source")
    if source.chosen("type", ("text",)) is None:
        raise source.wrong("type", "text")
    return source.text("data") or ""


def _needed(block: JsonFields, field: str) -> str:
    value = block.text(field, 256)
    if not value:
        raise block.wrong(field, "a string of 1 to 256 characters")
    return value


def _tools(fields: JsonFields) -> list[dict[str, Any]]:
    found = []
    for place, tool in enumerate(fields.objects("tools", MOST_TOOLS)):
        reader = JsonFields(tool, f"tools[{place}]")
        if tool.get("type") not in (None, "custom"):
            continue
        function: dict[str, Any] = {
            "name": _needed(reader, "name"),
            "description": reader.text("description") or "",
            "parameters": reader.object("input_schema").values,
        }
        if strict := reader.flag("strict"):
            function["strict"] = strict
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(fields: JsonFields) -> dict[str, Any]:
    choice = fields.object("tool_choice")
    if not choice.values:
        return {}
    kind = choice.chosen("type", ("auto", "any", "tool", "none"))
    if kind is None:
        raise choice.wrong("type", "one of auto, any, tool, none")
    chosen: Any = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": _needed(choice, "name")}}
    parallel = not choice.flag("disable_parallel_tool_use")
    return {"tool_choice": chosen} | ({} if parallel else {"parallel_tool_calls": False})


def _output(fields: JsonFields) -> dict[str, Any]:
    """Returns the reasoning effort and the answer's schema. `output_format` is an older name of the
    schema's field."""
    config, found = fields.object("output_config"), dict[str, Any]()
    if effort := config.text("effort", 32):
        found["reasoning_effort"] = effort
    format_ = config.object("format") if config.given("format") else fields.object("output_format")
    if not format_.values:
        return found
    if format_.chosen("type", ("json_schema",)) is None or not format_.given("schema"):
        raise format_.wrong("schema", "a JSON schema in a format of type json_schema")
    schema = format_.object("schema").values
    found["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    return found
