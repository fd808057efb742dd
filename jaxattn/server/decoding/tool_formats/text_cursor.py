"""A cursor over text that arrives in pieces, for readers that are generators.

A reader yields None when it needs more text, and then continues, so that it reads no text twice.
The cursor keeps all text since the last `commit`: if a reader fails, this text becomes content.
"""

import functools
import io
import itertools
import re
from collections.abc import Generator, Sequence

type Scan[T] = Generator[None, None, T]

_OUTSIDE = re.compile(r'["{}\[\]]')  # the relevant characters outside of a JSON string
_WORD = re.compile(r"[\w.:/-]+")
_INSIDE = re.compile(r'["\\]')
_SPACE = re.compile(r"(?<![\w.+-])[ \t\n\r]+|[ \t\n\r]+(?![\w.+-])")  # except between two words
MOST_NAME = 256  # characters
MOST_DEPTH = 256  # of nested JSON, whose parsers are recursive


class Unreadable(Exception):
    """The text is not a call in this format."""


@functools.lru_cache(maxsize=256)
class MarkSet:
    """A set of marks to search for together.

    Attributes:
        pattern: The pattern that finds the first mark in a text.
        prefixes: The proper prefixes of all marks.
        first_character: The first character of the first mark.
        first_characters: The pattern that finds the first character of any mark.
    """

    def __init__(self, marks: tuple[str, ...]):
        longest_first = sorted(marks, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.prefixes = tuple({mark[:n] for mark in marks for n in range(1, len(mark))})
        self.first_character = marks[0][0]
        self.first_characters = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]")
        self._max_length = max(map(len, marks))

    def begun(self, text: str) -> int:
        """Returns the number of characters at a text's end that may be the beginning of a mark."""
        if not text.endswith(self.prefixes):
            return 0
        most = min(len(text), self._max_length - 1)
        return next(n for n in range(most, 0, -1) if text[-n:] in self.prefixes)


