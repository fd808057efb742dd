"""Incremental detokenization: every emitted piece is final and consists of whole characters.

A token stands for some bytes of the text, and several tokens may share one UTF-8 character. The
detokenizer withholds up to three bytes until their character is complete. The cost of a token is
therefore proportional to its own length, and the joined pieces are exactly the whole text.

Bytes that are not UTF-8 become U+FFFD, one for each invalid part.
"""

import codecs
from collections.abc import Callable

# Returns the bytes of a token, given whether the token is the first of its text; None if it has no
# text.
Piece = Callable[[int, bool], bytes | None]


class TokenStream:
    """The incremental detokenizer of one sequence of tokens."""

    def __init__(
        self,
        get_token_bytes: Piece,
        *,
        strip: str = "",
        max_stripped: int = 0,
        continues: bool = False,
    ):
        """
        Args:
            get_token_bytes: Returns the bytes of a token. Tokens without text are skipped.
            strip: The character to strip from the beginning of the text.
            max_stripped: The maximum number of stripped characters.
            continues: Whether the text continues other text, so that nothing is stripped.
        """
        self._get_token_bytes = get_token_bytes
        self._at_start = not continues
        self._strip = strip
        self._num_to_strip = 0 if continues else max_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *tokens: int) -> str:
        """Adds tokens, and returns the characters that they complete, which may be none."""
        token_bytes = []
        for token in tokens:
            data = self._get_token_bytes(token, self._at_start)
            if data is not None:
                self._at_start = False
                token_bytes.append(data)
        return self._stripped(self._decoder.decode(b"".join(token_bytes)))

    def end(self) -> str:
        """Returns the rest after the last token: U+FFFD if the text ends within a character."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(self._strip):
                self._num_to_strip = 0
                break
            self._num_to_strip -= 1
            text = text[len(self._strip) :]
        return text
