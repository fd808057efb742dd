"""Grammars for the bench of the host that allow words only, in a vocabulary of any size."""

import string
from collections.abc import Callable, Sequence

from jaxattn.engine.requests.request import Grammar
from jaxattn.text import ByteTokenizer

# Longer than any row of the bench, so that no text is complete.
PATTERN = "[a-z ]{100000}"


class WordTokenizer(ByteTokenizer):
    """Bytes, and behind them words of letters: as many tokens as a model has.

    Args:
        vocab_size: of the model, at least 256.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def token_bytes(self, id: int) -> bytes:
        """What a token stands for."""
        if id < 256:
            return bytes([id])
        word, rest = "", id - 256
        while rest or not word:
            rest, letter = divmod(rest, len(string.ascii_lowercase))
            word += string.ascii_lowercase[letter]
        return (" " + word).encode()


def maker(vocab_size: int) -> Callable[[int], Sequence[Grammar]]:
    """Makes so many states of the grammar, each of a new text.

    Raises:
        ModuleNotFoundError: llguidance is not installed; the extra `server` has it.
    """
    import llguidance

    from jaxattn.server.decoding.grammars.grammar_matcher import GrammarVocabulary

    vocabulary = GrammarVocabulary(WordTokenizer(vocab_size))
    text = llguidance.LLMatcher.grammar_from_regex(PATTERN)
    return lambda count: vocabulary.matchers(text, "--grammars", count)
