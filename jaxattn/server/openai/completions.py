"""POST /v1/completions: a text or tokens are continued."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxattn.core.validation.array_checks import is_integer
from jaxattn.engine.requests.request import MOST_LOGPROBS
from jaxattn.server.decoding.generation import OutputChunk
from jaxattn.server.decoding.grammars.answer_grammar import AnswerGrammar
from jaxattn.server.decoding.logprobs import Chance, Spell, completion_logprobs
from jaxattn.server.decoding.sampling_params import read_sampling
from jaxattn.server.decoding.structured_outputs import read_grammar
from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.server.http.request import HttpRequest
from jaxattn.server.openai.response_builder import (
    WHOLE,
    ChoiceText,
    ResponseBuilder,
    StreamOptions,
    read_streaming,
)
from jaxattn.server.openai.response_writer import ResponseWriter
from jaxattn.server.openai.unsupported_fields import refuse_unsupported
from jaxattn.server.runtime.service import Service
from jaxattn.server.settings import MOST_CHOICES
from jaxattn.text import TextError

MAX_TOKENS = 16  # OpenAI's default
MOST_ID = 2**31 - 1


async def completions(service: Service, exchange: HttpRequest) -> None:
    """Answers one request."""
    arrived = time.perf_counter()
    with service.entered() as ticket:
        fields = await exchange.fields()
        service.check_model(fields)
        refuse_unsupported(fields)
        grammar = read_grammar(fields, AnswerGrammar(service.vocabulary.special_tokens))
        logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
        most = fields.integer("max_tokens", 1, MOST_ID) or MAX_TOKENS
        served = service.served
        sampling = read_sampling(
            fields, served.defaults, most, logprobs, vocab_size=served.vocab_size
        )
        if (fields.integer("best_of", 1, MOST_ID) or sampling.choices) != sampling.choices:
            raise bad("best_of", "best_of must be n; leave it out")
        streaming = read_streaming(fields)
        given = read_prompts(fields)
        if len(given) * sampling.choices > MOST_CHOICES:
            raise bad(
                "prompt",
                f"{len(given)} prompts with n = {sampling.choices} ask for more than "
                f"{MOST_CHOICES} continuations; send them in several requests",
            )
        prompts = await service.in_thread(lambda: [_tokens(service, each) for each in given])
        prompts = [service.shortened(fields, prompt) for prompt in prompts]
        rooms = [service.room(prompt, "prompt") for prompt in prompts]
        repeated = [prompt for prompt in prompts for _ in range(sampling.choices)]
        echoes = [""] * len(prompts)
        if fields.flag("echo"):
            echoes = [_text(service, each) for each in given]
        await ResponseWriter(
            service=service,
            exchange=exchange,
            ticket=ticket,
            generation=await service.generation(
                prompts, rooms, sampling, continues=True, grammar=grammar
            ),
            form=CompletionResponseBuilder(
                service.settings.names[0],
                service.fingerprint,
                sum(map(len, prompts)),
                [echo for echo in echoes for _ in range(sampling.choices)],
                None if logprobs is None else service.tokenizer.token_bytes,
                streaming,
                repeated if fields.flag("return_token_ids") else None,
            ),
            streamed=streaming.stream,
            arrived=arrived,
        ).give()


def read_prompts(fields: JsonFields) -> Sequence[str | list[int]]:
    """The field `prompt`: a text, a list of tokens, or a list of either."""
    prompt = fields.values.get("prompt")
    wanted = "a text, a list of texts, a list of tokens or a list of lists of tokens"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong("prompt", wanted)
    if all(map(is_integer, prompt)):
        return [prompt]
    if len(prompt) > MOST_CHOICES:
        raise bad(
            "prompt",
            f"prompt has {len(prompt):,} prompts, and a request may have {MOST_CHOICES}; send them "
            "in several requests",
        )
    for each in prompt:
        tokens = isinstance(each, list) and each and all(map(is_integer, each))
        if not tokens and not isinstance(each, str):
            raise fields.wrong("prompt", wanted)
    return prompt


def _tokens(service: Service, prompt: str | list[int]) -> Sequence[int]:
    return tokens_of(service, prompt) if isinstance(prompt, str) else prompt


def tokens_of(service: Service, text: str) -> list[int]:
    """The tokens of a plain prompt.

    Raises:
        ApiError: 400; the tokenizer gives up on it.
    """
    try:
        return service.tokenizer.encode(text)
    except TextError as error:
        raise bad("prompt", " ".join(str(error).split())) from error


def _text(service: Service, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt)


class CompletionResponseBuilder(ResponseBuilder):
    """`text_completion`, for the whole and for chunks.

    Args:
        echoes: what stands before each choice's text.
    """

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        prompt_tokens: int,
        echoes: Sequence[str],
        spell: Spell | None = None,
        streaming: StreamOptions = WHOLE,
        prompt_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(model, fingerprint, prompt_tokens, spell, streaming, prompt_ids)
        self._echoes, self._begun = echoes, set[int]()
        self._offsets: dict[int, int] = {}

    def whole_choice(self, number: int, text: ChoiceText) -> dict[str, Any]:
        echoed = dataclasses.replace(text, text=self._echoes[number] + text.text)
        return self._choice(number, echoed.text, text.finish, text.chances) | {
            "stop_reason": text.stop
        }

    def text_choice(self, number: int, text: str) -> dict[str, Any]:
        return self._choice(number, text, None, ())

    def choices(self, piece: OutputChunk) -> Iterable[dict[str, Any] | str]:
        text, first = piece.text, piece.choice not in self._begun
        if text and not first and piece.finish is None and self._spell is None:
            yield text
            return
        if first:
            self._begun.add(piece.choice)
            text = self._echoes[piece.choice] + text
        if text or first or piece.finish or self.told_of(piece):
            yield self._choice(piece.choice, text, piece.finish, piece.chances)

    def _choice(
        self, number: int, text: str, finish: str | None, chances: Sequence[Chance]
    ) -> dict[str, Any]:
        logprobs = None
        if self._spell is not None:
            offset = self._offsets.setdefault(number, len(self._echoes[number]))
            logprobs = completion_logprobs(chances, self._spell, offset)
            self._offsets[number] += sum(map(len, logprobs["tokens"]))
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}
