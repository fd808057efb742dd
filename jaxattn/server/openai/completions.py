"""The endpoint POST /v1/completions, which continues texts or tokens."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxattn.core.validation.array_checks import is_integer
from jaxattn.engine.requests.request import MOST_LOGPROBS
from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.logprobs import (
    completion_logprobs,
    prompt_offsets,
    read_prompt_logprobs,
)
from jaxattn.server.decoding.output_collector import OutputChunk
from jaxattn.server.decoding.sampling_params import MOST_ID, read_sampling
from jaxattn.server.decoding.structured_outputs import read_grammar
from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.response_builder import (
    AnswerDetails,
    ChoiceText,
    ResponseBuilder,
    read_streaming,
)
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.openai.unsupported_fields import refuse_unsupported
from jaxattn.server.runtime.service import Service
from jaxattn.server.settings import MOST_CHOICES
from jaxattn.text import TextError

MAX_TOKENS = 16  # OpenAI's default


async def completions(service: Service, exchange: HttpRequest) -> None:
    """Handles POST /v1/completions."""
    arrived = time.perf_counter()
    with service.entered() as ticket:
        fields = await exchange.fields()
        service.check_model(fields)
        refuse_unsupported(fields)
        grammar = read_grammar(fields, AnswerGrammar(service.vocabulary.special_tokens))
        logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
        num_prompt_logprobs, echo = read_prompt_logprobs(fields), fields.flag("echo")
        max_tokens = fields.integer("max_tokens", 0, MOST_ID)
        max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
        logprob_counts = [num_prompt_logprobs, logprobs if echo else None]
        served = service.served
        sampling = read_sampling(
            fields,
            served.defaults,
            max_tokens,
            logprobs,
            prompt_logprobs=max(
                (each for each in logprob_counts if each is not None), default=None
            ),
            vocab_size=served.vocab_size,
        )
        if (fields.integer("best_of", 1, MOST_ID) or sampling.choices) != sampling.choices:
            raise bad("best_of", "best_of must be equal to n; leave it out")
        streaming = read_streaming(fields)
        request_prompts = read_prompts(fields, "prompt", MOST_CHOICES)
        if len(request_prompts) * sampling.choices > MOST_CHOICES:
            raise bad(
                "prompt",
                f"{len(request_prompts)} prompts with n={sampling.choices} need more than "
                f"{MOST_CHOICES} completions; send them in several requests",
            )
        prompts = await encoded_prompts(service, request_prompts, "prompt")
        prompts = [service.shortened(fields, prompt) for prompt in prompts]
        max_new_tokens = [
            service.room(prompt, "prompt", min_new_tokens=min(max_tokens, 1)) for prompt in prompts
        ]
        echoes = [Echo()] * len(prompts)
        if echo:
            truncated = fields.values.get("truncate_prompt_tokens") is not None
            texts = [list(prompt) for prompt in prompts] if truncated else request_prompts
            echoes = await service.in_thread(
                lambda: [_echo(service, *each) for each in zip(texts, prompts, strict=True)]
            )
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            collector=await service.collector(
                prompts, max_new_tokens, sampling, continues=True, grammar=grammar
            ),
            form=CompletionResponseBuilder(
                service,
                sum(map(len, prompts)),
                AnswerDetails(
                    streaming=streaming,
                    token_ids=fields.flag("return_token_ids"),
                    logprobs=logprobs,
                    prompt_logprobs=num_prompt_logprobs,
                ),
                [echo for echo in echoes for _ in range(sampling.choices)],
            ),
            streamed=streaming.stream,
            arrived=arrived,
        ).give()


def read_prompts(fields: JsonFields, name: str, max_prompts: int) -> Sequence[str | list[int]]:
    """Reads a field that is a string, a list of tokens, or a list of `max_prompts` or fewer."""
    prompt = fields.values.get(name)
    wanted = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong(name, wanted)
    if all(map(is_integer, prompt)):
        return [prompt]
    if len(prompt) > max_prompts:
        raise bad(
            name,
            f"{name} has {len(prompt):,} prompts, but at most {max_prompts:,} are allowed; send "
            "them in several requests",
        )
    for each in prompt:
        tokens = isinstance(each, list) and each and all(map(is_integer, each))
        if not tokens and not isinstance(each, str):
            raise fields.wrong(name, wanted)
    return prompt


async def encoded_prompts(
    service: Service, prompts: Sequence[str | list[int]], name: str
) -> list[Sequence[int]]:
    """Returns the tokens of prompts without a chat template.

    Args:
        name: The name of the prompts' field, for errors.

    Raises:
        ApiError: 400 if the tokenizer fails on a prompt.
    """
    encode = service.tokenizer.encode
    try:
        return await service.in_thread(
            lambda: [encode(each) if isinstance(each, str) else each for each in prompts]
        )
    except TextError as error:
        raise bad(name, " ".join(str(error).split())) from error


class Echo(NamedTuple):
    """The echo of a prompt before a choice's text; empty if the request does not ask for it.

    Attributes:
        text: The prompt's text.
        offsets: The offset of each prompt token in the text.
    """

    text: str = ""
    offsets: Sequence[int] = ()


def _echo(service: Service, request_prompt: str | list[int], prompt: Sequence[int]) -> Echo:
    """Returns the echo of a prompt, which is the given text or the decoded tokens."""
    tokenizer, is_text = service.tokenizer, isinstance(request_prompt, str)
    text = request_prompt if isinstance(request_prompt, str) else tokenizer.decode(request_prompt)
    return Echo(text, prompt_offsets(tokenizer, prompt, text, is_client_text=is_text))


class CompletionResponseBuilder(ResponseBuilder):
    """The builder of `text_completion` objects, for whole responses and for chunks.

    Args:
        echoes: The echo of each choice.
    """

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        service: Service,
        prompt_tokens: int,
        details: AnswerDetails,
        echoes: Sequence[Echo],
    ) -> None:
        super().__init__(service, prompt_tokens, details)
        self._echoes = echoes

    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        own = self._choice(number, text, begins=True) | {"stop_reason": text.stop}
        return own | self.prompt_field(text)

    def text_choice(self, number: int, text: str) -> dict[str, Any]:
        return self._choice(number, ChoiceText(text), begins=False)

    def choice(self, piece: OutputChunk, *, begins: bool) -> dict[str, Any] | str | None:
        if piece.text and not begins and piece.finish is None and self._num_logprobs is None:
            return piece.text
        if piece.text or begins or piece.finish or self.needs_chunk(piece):
            return self._choice(piece.choice, piece, begins=begins)
        return None

    def _choice(
        self, number: int, output: OutputChunk | ChoiceText, *, begins: bool
    ) -> dict[str, Any]:
        """Returns a choice's JSON. The first piece of a choice begins with the echo."""
        echo = self._echoes[number]
        return {
            "index": number,
            "text": echo.text + output.text if begins else output.text,
            "logprobs": None
            if self._num_logprobs is None
            else self._logprobs(echo, output, self._num_logprobs),
            "finish_reason": output.finish,
        }

    def _logprobs(
        self, echo: Echo, output: OutputChunk | ChoiceText, num_logprobs: int
    ) -> dict[str, Any]:
        """Returns the log-probabilities, with offsets from the beginning of the echo."""
        echo_length, new_logprobs = len(echo.text), output.logprobs
        shifted_logprobs = [
            each._replace(offset=echo_length + each.offset) for each in new_logprobs
        ]
        prompt = zip(output.prompt, echo.offsets, strict=False)  # no offsets without an echo
        echo_logprobs = [each._replace(offset=offset) for each, offset in prompt]
        return completion_logprobs([*echo_logprobs, *shifted_logprobs], self._spell, num_logprobs)
