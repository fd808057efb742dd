"""The endpoint POST /v1/chat/completions, which answers a conversation."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxattn.engine.requests.request import MOST_LOGPROBS, Request
from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.logprobs import (
    Chance,
    chat_logprobs,
    read_prompt_logprobs,
)
from jaxattn.server.decoding.message_events import (
    ContentDelta,
    MessageParser,
    MessageParts,
    ReasoningDelta,
    ToolCall,
)
from jaxattn.server.decoding.output_collector import OutputChunk, OutputCollector
from jaxattn.server.decoding.sampling_params import MOST_ID, read_sampling
from jaxattn.server.decoding.structured_outputs import read_grammar
from jaxattn.server.decoding.tool_choice import read_tools
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.message_builder import MOST_MESSAGES
from jaxattn.server.openai.response_builder import (
    AnswerDetails,
    ChoiceText,
    ResponseBuilder,
    read_streaming,
)
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.openai.unsupported_fields import refuse_unsupported
from jaxattn.server.runtime.service import Service
from jaxattn.text import TextError

MOST_VARIABLES = 32
PROMPT_END = 32  # tokens; no template adds more after the last message
OWN_VARIABLES = frozenset(
    # `self` would collide with the first parameter of the tokenizer's method.
    {
        *("messages", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "self"),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A validated request to answer a conversation, from any of the APIs.

    Attributes:
        collector: The collector of its engine requests, which are not queued yet.
        parser: Returns a new parser for the text of one choice.
    """

    collector: OutputCollector
    parser: Callable[[], MessageParser]

    @property
    def row(self) -> Request:
        """The engine request of the first choice. All choices have its prompt and log-probability
        fields."""
        return self.collector.requests[0]


async def chat_completions(service: Service, exchange: HttpRequest) -> None:
    """Handles POST /v1/chat/completions."""
    arrived = time.perf_counter()
    with service.entered() as ticket:
        fields = await exchange.fields()
        streaming = read_streaming(fields)
        chat = await read_chat(service, fields)
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            collector=chat.collector,
            form=ChatResponseBuilder(
                service,
                len(chat.row.prompt),
                AnswerDetails(
                    streaming=streaming,
                    token_ids=fields.flag("return_token_ids"),
                    logprobs=chat.row.logprobs,
                    prompt_logprobs=chat.row.prompt_logprobs,
                ),
                chat.parser,
                reasoning=fields.flag("include_reasoning", True),
            ),
            streamed=streaming.stream,
            arrived=arrived,
        ).give()


async def read_chat(service: Service, fields: JsonFields) -> ChatRequest:
    """Validates a request in the format of Chat Completions, to which other APIs translate theirs.

    Raises:
        ApiError: 400 or 404, with the field's name.
    """
    service.check_model(fields)
    refuse_unsupported(fields)
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not fields.flag("logprobs"):
        raise bad("top_logprobs", "top_logprobs needs logprobs: true; add logprobs")
    logprobs = (top or 0) if fields.flag("logprobs") else None
    most = fields.integer("max_completion_tokens", 1, MOST_ID)
    most = fields.integer("max_tokens", 1, MOST_ID) if most is None else most
    served = service.served
    sampling = read_sampling(
        fields,
        served.defaults,
        most,
        logprobs,
        prompt_logprobs=read_prompt_logprobs(fields),
        vocab_size=served.vocab_size,
    )
    choice = read_tools(fields)
    prompt = service.shortened(fields, await encoded(service, fields, choice.tools))
    prompt_end = service.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    answer = AnswerGrammar(service.vocabulary.special_tokens, service.message_format, prompt_end)
    max_new_tokens = [service.room(prompt, "messages")]
    return ChatRequest(
        collector=await service.collector(
            [prompt],
            max_new_tokens,
            sampling,
            continues=False,
            grammar=read_grammar(fields, answer, choice),
            shown=service.message_format.shown(choice),
        ),
        parser=functools.partial(service.message_format.parser, choice, prompt_end),
    )


