"""Finds sentences that are too long in the project's Markdown.

    python -m scripts.prose README.md docs/*.md --most 30

Prints each with its file, line and number of words; exit code 1 if there is one. A word of code, a
link and a number count as one word. Code blocks, tables of figures and headings are not looked at.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MOST = 30
FENCE = re.compile(r"^ *(```|~~~)")
NOT_PROSE = re.compile(r"^ *(#|\||<!--|!\[|---|\$ )")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
# Where a sentence ends: a stop, with a closing mark behind it, and a space.
STOP = re.compile(r"(?<=[.!?])[\")*]* +(?=[\"(*`]*[A-Z0-9`\[])")


class Sentence(NamedTuple):
    """One sentence of a page: `line` is where its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"\S*\w\S*", self.text))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists and cells of tables, each with the line that it begins on."""
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
    """Each sentence of a Markdown page."""
    for line, paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`", "CODE", paragraph)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        for sentence in STOP.split(plain):
            yield Sentence(line, sentence)


def too_long(text: str, most: int = MOST) -> list[Sentence]:
    """The page's sentences of more than `most` words."""
    return [sentence for sentence in sentences(text) if sentence.words > most]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prose", description="Finds sentences that are too long."
    )
    parser.add_argument("page", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=MOST, help="words of a sentence (%(default)s)")
    args = parser.parse_args(argv)
    found = [(page, each) for page in args.page for each in too_long(page.read_text(), args.most)]
    for page, sentence in found:
        print(f"{page}:{sentence.line}: {sentence.words} words: {sentence.text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
