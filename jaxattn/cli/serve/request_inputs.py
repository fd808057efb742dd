"""The requests of the command line: tokenized prompts, sampling parameters and limits."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from jaxattn.cli.options.parser import InputError, in_options
from jaxattn.cli.options.serve_options import (
    BATCH,
    CHAT_MODEL_LEN,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    SERVER_BATCH,
)
from jaxattn.cli.serve.default_prompts import PROMPTS
from jaxattn.core.validation.arguments import MOST
from jaxattn.engine.requests.request import Request
from jaxattn.engine.startup.limits_search import BATCH as MOST_ROWS
from jaxattn.limits import Limits, UnsetInt
from jaxattn.models.interface import Model
from jaxattn.text import ByteTokenizer, TextError, Tokenizer

MOST_BYTES_OF_A_TOKEN = 128  # a long run of spaces or dashes in stdin can be one token
PLAIN = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A user's prompt.

    Attributes:
        tokens: The token ids, with the chat template applied for a chat.
        text: The text that the user wrote; None for a prompt of bytes.
    """

    tokens: Sequence[int]
    text: str | None = None


def read_prompts(
    prompts: Sequence[str] | None, stdin: TextIO | None, max_bytes: int = MAX_MODEL_LEN
) -> list[bytes]:
    """Returns the bytes of the prompts. Reads at most `max_bytes` bytes of stdin.

    Raises:
        InputError: If a prompt is empty, or stdin is used twice, closed, or at least `max_bytes`
            bytes long.
    """
    prompts = PROMPTS if prompts is None else prompts
    if prompts.count("-") > 1:
        raise InputError("--prompt - can be given only once, because stdin is a single prompt")
    prompt_bytes = []
    for number, prompt in enumerate(prompts, 1):
        if prompt != "-":
            data = prompt.encode("utf-8", "surrogateescape")
        elif stdin is None:
            raise InputError("--prompt - reads stdin, but stdin is closed")
        else:
            data = stdin.buffer.read(max_bytes)
            if len(data) == max_bytes:
                raise InputError(
                    f"--prompt - read {max_bytes:,} bytes of stdin, more than any prompt of this "
                    "model length has; shorten the prompt, or give a larger --max-model-len"
                )
        if not data:
            where = "stdin" if prompt == "-" else f"--prompt number {number}"
            raise InputError(f"{where} is empty; a prompt needs at least one byte")
        prompt_bytes.append(data)
    return prompt_bytes


def encoded_prompts(
    options: argparse.Namespace, tokenizer: Tokenizer, stdin: TextIO | None, length: int
) -> list[Prompt]:
    """Returns the tokenized prompts of the options, with --chat each in the chat template.

    Raises:
        InputError: See `read_prompts`. Also if the chat template rejects a prompt.
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
    return [Prompt(apply_chat_template(tokenizer, [*before, user(each)]), each) for each in texts]


def converses(options: argparse.Namespace) -> bool:
    """Whether the options ask for a conversation, whose turns are the lines of stdin."""
    return options.chat and options.prompt is None


def opening(options: argparse.Namespace) -> list[dict[str, str]]:
    """Returns the messages with which a chat begins."""
    return [{"role": "system", "content": options.system}] if options.system else []


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a text.

    Raises:
        InputError: If the tokenizer fails on the text.
    """
    try:
        return tokenizer.encode(text)
    except TextError as error:
        raise InputError(" ".join(str(error).split())) from error


def apply_chat_template(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the tokens of a chat, up to the beginning of the answer.

    Raises:
        InputError: If the template rejects the messages.
    """
    try:
        return tokenizer.chat(messages)
    except TextError as error:
        raise InputError(" ".join(str(error).split())) from error


def check_prompts(prompts: Sequence[Prompt], length: int, max_length: int) -> None:
    """Raises InputError if a prompt is empty, or leaves no room to generate within `length`."""
    for number, prompt in enumerate(prompts, 1):
        unit = "byte" if prompt.text is None else "token"
        if not prompt.tokens:
            raise InputError(f"prompt {number} has no tokens")
        if len(prompt.tokens) >= length:
            raise InputError(
                f"prompt {number} has {len(prompt.tokens)} {unit}s, but the model length is "
                f"{length}, including at least one generated {unit}; --max-model-len can be at "
                f"most {max_length}"
            )


def model_length(options: argparse.Namespace, model: Model, platform: str = "cpu") -> int:
    """Returns the maximum tokens of a row, prompt and continuation together. On a GPU the default
    is the model's context, and the engine may choose less (engine/startup/default_limits.py).

    Raises:
        InputError: If --max-model-len exceeds the model's context.
    """
    context_length, requested = model.max_position_embeddings, options.max_model_len
    if requested is not None and requested > context_length:
        raise InputError(
            f"--max-model-len {requested} exceeds the model's max_position_embeddings, "
            f"{context_length}"
        )
    is_chat_or_server = options.chat or options.port is not None
    default_length = CHAT_MODEL_LEN if is_chat_or_server else MAX_MODEL_LEN
    return requested or (
        context_length if platform == "gpu" else min(default_length, context_length)
    )


def read_limits(options: argparse.Namespace, length: int, platform: str = "cpu") -> Limits:
    """Returns the engine's limits. Limits without an option get the defaults for a CPU, which
    `prepare` replaces on a GPU. Without --batch and --port, a GPU gets at most a row per prompt.

    Raises:
        InputError: If the limits are invalid. The error names the options.
    """
    batch, checkpoints = options.batch, options.checkpoints
    if batch is None and converses(options):
        batch = 1
    elif batch is None and options.port is None and platform == "gpu":
        batch = min(len(options.prompt or PROMPTS), MOST_ROWS)
    elif batch is None:
        batch = UnsetInt(BATCH if options.port is None else SERVER_BATCH)
    if checkpoints is None:  # a server resumes a conversation where its last turn ended
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
            f"--batch {limits.batch} times --max-model-len {limits.max_model_len} needs "
            f"{limits.pages:,} pages, but an int32 can number only {MOST:,}; decrease one of them, "
            "or give --num-pages"
        )
    return limits


@dataclasses.dataclass(frozen=True)
class RequestFactory:
    """The factory of a command's requests, which share everything except the prompt and the seed.

    Attributes:
        length: The maximum tokens of a row, prompt and continuation together.
    """

    options: argparse.Namespace
    tokenizer: Tokenizer
    length: int

    @property
    def max_tokens(self) -> int:
        return self.options.max_tokens or (self.length if self.options.chat else MAX_TOKENS)

    @property
    def longest_prompt(self) -> int:
        """The maximum tokens of a chat's prompt. It reserves up to a quarter of the row for the
        answer."""
        return self.length - min(self.max_tokens, max(self.length // 4, 1))

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters: the options, else the model's defaults, else `PLAIN`."""
        found = {}
        for name, plain in PLAIN.items():
            given, default = getattr(self.options, name), getattr(self.tokenizer.defaults, name)
            found[name] = given if given is not None else default if default is not None else plain
        return found

    def request(self, tokens: Sequence[int], number: int) -> Request:
        """Returns a request. Its number is its id, and is added to the seed."""
        return Request(
            tokens,
            max_tokens=self.max_tokens,
            seed=(self.options.seed + number) % 2**32,
            stop_tokens=self.tokenizer.stop_tokens,
            stop_strings=self.options.stop or (),
            id=number,
            **self.sampling,
        )