class TextCursor:
    """The unread text, which grows until the end of the message.

    The methods that return `Scan[T]` are generators: call them with `yield from`.

    Attributes:
        text: The text that no reader has consumed.
        ended: Whether all text has arrived.
    """

    def __init__(self) -> None:
        self.text, self.ended = "", False
        self._uncommitted = io.StringIO()
        # Awaited by a reader that has consumed all text.
        self._awaited_pattern: re.Pattern[str] | None = None

    def feed(self, text: str) -> bool:
        """Adds text. Returns False if a reader waits for a pattern that the text does not match."""
        self._uncommitted.write(text)
        if self._awaited_pattern is not None and not self._awaited_pattern.search(text):
            return False
        self.text += text
        return True

    def commit(self) -> None:
        """Forgets the consumed text, so that `rewind` returns to here."""
        self._uncommitted = io.StringIO()
        self._uncommitted.write(self.text)

    def rewind(self) -> None:
        """Makes all text since the last `commit` unread again."""
        self.text = self._uncommitted.getvalue()

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def more(self) -> Scan[None]:
        """Waits for more text.

        Raises:
            Unreadable: If all text has arrived.
        """
        if self.ended:
            raise Unreadable
        yield

    @property
    def _place(self) -> int:
        """The position of the unread text, counted from the last `commit`."""
        return self._uncommitted.tell() - len(self.text)

    def _since(self, place: int) -> str:
        """Returns the text from a position to the unread text."""
        return self._uncommitted.getvalue()[place : self._place]

    def _compact(self, ends: list[int]) -> str:
        """Returns the text between the first and the last position of `ends`, without white space
        outside of strings. Every second position begins a string."""
        text, spans = self._uncommitted.getvalue(), list(itertools.pairwise(ends))
        parts = [text[begin:end] for begin, end in spans]
        parts[::2] = [_SPACE.sub("", part) for part in parts[::2]]
        return "".join(parts)

    def _sought_in(self, pattern: re.Pattern[str]) -> Scan[None]:
        """Waits for text that matches `pattern`. Text that does not match counts as consumed."""
        if not self.text:
            self._awaited_pattern = pattern
        yield from self.more()
        self._awaited_pattern = None

    def space(self) -> Scan[str]:
        """Consumes and returns white space, which may be empty, up to other text or the end."""
        found = ""
        while True:
            rest = self.text.lstrip()
            found += self.take(len(self.text) - len(rest))
            if rest or self.ended:
                return found
            yield

    def one_of(self, *marks: str) -> Scan[str | None]:
        """Consumes and returns the mark that comes next; None if none of the marks does."""
        while True:
            for mark in marks:
                if self.text.startswith(mark):
                    return self.take(len(mark))
            if self.ended or not any(mark.startswith(self.text) for mark in marks):
                return None
            yield

    def literal(self, mark: str) -> Scan[None]:
        """Consumes a mark.

        Raises:
            Unreadable: If the mark does not come next.
        """
        if (yield from self.one_of(mark)) is None:
            raise Unreadable

    def word(self) -> Scan[str]:
        """Consumes and returns a name of letters, digits and `_.:/-`.

        Raises:
            Unreadable: If no name comes next, or it is longer than `MOST_NAME`.
        """
        while True:
            match = _WORD.match(self.text)
            if match is not None and match.end() > MOST_NAME:
                raise Unreadable
            if match is not None and (match.end() < len(self.text) or self.ended):
                return self.take(match.end())
            if match is None and self.text:
                raise Unreadable
            yield from self.more()

    def until(self, *marks: str) -> Scan[tuple[str, str]]:
        """Consumes the text up to the first of some marks; returns this text and the mark."""
        known, begin = MarkSet(marks), self._place
        while True:
            if match := known.pattern.search(self.text):
                self.take(match.start())
                return self._since(begin), self.take(len(match[0]))
            self.take(len(self.text) - known.begun(self.text))
            yield from self._sought_in(known.first_characters)

    def name(self, end: str) -> Scan[str]:
        """Consumes a name and the end mark after it in the same line, and returns the name.

        Raises:
            Unreadable: If no name ends there, or it is longer than `MOST_NAME`.
        """
        text, mark = yield from self.until(end, "\n")
        name = text.strip()
        if mark != end or not 0 < len(name) <= MOST_NAME:
            raise Unreadable
        return name

    def value(
        self,
        end: str,
        *,
        following: Sequence[str],
        missing: Sequence[str],
        closing: tuple[str, ...] = (),
    ) -> Scan[tuple[str, str]]:
        """Consumes a value between tags and its end tag; returns the value and the tag after it.

        Args:
            end: The end tag of the value.
            following: The tags that can follow the end tag. Without one of them the value goes on.
            missing: The marks that must not stand before the end tag.
            closing: (the end tag of a call, the mark that must not follow it before `end`).

        Raises:
            Unreadable: If the end tag is missing.
        """
        parts: list[str] = []
        while True:
            text, mark = yield from self.until(end, *closing[:1], *missing)
            if mark in missing:
                raise Unreadable
            space = yield from self.space()
            if mark in closing:
                if (yield from self.one_of(closing[1])) is not None:
                    raise Unreadable
            elif (after := (yield from self.one_of(*following))) is not None:
                return "".join([*parts, text]), after
            parts += text, mark, space

    def json(self, opens: str = "{") -> Scan[str]:
        """Consumes a JSON value that begins with a bracket of `opens`, and returns its text without
        white space outside of strings.

        This method only matches brackets; the caller must check that the value is JSON. White
        space between two words therefore stays.
        """
        while not self.text:
            yield from self.more()
        if self.text[0] not in opens:
            raise Unreadable
        ends = [self._place]  # positions at which strings and the text between them end
        depth, in_string, at = 0, False, 0
        while True:
            pattern = _INSIDE if in_string else _OUTSIDE
            match = pattern.search(self.text, at)
            if match is None:
                at, self.text = 0, ""
                yield from self._sought_in(pattern)
                continue
            found, at = match[0], match.end()
            if found == '"':
                in_string = not in_string
                ends.append(self._place + (match.start() if in_string else at))
            elif found == "\\":
                while len(self.text) <= at:
                    yield from self.more()
                at += 1
            else:
                depth += 1 if found in "{[" else -1
                if depth > MOST_DEPTH:
                    raise Unreadable
                if not depth:
                    self.take(at)
                    return self._compact([*ends, self._place])
