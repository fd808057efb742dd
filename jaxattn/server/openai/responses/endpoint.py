"""The endpoints of the Responses API, built on Chat Completions and the store of responses."""

import time
from typing import Any

from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.errors import bad, renamed_errors
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.chat_completions import encoded, read_chat
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.openai.responses.input_items import (
    NAMES,
    as_chat,
    input_items,
)
from jaxattn.server.openai.responses.output_items import ResponseErrors, ResponseForm
from jaxattn.server.openai.responses.tools import ResponseTools
from jaxattn.server.runtime.service import Service

MOST_METADATA = 16
INCLUDABLE = 32
# Request fields that the response repeats -> their values if the request does not set them.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


async def create_response(service: Service, exchange: HttpRequest) -> None:
    """Handles POST /v1/responses."""
    arrived = time.perf_counter()
    with service.entered() as ticket, renamed_errors(NAMES):
        fields = await exchange.fields()
        if len(fields.object("metadata").values) > MOST_METADATA:
            raise fields.wrong("metadata", f"an object with at most {MOST_METADATA} keys")
        items = conversation(service, fields)
        stores, streamed = fields.flag("store", True), fields.flag("stream")
        tools = ResponseTools(fields)
        chat = await read_chat(service, as_chat(fields, items, tools))

        def keep(response: dict[str, Any]) -> None:
            if stores:
                service.responses.put(response, items)

        given = {name: fields.values.get(name) for name in REPEATED}
        head = {name: REPEATED[name] if given[name] is None else given[name] for name in REPEATED}
        form = ResponseForm(
            {"model": service.settings.names[0], **head},
            len(chat.row.prompt),
            chat.parser(),
            tools,
            seals="reasoning.encrypted_content" in fields.texts("include", INCLUDABLE, 256),
            spell=None if chat.row.logprobs is None else service.tokenizer.token_bytes,
            on_done=keep,
        )
        if streamed:
            exchange.stream_errors = ResponseErrors(form)
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            collector=chat.collector,
            form=form,
            streamed=streamed,
            arrived=arrived,
        ).give()


async def count_input_tokens(service: Service, exchange: HttpRequest) -> None:
    """Handles POST /v1/responses/input_tokens: answers with the number of tokens of an input."""
    with service.entered(), renamed_errors(NAMES):
        fields = await exchange.fields()
        service.check_model(fields)
        chat = as_chat(fields, conversation(service, fields), ResponseTools(fields))
        prompt = await encoded(service, chat, read_tools(chat).tools)
        await exchange.json({"object": "response.input_tokens", "input_tokens": len(prompt)})


async def get_response(service: Service, exchange: HttpRequest) -> None:
    """Handles GET /v1/responses/{id}."""
    await exchange.json(service.responses.response(exchange.path("response_id")))


async def delete_response(service: Service, exchange: HttpRequest) -> None:
    """Handles DELETE /v1/responses/{id}."""
    id = exchange.path("response_id")
    service.responses.remove(id, "response_id")
    await exchange.json({"id": id, "object": "response", "deleted": True})


def conversation(service: Service, fields: JsonFields) -> list[Any]:
    """Returns the items of the conversation so far and of the request, with references resolved.

    Raises:
        ApiError: 404 if the previous response is not stored, 400 if a referenced item is not.
    """
    previous_items: list[Any] = []
    if (previous := fields.text("previous_response_id", 256)) is not None:
        previous_items = service.responses.items(previous, "previous_response_id")
    found = []
    for place, item in enumerate(input_items(fields)):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            id = JsonFields(item, f"input[{place}]").text("id", 256) or ""
            stored = service.responses.item(id)
            if stored is None:
                raise bad(f"input[{place}].id", f"input[{place}].id {id!r} is not stored")
            item = stored
        found.append(item)
    return previous_items + found
