"""Log-probabilities in the two forms that OpenAI has for them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxattn.engine.requests.outputs import Logprobs

LEAST = -9999.0  # JSON has no infinity

type Chance = tuple[int, Logprobs]
type Spell = Callable[[int], bytes]


def chat_logprobs(chances: Sequence[Chance], spell: Spell) -> dict[str, Any]:
    """`logprobs` of a chat's choice: each token, and the likely ones in its place."""
    return {
        "content": [
            {
                **_entry(token, found.token, spell),
                "top_logprobs": [_entry(other, value, spell) for other, value in found.top],
            }
            for token, found in chances
        ]
    }


def completion_logprobs(chances: Sequence[Chance], spell: Spell, offset: int) -> dict[str, Any]:
    """`logprobs` of a completion's choice, whose first token stands at `offset` of the text."""
    texts = [_text(token, spell) for token, _ in chances]
    return {
        "tokens": texts,
        "token_logprobs": [max(found.token, LEAST) for _, found in chances],
        "top_logprobs": [
            {_text(token, spell): max(value, LEAST) for token, value in found.top}
            for _, found in chances
        ],
        "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
    }


def _entry(token: int, value: float, spell: Spell) -> dict[str, Any]:
    data = spell(token)
    text = data.decode("utf-8", "replace")
    return {"token": text, "logprob": max(value, LEAST), "bytes": list(data)}


def _text(token: int, spell: Spell) -> str:
    return spell(token).decode("utf-8", "replace")