async def encoded(
    service: Service, fields: JsonFields, tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Returns the tokens of the conversation, up to the beginning of the answer.

    Raises:
        ApiError: 400 if there are no messages, or the model's template rejects them.
    """
    messages = fields.objects("messages", MOST_MESSAGES)
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    if not service.tokenizer.has_chat_template:
        raise ApiError(
            400,
            "this model has no chat template; send a plain prompt to /v1/completions instead",
            param="messages",
            code="no_chat_template",
        )
    variables = fields.object("chat_template_kwargs").values
    if len(variables) > MOST_VARIABLES or not OWN_VARIABLES.isdisjoint(variables):
        raise fields.wrong(
            "chat_template_kwargs",
            f"an object with at most {MOST_VARIABLES} variables, and without "
            f"{', '.join(sorted(OWN_VARIABLES))}",
        )
    if effort := fields.text("reasoning_effort", 32):
        variables = {"reasoning_effort": effort, **variables}
    begins = fields.flag("add_generation_prompt", True)
    if fields.flag("continue_final_message"):
        if begins:
            raise bad(
                "continue_final_message",
                "continue_final_message needs add_generation_prompt: false; add it",
            )
        variables = {**variables, "continue_final_message": True}
    try:
        return await service.in_thread(
            lambda: service.tokenizer.chat(
                messages, tools=list(tools) or None, add_generation_prompt=begins, **variables
            )
        )
    except TextError as error:
        raise bad("messages", " ".join(str(error).split())) from error


class ChatResponseBuilder(ResponseBuilder):
    """The builder of `chat.completion` objects and their chunks.

    Args:
        parser: Returns a new parser for the text of one choice.
        reasoning: Whether the response contains the reasoning.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        prompt_tokens: int,
        details: AnswerDetails,
        parser: Callable[[], MessageParser],
        *,
        reasoning: bool,
    ):
        super().__init__(service, prompt_tokens, details)
        self._parser, self._reasoning = parser, reasoning
        self._parsers: dict[int, MessageParser] = {}
        self._choices_with_calls: set[int] = set()

    def whole(self, collector: OutputCollector) -> dict[str, Any]:
        """Returns the response. As in vLLM, `prompt_logprobs` is a field next to `choices`."""
        return super().whole(collector) | self.prompt_field(self._texts[0])

    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        parser, parts = self._parser(), MessageParts()
        parts.add(parser.feed(text.text))
        parts.add(parser.finish())
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.reasoning and self._reasoning:
            message |= _reasoning_fields(parts.reasoning)
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [call.json for call in parts.calls]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(text.logprobs),
            "finish_reason": _finish(text.finish, bool(parts.calls)),
            "stop_reason": text.stop,
        }

    def text_choice(self, number: int, text: str) -> dict[str, Any]:
        delta, logprobs = {"content": text}, self._logprobs(())
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def choice(self, piece: OutputChunk, *, begins: bool) -> dict[str, Any] | str | None:
        number, delta = piece.choice, dict[str, Any]()
        if begins:
            self._parsers[number] = self._parser()
            # The role comes with the first token, so that clients can measure the token's latency.
            delta = {"role": "assistant", "content": ""}
        parser = self._parsers[number]
        events = parser.feed(piece.text)
        if not begins and piece.finish is None and self._num_logprobs is None:
            match events:
                case [ContentDelta(text)]:
                    return text
        if piece.finish:
            events += parser.finish()
        for event in events:
            match event:
                case ContentDelta():
                    delta["content"] = (delta.get("content") or "") + event.text
                case ReasoningDelta() if self._reasoning:
                    delta |= _reasoning_fields(delta.get("reasoning", "") + event.text)
                case ToolCall():
                    self._choices_with_calls.add(number)
                    calls = delta.setdefault("tool_calls", [])
                    calls.append({"index": event.index, **event.json})
        if not (delta or piece.finish or self.needs_chunk(piece)):
            return None
        return {
            "index": number,
            "delta": delta,
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": _finish(piece.finish, number in self._choices_with_calls),
        }

    def _logprobs(self, token_logprobs: Sequence[Chance]) -> dict[str, Any] | None:
        return None if self._num_logprobs is None else chat_logprobs(token_logprobs, self._spell)


def _reasoning_fields(text: str) -> dict[str, str]:
    """Returns the reasoning under the names of DeepSeek's API and of OpenRouter's."""
    return {"reasoning_content": text, "reasoning": text}


def _finish(finish: str | None, has_tool_calls: bool) -> str | None:
    return "tool_calls" if has_tool_calls and finish == "stop" else finish
