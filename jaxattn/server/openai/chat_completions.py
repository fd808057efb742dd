"""POST /v1/chat/completions: a conversation is answered."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxattn.engine.requests.request import MOST_LOGPROBS
from jaxattn.server.decoding.generation import OutputChunk
from jaxattn.server.decoding.logprobs import (
    Chance,
    Spell,
    chat_logprobs,
    read_prompt_logprobs,
)
from jaxattn.server.decoding.sampling_params import MOST_ID, read_sampling
from jaxattn.server.decoding.structured_outputs import read_grammar
from jaxattn.server.decoding.tool_parser import ToolCall, ToolParser
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.response_builder import ChoiceText, ResponseBuilder, read_streaming
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.openai.unsupported_fields import refuse_unsupported
from jaxattn.server.runtime.service import Service
from jaxattn.text import TextError

MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_VARIABLES = 32
OWN_VARIABLES = frozenset(
    # The last is Python's own word for the object whose method is called.
    {"messages", "tools", "documents", "add_generation_prompt", "self"}
)


async def chat_completions(service: Service, exchange: HttpRequest) -> None:
    """Answers one request."""
    arrived = time.perf_counter()
    with service.entered() as ticket:
        fields = await exchange.fields()
        service.check_model(fields)
        refuse_unsupported(fields)
        top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
        if top is not None and not fields.flag("logprobs"):
            raise bad("top_logprobs", "top_logprobs needs logprobs: true; add logprobs")
        logprobs = (top or 0) if fields.flag("logprobs") else None
        most = fields.integer("max_completion_tokens", 1, MOST_ID)
        most = fields.integer("max_tokens", 1, MOST_ID) if most is None else most
        of_prompt = read_prompt_logprobs(fields, MOST_LOGPROBS)
        served = service.served
        sampling = read_sampling(
            fields,
            served.defaults,
            most,
            logprobs,
            prompt_logprobs=of_prompt,
            vocab_size=served.vocab_size,
        )
        streaming = read_streaming(fields)
        tools = read_tools(fields)
        grammar = read_grammar(fields, tools)
        prompt = await encoded(service, fields, tools)
        rooms = [service.room(prompt, "messages")]
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            generation=await service.generation(
                [prompt], rooms, sampling, continues=False, grammar=grammar
            ),
            form=ChatResponseBuilder(
                service.settings.names[0],
                service.fingerprint,
                len(prompt),
                service.tokenizer.token_bytes,
                tools,
                logprobs=logprobs,
                prompt_logprobs=of_prompt,
            ),
            streaming=streaming,
            arrived=arrived,
        ).give()


async def encoded(
    service: Service, fields: JsonFields, tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The conversation as tokens, up to where the answer begins.

    Raises:
        ApiError: 400; the messages are none, or the model's template refuses them.
    """
    messages = fields.objects("messages", MOST_MESSAGES)
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    if not service.tokenizer.has_chat_template:
        raise ApiError(
            400,
            "this model has no chat template; send its text to /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    variables = fields.object("chat_template_kwargs").values
    if len(variables) > MOST_VARIABLES or not OWN_VARIABLES.isdisjoint(variables):
        raise fields.wrong(
            "chat_template_kwargs",
            f"at most {MOST_VARIABLES} variables, and none of {', '.join(sorted(OWN_VARIABLES))}",
        )
    if effort := fields.text("reasoning_effort", 32):
        variables = {"reasoning_effort": effort, **variables}
    begins = fields.flag("add_generation_prompt", True)
    try:
        return await service.in_thread(
            lambda: service.tokenizer.chat(
                messages, tools=tools or None, add_generation_prompt=begins, **variables
            )
        )
    except TextError as error:
        raise bad("messages", " ".join(str(error).split())) from error


def read_tools(fields: JsonFields) -> list[dict[str, Any]]:
    """The tools that the model may call; none where `tool_choice` is "none".

    Raises:
        ApiError: 400; one is no function, or the choice asks for what is not there.
    """
    tools = fields.objects("tools", MOST_TOOLS)
    for place, tool in enumerate(tools):
        function = JsonFields(tool, f"tools[{place}]").object("function")
        if tool.get("type", "function") != "function" or not function.text("name", 128):
            raise bad("tools", f"tools[{place}] must be a function with a name")
        function.object("parameters")
    choice = fields.values.get("tool_choice")
    if choice == "none":
        return []
    if choice not in (None, "auto", "required") and not isinstance(choice, dict):
        raise fields.wrong("tool_choice", "none, auto, required or an object that names a tool")
    if choice not in (None, "auto") and not tools:
        raise bad("tool_choice", "tool_choice needs tools; give some, or leave it out")
    return tools


class ChatResponseBuilder(ResponseBuilder):
    """`chat.completion` and its chunks.

    Args:
        tools: that the model may call; their calls are no part of the content.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        prompt_tokens: int,
        spell: Spell,
        tools: Sequence[Mapping[str, Any]] = (),
        **more: int | None,
    ):
        super().__init__(model, fingerprint, prompt_tokens, spell, **more)
        self._tools = tools
        self._readers: dict[int, ToolParser] = {}
        self._begun: set[int] = set()

    def whole(self, texts: Sequence[ChoiceText], tokens: int) -> dict[str, Any]:
        """As vLLM has it, what is told of the prompt stands beside the choices."""
        return super().whole(texts, tokens) | self.prompt_field(texts[0])

    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text.text}
        if self._tools:
            reader = ToolParser(self._tools)
            content, calls = reader.push(text.text)
            content += reader.end()
            message["content"] = content or None if calls else content
            if calls:
                message["tool_calls"] = [call.json for call in calls]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(text.chances),
            "finish_reason": _finish(text.finish, "tool_calls" in message),
            "stop_reason": text.stop,
        }

    def choices(self, piece: OutputChunk) -> Iterable[dict[str, Any]]:
        number = piece.choice
        if number not in self._begun:
            self._begun.add(number)
            self._readers[number] = ToolParser(self._tools)
            # The role comes with the first token, so that its time can be measured.
            yield from self._deltas(piece, {"role": "assistant", "content": ""})
        else:
            yield from self._deltas(piece, {})

    def _deltas(self, piece: OutputChunk, first: dict[str, Any]) -> Iterable[dict[str, Any]]:
        reader, content, calls = self._readers[piece.choice], piece.text, list[ToolCall]()
        if self._tools:
            content, calls = reader.push(piece.text)
            content += reader.end() if piece.finish else ""
        delta = first | ({"content": content} if content else {})
        if calls:
            begin = len(reader.calls) - len(calls)
            delta["tool_calls"] = [
                {"index": begin + place, **call.json} for place, call in enumerate(calls)
            ]
        if delta or piece.finish or piece.chances:
            yield {
                "index": piece.choice,
                "delta": delta,
                "logprobs": self._logprobs(piece.chances),
                "finish_reason": _finish(piece.finish, bool(reader.calls)),
            }

    def _logprobs(self, chances: Sequence[Chance]) -> dict[str, Any] | None:
        return None if self._most is None else chat_logprobs(chances, self._spell)


def _finish(finish: str | None, called: bool) -> str | None:
    return "tool_calls" if called and finish == "stop" else finish
