"""Text from tokens one at a time: what was emitted is final, and no character is cut.

A token is some bytes of the text, and a character of UTF-8 may be divided among tokens. Bytes wait,
at most three of them, until their character is whole. So a token costs the length of its own text,
wherever it stands, and the sum of all pieces is the text of the whole.

Bytes that are not UTF-8 become U+FFFD, one for each part that could not be continued.
"""

import codecs
from collections.abc import Callable

# The bytes of a token, given whether it is the first of its text; None if it has no text at all.
Piece = Callable[[int, bool], bytes | None]


class TokenStream:
    """The text of a sequence of tokens, piece by piece."""

    def __init__(
        self, piece: Piece, *, strip: str = "", most_stripped: int = 0, continues: bool = False
    ):
        """
        Args:
            piece: gives the bytes of a token. Tokens without a text are skipped.
            strip: a character that is taken away from the beginning of a text.
            most_stripped: how many of them.
            continues: other text stands before this one, so it has no beginning to strip.
        """
        self._piece = piece
        self._first = not continues
        self._strip = strip
        self._to_strip = 0 if continues else most_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *tokens: int) -> str:
        """The characters that are whole with these tokens; often none of one, at times several."""
        found = []
        for token in tokens:
            data = self._piece(token, self._first)
            if data is not None:
                self._first = False
                found.append(data)
        return self._stripped(self._decoder.decode(b"".join(found)))

    def end(self) -> str:
        """What is left after the last token: U+FFFD if it ends within a character."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
                break
            self._to_strip -= 1
            text = text[len(self._strip) :]
        return text
