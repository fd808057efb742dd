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
        self, piece: Piece, *, strip: str = "", most_stripped: int = 0, continues: bool = False
    ):
        """
        Args:
            piece: Returns the bytes of a token. Tokens without text are skipped.
            strip: The character to strip from the beginning of the text.
            most_stripped: The maximum number of stripped characters.
            continues: Whether the text continues other text, so that nothing is stripped.
        """
        self._piece = piece
        self._first = not continues
        self._strip = strip
        self._to_strip = 0 if continues else most_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *tokens: int) -> str:
        """Adds tokens, and returns the characters that they complete, which may be none."""
        found = []
        for token in tokens:
            data = self._piece(token, self._first)
            if data is not None:
                self._first = False
                found.append(data)
        return self._stripped(self._decoder.decode(b"".join(found)))

    def end(self) -> str:
        """Returns the rest after the last token: U+FFFD if the text ends within a character."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
                break
            self._to_strip -= 1
            text = text[len(self._strip) :]
        return text
