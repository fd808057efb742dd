"""Restrictions of single tokens: allowed tokens, a minimum length, and forbidden words.

They mask logits as a grammar does, and can be combined with one.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from jaxattn.engine.requests.request import Grammar
from jaxattn.server.http.errors import ApiError, bad
from jaxattn.server.http.json_fields import JsonFields

MOST_ALLOWED = 2**20
MOST_BAD_WORDS, MOST_WORD = 128, 256
MOST_COUNT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TokenLimits:
    """The restrictions that a request asks for.

    Attributes:
        min_tokens: The minimum number of tokens before a stop token.
        allowed_token_ids: The ids of the allowed tokens; None for all.
        bad_words: The forbidden words.
    """

    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: JsonFields, max_tokens: int | None, vocab_size: int) -> Self:
        """Reads the fields `min_tokens`, `allowed_token_ids` and `bad_words`.

        Raises:
            ApiError: 400 with the field's name.
        """
        min_tokens = fields.integer("min_tokens", 0, MOST_COUNT) or 0
        exceeds_max = max_tokens is not None and min_tokens > max_tokens
        if exceeds_max and not fields.flag("ignore_eos"):
            raise bad(
                "min_tokens",
                f"min_tokens must be at most {max_tokens:,}, the maximum number of tokens; got "
                f"{min_tokens:,}",
            )
        allowed_token_ids = None
        if fields.given("allowed_token_ids"):
            allowed_token_ids = fields.integers("allowed_token_ids", MOST_ALLOWED, vocab_size - 1)
            if not allowed_token_ids:
                raise fields.wrong("allowed_token_ids", "a list of at least one token id")
        return cls(
            min_tokens, allowed_token_ids, fields.texts("bad_words", MOST_BAD_WORDS, MOST_WORD)
        )

    def rules(
        self, stops: Sequence[int], encode: Callable[[str], list[int]]
    ) -> "TokenRules | None":
        """Returns the rules for a request's rows; None without restrictions.

        Args:
            stops: The rows' stop tokens.
            encode: Tokenizes a plain prompt.
        """
        min_tokens = self.min_tokens if stops else 0
        if not min_tokens and self.allowed_token_ids is None and not self.bad_words:
            return None
        begin = encode("")  # BOS, if the tokenizer adds it
        words = []
        for word in self.bad_words:
            for text in {word, f" {word.lstrip()}"}:
                tokens = encode(text)
                words.append(
                    tuple(tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens)
                )
        return TokenRules(
            min_tokens, self.allowed_token_ids, [word for word in words if word], stops
        )


class TokenRules:
    """The rules of one row, which implement the engine's `Grammar`.

    Args:
        min_tokens: The minimum number of tokens before one of `stops`.
        allowed_token_ids: The ids of the allowed tokens; None for all.
        bad_words: The forbidden sequences of tokens.
        stops: The row's stop tokens.
    """

    def __init__(
        self,
        min_tokens: int,
        allowed_token_ids: Sequence[int] | None,
        bad_words: Sequence[tuple[int, ...]],
        stops: Sequence[int],
    ):
        self._min_tokens, self._bad_words, self._stops = min_tokens, bad_words, tuple(stops)
        self._allowed_mask = None if allowed_token_ids is None else _bits(allowed_token_ids)
        self._inner: Grammar | None = None
        self._tokens = 0
        self._last_tokens: collections.deque[int] = collections.deque(
            maxlen=max(map(len, bad_words), default=1)
        )
        self._left_none = False

    def around(self, grammar: Grammar | None) -> Self:
        """Returns a copy of these rules for a new row, combined with its grammar."""
        made = copy.copy(self)
        made._inner, made._last_tokens = grammar, self._last_tokens.copy()
        return made

    @property
    def error(self) -> ApiError | None:
        """The reason why no token was allowed; None if one was."""
        inner = getattr(self._inner, "error", None)
        if inner is not None or not self._left_none:
            return inner
        name = "min_tokens" if self._tokens < self._min_tokens else "allowed_token_ids"
        name = "bad_words" if name == "allowed_token_ids" and self._allowed_mask is None else name
        return bad(name, f"{name} forbids every possible next token; change it")

    def mask(self, words: np.ndarray) -> None:
        """Writes the mask of allowed next tokens; see `Grammar.mask`."""
        if self._inner is None:
            words[:] = -1
        else:
            self._inner.mask(words)
        if self._allowed_mask is not None:
            words[: len(self._allowed_mask)] &= self._allowed_mask
            words[len(self._allowed_mask) :] = 0
        if self._tokens < self._min_tokens:
            for token in self._stops:
                _clear(words, token)
        last = tuple(self._last_tokens)
        for word in self._bad_words:
            before = word[:-1]
            if last[len(last) - len(before) :] == before:
                _clear(words, word[-1])
        self._left_none = not words.any()

    def accept(self, token: int) -> bool:
        """Consumes a token, and returns whether the text goes on."""
        self._tokens += 1
        self._last_tokens.append(token)
        return self._inner is None or self._inner.accept(token)


def _bits(tokens: Sequence[int]) -> np.ndarray:
    """Returns the int32 words of a mask with these tokens, up to the last word that is not zero."""
    places = np.array(tokens, np.int64)
    words = np.zeros(places.max() // 32 + 1, np.uint32)
    np.bitwise_or.at(words, places // 32, np.uint32(1) << (places % 32).astype(np.uint32))
    return words.view(np.int32)


def _clear(words: np.ndarray, token: int) -> None:
    if 0 <= token // 32 < len(words):
        words.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
