"""Requests from the command line: prompts as tokens, sampling parameters and limits."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from jaxattn.cli.options.parser import (
    BATCH,
    CHAT_MODEL_LEN,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    SERVER_BATCH,
    InputError,
    in_options,
)
from jaxattn.cli.serve.default_prompts import PROMPTS
from jaxattn.core.validation.arguments import MOST
from jaxattn.engine.requests.request import Request
from jaxattn.engine.startup.limits_search import BATCH as MOST_ROWS
from jaxattn.memory.engine_limits import Limits, UnsetInt
from jaxattn.models.interface import Model
from jaxattn.text import ByteTokenizer, TextError, Tokenizer

MOST_BYTES_OF_A_TOKEN = 128  # of stdin: a run of spaces or dashes can be one token
PLAIN = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a user asks for.

    Attributes:
        tokens: as the model reads it, with a chat's template around it.
        text: as the user wrote it; None for bytes, which need be no text.
    """

    tokens: Sequence[int]
    text: str | None = None


def read_prompts(
    prompts: Sequence[str] | None, stdin: TextIO | None, most: int = MAX_MODEL_LEN
) -> list[bytes]:
    """The prompts' bytes. Of stdin, which may have no end, at most `most` are read.

    Raises:
        InputError: one is empty, or stdin is asked for twice, closed, or has `most` bytes.
    """
    prompts = PROMPTS if prompts is None else prompts
    if prompts.count("-") > 1:
        raise InputError("--prompt - can be given once: stdin is one prompt")
    found = []
    for place, prompt in enumerate(prompts, 1):
        if prompt != "-":
            data = prompt.encode("utf-8", "surrogateescape")
        elif stdin is None:
            raise InputError("--prompt - reads stdin, which is closed")
        else:
            data = stdin.buffer.read(most)
            if len(data) == most:
                raise InputError(
                    f"--prompt - read {most:,} bytes of stdin, and no prompt of this model length "
                    "has so many: shorten the prompt, or give a larger --max-model-len"
                )
        if not data:
            where = "stdin" if prompt == "-" else f"--prompt number {place}"
            raise InputError(f"{where} is empty; a prompt needs at least one byte")
        found.append(data)
    return found


def encoded_prompts(
    options: argparse.Namespace, tokenizer: Tokenizer, stdin: TextIO | None, length: int
) -> list[Prompt]:
    """The prompts of the options, each in its chat's template if a chat was asked for.

    Raises:
        InputError: see `read_prompts`; or the template refuses them.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [Prompt(data) for data in read_prompts(options.prompt, stdin, length)]
    texts = [
        data.decode("utf-8", "replace")
        for data in read_prompts(options.prompt, stdin, length * MOST_BYTES_OF_A_TOKEN)
    ]
    if not options.chat:
        return [Prompt(plain(tokenizer, each), each) for each in texts]
    before = opening(options)
    return [Prompt(in_template(tokenizer, [*before, user(each)]), each) for each in texts]


def converses(options: argparse.Namespace) -> bool:
    """Whether the lines of stdin are turns of one chat."""
    return options.chat and options.prompt is None


def opening(options: argparse.Namespace) -> list[dict[str, str]]:
    """How a chat begins."""
    return [{"role": "system", "content": options.system}] if options.system else []


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as tokens.

    Raises:
        InputError: the tokenizer gives up on it.
    """
    try:
        return tokenizer.encode(text)
    except TextError as error:
        raise InputError(" ".join(str(error).split())) from error


