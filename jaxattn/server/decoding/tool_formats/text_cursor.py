"""A cursor over text that arrives in pieces, for readers that are generators.

A reader yields None where it needs more text and goes on from there, so that no text is read
twice. The cursor keeps all text since the last `commit`: if a reader fails, it is text.
"""

import functools
import io
import itertools
import re
from collections.abc import Generator

type Scan[T] = Generator[None, None, T]

_OUTSIDE = re.compile(r'["{}\[\]]')  # of a string of JSON
_WORD = re.compile(r"[\w.:/-]+")
_INSIDE = re.compile(r'["\\]')
_SPACE = re.compile(r"(?<![\w.+-])[ \t\n\r]+|[ \t\n\r]+(?![\w.+-])")  # of JSON, but between words
MOST_NAME = 256  # characters
MOST_DEPTH = 256  # of JSON; its readers are recursive


class Unreadable(Exception):
    """The text is no call of this format."""


@functools.lru_cache(maxsize=256)
class MarkSet:
    """Some marks to search for together.

    Attributes:
        pattern: finds the first of them.
        prefixes: what a mark may begin with, where the rest has not arrived.
        first: the first character of the first mark.
        firsts: finds the first character of any mark.
    """

    def __init__(self, marks: tuple[str, ...]):
        longest_first = sorted(marks, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.prefixes = tuple({mark[:n] for mark in marks for n in range(1, len(mark))})
        self.first = marks[0][0]
        self.firsts = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]")
        self._longest = max(map(len, marks))

    def begun(self, text: str) -> int:
        """The characters at the end of a text that may be the beginning of a mark."""
        if not text.endswith(self.prefixes):
            return 0
        most = min(len(text), self._longest - 1)
        return next(n for n in range(most, 0, -1) if text[-n:] in self.prefixes)


class TextCursor:
    """Unread text, and whether more may come.

    Attributes:
        text: that no reader has consumed.
        ended: whether all text has arrived.
    """

    def __init__(self) -> None:
        self.text, self.ended = "", False
        self._kept = io.StringIO()
        self._sought: re.Pattern[str] | None = None  # by a reader that has read all there is

    def feed(self, text: str) -> bool:
        """Takes more text. False if a reader waits, and the text has nothing that it seeks."""
        self._kept.write(text)
        if self._sought is not None and not self._sought.search(text):
            return False
        self.text += text
        return True

    def commit(self) -> None:
        """What was consumed so far is settled."""
        self._kept = io.StringIO()
        self._kept.write(self.text)

    def rewind(self) -> None:
        """All text since the last `commit` is unread again."""
        self.text = self._kept.getvalue()

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def more(self) -> Scan[None]:
        """Waits for more text.

        Raises:
            Unreadable: there is none.
        """
        if self.ended:
            raise Unreadable
        yield

    @property
    def _place(self) -> int:
        """Where the unread text begins, counted from the last `commit`."""
        return self._kept.tell() - len(self.text)

    def _since(self, place: int) -> str:
        """The text from a place to the unread text."""
        return self._kept.getvalue()[place : self._place]

    def _compact(self, ends: list[int]) -> str:
        """The text between the first and the last of some places, of which every second one begins
        a string."""
        text, spans = self._kept.getvalue(), list(itertools.pairwise(ends))
        parts = [text[begin:end] for begin, end in spans]
        parts[::2] = [_SPACE.sub("", part) for part in parts[::2]]
        return "".join(parts)

    def _sought_in(self, sought: re.Pattern[str]) -> Scan[None]:
        """Waits for text that has what is sought; text without it is read."""
        if not self.text:
            self._sought = sought
        yield from self.more()
        self._sought = None

    def space(self) -> Scan[str]:
        """White space, which may be none. Text follows it, or nothing does."""
        found = ""
        while True:
            rest = self.text.lstrip()
            found += self.take(len(self.text) - len(rest))
            if rest or self.ended:
                return found
            yield

    def one_of(self, *marks: str) -> Scan[str | None]:
        """The mark that stands here, which is consumed, or None."""
        while True:
            for mark in marks:
                if self.text.startswith(mark):
                    return self.take(len(mark))
            if self.ended or not any(mark.startswith(self.text) for mark in marks):
                return None
            yield

    def literal(self, mark: str) -> Scan[None]:
        """Consumes a mark that must stand here."""
        if (yield from self.one_of(mark)) is None:
            raise Unreadable

    def word(self) -> Scan[str]:
        """A name of letters, digits and a few marks.

        Raises:
            Unreadable: something else stands here.
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
        """(the text before the first of some marks, that mark); both are consumed."""
        known, begin = MarkSet(marks), self._place
        while True:
            if match := known.pattern.search(self.text):
                self.take(match.start())
                return self._since(begin), self.take(len(match[0]))
            self.take(len(self.text) - known.begun(self.text))
            yield from self._sought_in(known.firsts)

    def json(self, opens: str = "{") -> Scan[str]:
        """The text of a JSON value that begins with one of some brackets, to its last bracket,
        without white space outside of strings.

        Brackets within strings do not count. Whether the value is JSON is for others to check:
        white space that parts two words stays.
        """
        while not self.text:
            yield from self.more()
        if self.text[0] not in opens:
            raise Unreadable
        ends = [self._place]  # of strings and of what stands between them
        depth, inside, at = 0, False, 0
        while True:
            sought = _INSIDE if inside else _OUTSIDE
            match = sought.search(self.text, at)
            if match is None:
                at, self.text = 0, ""
                yield from self._sought_in(sought)
                continue
            found, at = match[0], match.end()
            if found == '"':
                inside = not inside
                ends.append(self._place + (match.start() if inside else at))
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
