"""Log-probabilities in OpenAI's two formats, and in vLLM's format for prompts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxattn.engine.requests.outputs import Logprobs
from jaxattn.engine.requests.request import MOST_LOGPROBS
from jaxattn.server.http.errors import bad
from jaxattn.server.http.json_fields import JsonFields
from jaxattn.text import Tokenizer

LEAST = -9999.0  # JSON has no infinity

type Spell = Callable[[int], bytes]


class Chance(NamedTuple):
    """A token of a text and its log-probabilities.

    Attributes:
        token: The token id.
        logprobs: The log-probabilities; None for a prompt's first token.
        offset: The number of complete characters of the text before the token.
    """

    token: int
    logprobs: Logprobs | None
    offset: int = 0


def read_prompt_logprobs(fields: JsonFields) -> int | None:
    """Reads vLLM's field `prompt_logprobs`.

    Raises:
        ApiError: 400 if it is not a count, or if the answer is streamed: a stream has no field for
            prompt log-probabilities.
    """
    found = fields.integer("prompt_logprobs", 0, MOST_LOGPROBS)
    if found is not None and fields.flag("stream"):
        raise bad("prompt_logprobs", "prompt_logprobs needs stream: false; leave stream out")
    return found


def chat_logprobs(token_logprobs: Sequence[Chance], spell: Spell) -> dict[str, Any]:
    """Returns `logprobs` of a chat choice: each token, and the most likely tokens at its place."""
    return {
        "content": [
            {
                **_entry(token, found.token, spell),
                "top_logprobs": [_entry(other, value, spell) for other, value in found.top],
            }
            for token, found, _ in token_logprobs
            if found is not None
        ]
    }


def completion_logprobs(
    token_logprobs: Sequence[Chance], spell: Spell, num_logprobs: int
) -> dict[str, Any]:
    """Returns `logprobs` of a completion choice, with `num_logprobs` likely tokens per token."""
    pairs = [(each.token, each.logprobs) for each in token_logprobs]
    return {
        "tokens": [_text(token, spell) for token, _ in pairs],
        "token_logprobs": [found and max(found.token, LEAST) for _, found in pairs],
        "top_logprobs": [
            found and _likely(token, found, spell, num_logprobs) for token, found in pairs
        ],
        "text_offset": [each.offset for each in token_logprobs],
    }


def prompt_logprobs(token_logprobs: Sequence[Chance], spell: Spell, num_logprobs: int) -> list[Any]:
    """Returns vLLM's `prompt_logprobs`: for each token, it and the most likely tokens by id."""
    return [
        each.logprobs and _ranked(each.token, each.logprobs, spell, num_logprobs)
        for each in token_logprobs
    ]


def prompt_offsets(
    tokenizer: Tokenizer, prompt: Sequence[int], text: str, *, is_client_text: bool
) -> list[int]:
    """Returns the number of complete characters of a prompt's text before each of its tokens.

    Args:
        is_client_text: Whether `text` is the prompt as the client sent it, which may contain
            special tokens. A token without text, such as BOS, has the offset of the next token.
    """
    stream, offset, offsets = tokenizer.stream(skip_special_tokens=not is_client_text), 0, []
    for token in prompt:
        offsets.append(offset)
        piece = stream.push(token)
        if text.startswith(piece, offset):
            offset += len(piece)
    return offsets


def _likely(token: int, logprobs: Logprobs, spell: Spell, num_logprobs: int) -> dict[str, float]:
    """Returns the log-probabilities of the token and the most likely tokens by their text.

    Tokens can share a text, as parts of characters do. Then the first one gets the text as its key,
    and the others get vLLM's `token_id:` names.
    """
    texts: dict[str, float] = {}
    for other, value in _unique(token, logprobs, num_logprobs):
        text = _text(other, spell)
        texts[f"token_id:{other}" if text in texts else text] = max(value, LEAST)
    return texts


def _ranked(
    token: int, logprobs: Logprobs, spell: Spell, num_logprobs: int
) -> dict[str, dict[str, Any]]:
    ranks = {other: place for place, (other, _) in enumerate(logprobs.top[:num_logprobs], 1)}
    return {
        str(other): {
            "logprob": max(value, LEAST),
            "rank": ranks.get(other, logprobs.rank),
            "decoded_token": _text(other, spell),
        }
        for other, value in _unique(token, logprobs, num_logprobs)
    }


def _unique(token: int, logprobs: Logprobs, num_logprobs: int) -> Iterable[tuple[int, float]]:
    yield token, logprobs.token
    yield from (pair for pair in logprobs.top[:num_logprobs] if pair[0] != token)


def _entry(token: int, value: float, spell: Spell) -> dict[str, Any]:
    data = spell(token)
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": max(value, LEAST), "bytes": list(data)}


def _text(token: int, spell: Spell) -> str:
    return spell(token).decode("utf-8", "replace")