def in_template(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A chat as tokens, up to where the answer begins.

    Raises:
        InputError: the template refuses it.
    """
    try:
        return tokenizer.chat(messages)
    except TextError as error:
        raise InputError(" ".join(str(error).split())) from error


def check_prompts(prompts: Sequence[Prompt], length: int, longest: int) -> None:
    """Raises InputError if a prompt leaves nothing of `length` to generate."""
    for place, prompt in enumerate(prompts, 1):
        unit = "byte" if prompt.text is None else "token"
        if not prompt.tokens:
            raise InputError(f"prompt {place} has no tokens")
        if len(prompt.tokens) >= length:
            raise InputError(
                f"prompt {place} has {len(prompt.tokens)} {unit}s and the model length is "
                f"{length}, with at least one {unit} to generate; the model goes up to "
                f"--max-model-len {longest}"
            )


def model_length(options: argparse.Namespace, model: Model, platform: str = "cpu") -> int:
    """The longest row, prompt and continuation together, in tokens. On a GPU that of the model, of
    which the engine may choose less (engine/startup/default_limits.py).

    Raises:
        InputError: the model has not that length.
    """
    longest, wanted = model.max_position_embeddings, options.max_model_len
    if wanted is not None and wanted > longest:
        raise InputError(
            f"--max-model-len {wanted} is longer than the model's max_position_embeddings, "
            f"{longest}"
        )
    long = options.chat or options.port is not None
    small = CHAT_MODEL_LEN if long else MAX_MODEL_LEN
    return wanted or (longest if platform == "gpu" else min(small, longest))


def read_limits(options: argparse.Namespace, length: int, platform: str = "cpu") -> Limits:
    """The engine's limits, with what the options leave open as it is on a CPU; `prepare` chooses it
    anew on a GPU. No engine has more rows than a command has prompts.

    Raises:
        InputError: they make no sense; it names the options.
    """
    batch, checkpoints = options.batch, options.checkpoints
    if batch is None and converses(options):
        batch = 1
    elif batch is None and options.port is None and platform == "gpu":
        batch = min(len(options.prompt or PROMPTS), MOST_ROWS)
    elif batch is None:
        batch = UnsetInt(BATCH if options.port is None else SERVER_BATCH)
    if checkpoints is None:  # a conversation's next turn begins as this one ended
        none = options.port is None or options.no_prefix_cache or options.data > 1
        checkpoints = UnsetInt(0 if none else batch)
    try:
        limits = Limits(
            batch=batch,
            max_model_len=options.max_model_len or UnsetInt(length),
            num_pages=options.num_pages,
            prefill_chunk=options.prefill_chunk,
            prefill_rows=options.prefill_rows,
            prefill_tokens=options.prefill_tokens,
            mixed_tokens=options.mixed_tokens,
            reproducible=options.reproducible,
            prefix_cache=not options.no_prefix_cache,
            checkpoints=checkpoints,
            speculate=options.speculate,
            speculate_by=options.speculate_by,
            utilization=options.utilization,
            decode_buckets=options.decode_buckets,
            prefill_buckets=options.prefill_buckets,
            cache_format=options.kv_cache_dtype,
            native_layers=options.kv_cache_native_layers,
        )
    except ValueError as error:
        raise InputError(in_options(error)) from error
    if limits.pages > MOST:
        raise InputError(
            f"--batch {limits.batch} times --max-model-len {limits.max_model_len} is "
            f"{limits.pages:,} pages, and an int32 numbers {MOST:,}: make one of them smaller, or "
            "give --num-pages"
        )
    return limits


@dataclasses.dataclass(frozen=True)
class RequestFactory:
    """Makes the requests of a command, which share all but the prompt.

    Attributes:
        length: of the longest row, prompt and continuation together, in tokens.
    """

    options: argparse.Namespace
    tokenizer: Tokenizer
    length: int

    @property
    def max_tokens(self) -> int:
        return self.options.max_tokens or (self.length if self.options.chat else MAX_TOKENS)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a chat that leave room for an answer, a quarter of the length at most."""
        return self.length - min(self.max_tokens, max(self.length // 4, 1))

    @property
    def sampling(self) -> dict[str, Any]:
        """Each parameter: the user's, else the model's default, else the plain one."""
        found = {}
        for name, plain in PLAIN.items():
            given, default = getattr(self.options, name), getattr(self.tokenizer.defaults, name)
            found[name] = given if given is not None else default if default is not None else plain
        return found

    def request(self, tokens: Sequence[int], number: int) -> Request:
        """The request with this number, which names it and takes part in its draws."""
        return Request(
            tokens,
            max_tokens=self.max_tokens,
            seed=(self.options.seed + number) % 2**32,
            stop_tokens=self.tokenizer.stop_tokens,
            stop_strings=self.options.stop or (),
            id=number,
            **self.sampling,
        )
