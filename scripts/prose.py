"""Checks the English of the project's Markdown.

    python -m scripts.prose README.md CONTRIBUTING.md docs/*.md

Prints each sentence that is longer than 30 words, uses a word of `AVOIDED`, or begins with a
pronoun whose noun is in another sentence. The exit code is 1 if there is one. A code span, a link
and a number count as one word. The checker skips code blocks, and counts no words in headings.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MOST = 30
FENCE = re.compile(r"^ *(```|~~~)")
HEADING = re.compile(r"^#+ +")
NOT_PROSE = re.compile(r"^ *(#|\||<!--|!\[|---|\$ )")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
# Words that the rules of CONTRIBUTING.md replace, with the replacements.
AVOIDED = {
    "alone": "only, by itself",
    "beside": "compared with, next to, in addition to",
    "in the place of": "instead of",
    "but for": "except",
    "wants": "needs, uses",
    "want": "need, use",
    "apart": "separate",
}
# "This" and similar words stand for a noun of another sentence if a verb follows them.
AUXILIARIES = "are were have do did can could may might will would should must also only"
VERBS = (
    "is was has had does means makes gives takes needs uses costs saves keeps holds runs leaves "
    "prints loads applies adds includes says shows works happens requires allows avoids depends"
)
PRONOUN = re.compile(
    r"[(\"*]*(?:(?:They|Them|It|Its|Their)\b|"
    rf"(?:This|That|Such|Each|Neither)(?= (?:{'|'.join((VERBS + ' ' + AUXILIARIES).split())})\b)|"
    rf"(?:These|Those|Both)(?= (?:{'|'.join(AUXILIARIES.split())})\b))"
)
# The end of a sentence: a stop, closing marks, and a space.
STOP = re.compile(r"(?<=[.!?])[\")*]* +(?=[\"(*`]*(?:[A-Z0-9`\[]|jaxattn\b))")


class Sentence(NamedTuple):
    """A sentence of a page; `line` is the first line of its paragraph."""

    line: int
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"\S*\w\S*", self.text))

    @property
    def faults(self) -> list[str]:
        """The sentence's words that the rules replace, and a pronoun at its beginning."""
        found = [
            f"{word!r}: write {better}"
            for word, better in AVOIDED.items()
            if re.search(rf"\b{word}\b", self.text, re.IGNORECASE)
        ]
        if pronoun := PRONOUN.match(self.text):
            found.append(f"begins with {pronoun[0]!r}: name the noun")
        return found


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields paragraphs, list items and table cells, each with its first line."""
    begin, fenced = 0, False
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = FENCE.match(line)
        fenced ^= bool(fence)
        other = fence or fenced or not line.strip() or NOT_PROSE.match(line)
        if (other or ITEM.match(line)) and lines:
            yield begin, " ".join(lines)
            lines = []
        if line.lstrip().startswith("|") and not fenced:
            yield from ((number, cell.strip()) for cell in line.strip().strip("|").split("|"))
        if not other:
            begin = begin if lines else number
            lines.append(ITEM.sub("", line).strip())


def sentences(text: str) -> Iterator[Sentence]:
    """Yields each sentence of a Markdown page."""
    for line, paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`", "CODE", paragraph)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        for sentence in STOP.split(plain):
            yield Sentence(line, sentence)


def headings(text: str) -> Iterator[Sentence]:
    """Yields each heading of a Markdown page."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= bool(FENCE.match(line))
        if not fenced and HEADING.match(line):
            yield Sentence(number, HEADING.sub("", line))


def too_long(text: str, most: int = MOST) -> list[Sentence]:
    """The page's sentences of more than `most` words."""
    return [sentence for sentence in sentences(text) if sentence.words > most]


def faulty(text: str) -> list[Sentence]:
    """The page's sentences and headings with words or pronouns that the rules replace."""
    return [each for each in (*headings(text), *sentences(text)) if each.faults]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prose", description="Checks the English of Markdown pages."
    )
    parser.add_argument("page", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=MOST, help="words of a sentence (%(default)s)")
    args = parser.parse_args(argv)
    found = 0
    for page in args.page:
        text = page.read_text()
        long = [(each, f"{each.words} words") for each in too_long(text, args.most)]
        rest = [(each, "; ".join(each.faults)) for each in faulty(text)]
        for sentence, fault in [*long, *rest]:
            print(f"{page}:{sentence.line}: {fault}: {sentence.text}")
        found += len(long) + len(rest)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
