"""The endpoints POST /v1/messages and /v1/messages/count_tokens, built on Chat Completions."""

import time

from jaxattn.server.anthropic.message_request import NAMES, as_chat
from jaxattn.server.anthropic.message_response import MessageForm
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.errors import renamed_errors
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.chat_completions import encoded, read_chat
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.runtime.service import Service


async def create_message(service: Service, exchange: HttpRequest) -> None:
    """Handles POST /v1/messages."""
    arrived = time.perf_counter()
    with service.entered() as ticket, renamed_errors(NAMES):
        fields = await exchange.fields()
        streamed = fields.flag("stream")
        chat = await read_chat(service, as_chat(fields))
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            collector=chat.collector,
            form=MessageForm(service.settings.names[0], len(chat.row.prompt), chat.parser()),
            streamed=streamed,
            arrived=arrived,
        ).give()


async def count_tokens(service: Service, exchange: HttpRequest) -> None:
    """Answers with the number of tokens that the prompt of a message would have."""
    with service.entered(), renamed_errors(NAMES):
        fields = await exchange.fields()
        service.check_model(fields)
        chat = as_chat(fields)
        prompt = await encoded(service, chat, read_tools(chat).tools)
        await exchange.json({"input_tokens": len(prompt)})
