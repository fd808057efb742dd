"""llguidance's grammars: the vocabulary that compiles them, and each row's matcher of tokens.

llguidance computes the mask of allowed tokens before each token. The engine calls a
`GrammarMatcher` in the device thread. A thread of the text pool compiles the grammars, within the
limits below.
"""

import functools
from collections.abc import Mapping, Sequence

import llguidance
import numpy as np

from jaxattn.server.http.errors import ApiError, bad
from jaxattn.text import Tokenizer

# The limits of compiling a grammar, which is otherwise refused, and of a mask, which otherwise ends
# the row.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
)


class GrammarVocabulary:
    """A tokenizer's vocabulary in llguidance's format.

    Args:
        tokenizer: The model's tokenizer. Without a stop token, it could not end a text.
        marks: The tags around reasoning. A tag that is one token counts as special: the mask of
            free text up to a token takes 10 us, but up to a tag's letters 2 ms.

    Attributes:
        special_tokens: A map from id to text of the tokens that are not part of any string.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str] = ()):
        self._tokenizer = tokenizer
        ids = {tokenizer.token_id(mark): mark for mark in marks}
        marked = {id: mark for id, mark in ids.items() if id is not None}
        self.special_tokens: Mapping[int, str] = {**tokenizer.special_tokens, **marked}

    @functools.cached_property
    def known(self) -> llguidance.LLTokenizer:
        """The tokenizer for llguidance. Creating it takes a second, on the first access."""
        ends = list(self._tokenizer.stop_tokens)
        wrapper = llguidance.TokenizerWrapper(
            _LLGuidanceTokens(self._tokenizer, sorted(self.special_tokens))
        )
        return llguidance.LLTokenizer(wrapper, eos_token=ends)

    def matchers(self, grammar: str, param: str, count: int) -> list["GrammarMatcher"]:
        """Compiles a grammar once, and returns `count` matchers of it.

        Raises:
            ApiError: 400 if the grammar is malformed, too large or not supported, or if no text
                matches it.
        """
        matcher = llguidance.LLMatcher(self.known, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds that no first token exists, which compiling does not
        if matcher.is_error():
            raise _unfollowed(param, matcher)
        return [GrammarMatcher(matcher.deep_copy(), param) for _ in range(count)]


class _LLGuidanceTokens:
    """The interface that `llguidance.TokenizerWrapper` expects of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, special: list[int]):
        ends = tokenizer.stop_tokens
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = special
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class GrammarMatcher:
    """One row's state in a grammar, which implements the engine's `Grammar`.

    Args:
        matcher: llguidance's matcher, which this object owns.
        param: The field that asked for the grammar.
    """

    def __init__(self, matcher: llguidance.LLMatcher, param: str):
        self._matcher, self._param = matcher, param

    @property
    def error(self) -> ApiError | None:
        """The reason why the text could not follow the grammar; None if it could."""
        return _unfollowed(self._param, self._matcher) if self._matcher.is_error() else None

    def mask(self, words: np.ndarray) -> None:
        """Writes the mask of allowed next tokens into the bits of int32 [ceil(vocab / 32)].

        After an exceeded limit, it allows no token, which ends only this row.
        """
        if self._matcher.is_error():
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():  # llguidance's mask then allows stop tokens, as if complete
            return
        count = min(len(words), len(allowed))
        words[:count] = allowed[:count]

    def accept(self, token: int) -> bool:
        """Consumes a token, and returns whether the text goes on. Returns True after an error, as
        the next mask then ends the row."""
        self._matcher.consume_token(token)
        return self._matcher.is_error() or not self._matcher.is_stopped()


def _unfollowed(param: str, matcher: llguidance.LLMatcher) -> ApiError:
    """Returns a 400 error with llguidance's message, without the dump of its state."""
    said = " ".join(matcher.get_error().split("<state>")[0].split())[:300]
    said = said.replace("NoExtensionBias", "no text matches it")
    return bad(param, f"{param} cannot be enforced: {said}; change or simplify it")
