"""Grammars of words for the bench of the host, with a vocabulary of any size."""

import string
from collections.abc import Callable, Sequence

from jaxattn.engine.requests.request import Grammar
from jaxattn.text import ByteTokenizer

# Longer than any row of the bench, so that no text is complete.
PATTERN = "[a-z ]{100000}"


class WordTokenizer(ByteTokenizer):
    """A tokenizer of all bytes, followed by words of letters up to the vocabulary size.

    Args:
        vocab_size: The model's vocabulary size, at least 256.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token."""
        if id < 256:
            return bytes([id])
        word, rest = "", id - 256
        while rest or not word:
            rest, letter = divmod(rest, len(string.ascii_lowercase))
            word += string.ascii_lowercase[letter]
        return (" " + word).encode()


def maker(vocab_size: int) -> Callable[[int], Sequence[Grammar]]:
    """Returns a function that makes the given number of grammar states, each at its start.

    Raises:
        ModuleNotFoundError: llguidance, of the extra `server`, is not installed.
    """
    import llguidance

    from jaxattn.server.decoding.grammars.grammar_matcher import GrammarVocabulary

    vocabulary = GrammarVocabulary(WordTokenizer(vocab_size))
    text = llguidance.LLMatcher.grammar_from_regex(PATTERN)
    return lambda count: vocabulary.matchers(text, "--grammars", count)
