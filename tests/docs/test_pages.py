"""Code on the docs' pages runs as it is printed, and the English keeps the rules."""

import re
from pathlib import Path

import pytest

from jaxattn import models
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED
from scripts import prose
from tests.helpers.engine_cases import FLOAT32, params_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Its blocks are one program, which tests/models/test_adding_a_model.py runs.
ELSEWHERE = ("adding-a-model.md",)
# A block in `py`, not `python`, needs a server or several GPUs, and is not run here.
README = (ROOT / "README.md").read_text()  # what it has too is run by tests/test_readme.py
BLOCKS = [
    (page.name, number, text)
    for page in sorted(DOCS.glob("*.md"))
    if page.name not in ELSEWHERE
    for number, text in enumerate(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL), 1
    )
    if text not in README
]
READ = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "benchmarks" / "LOG.md"]
RULED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.usefixtures("lazy_steps")
@pytest.mark.parametrize(("page", "number", "text"), BLOCKS, ids=lambda x: str(x)[:24])
def test_a_block_runs(page, number, text, monkeypatch):
    """The README's engine has the embedded model; a page's has one that compiles in less time."""
    monkeypatch.chdir(ROOT)  # blocks may name a folder of the clone
    load = models.load
    small = Hybrid(FLOAT32), params_of(FLOAT32)
    monkeypatch.setattr(
        models,
        "load",
        lambda folder, *a, **k: small if folder == EMBEDDED else load(folder, *a, **k),
    )
    exec(compile(text, f"docs/{page}, block {number}", "exec"), {"__name__": "__main__"})


def test_there_are_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_longer_than_thirty_words(page):
    long = prose.too_long(page.read_text())
    assert not long, "\n".join(
        f"line {each.line}, {each.words} words: {each.text}" for each in long
    )


@pytest.mark.parametrize("page", RULED, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_an_avoided_word_or_begins_with_a_pronoun(page):
    faulty = prose.faulty(page.read_text())
    assert not faulty, "\n".join(
        f"line {each.line}, {'; '.join(each.faults)}: {each.text}" for each in faulty
    )


@pytest.mark.parametrize(
    "text, faults",
    [
        ("Kernels run on Hopper GPUs alone.", ["'alone': write only, by itself"]),
        ("# Beside FlashMLA", ["'beside': write compared with, next to, in addition to"]),
        ("A row, but for its last page.", ["'but for': write except"]),
        ("| all but for one | but forty |", ["'but for': write except"]),
        ("One stands alone. They meet.", ["'alone': write only, by itself",
                                          "begins with 'They': name the noun"]),
        ("- **It pays** to read.", ["begins with '**It': name the noun"]),
        ("Two parts. This costs time.", ["begins with 'This': name the noun"]),
        ("Two parts. This split costs time.", []),
        ("These runs are older. Each runs once.", ["begins with 'Each': name the noun"]),
        ("`alone` is code, and a standalone word is another. Items are not Its.", []),
        ("```\nIt is beside the point.\n# alone\n```", []),
    ],
)  # fmt: skip
def test_avoided_words_and_pronouns_are_found(text, faults):
    assert [fault for each in prose.faulty(text) for fault in each.faults] == faults


def test_a_sentence_may_begin_with_the_package_s_name():
    assert len(list(prose.sentences("One kernel runs. jaxattn runs it."))) == 2


def test_sentences_are_counted():
    page = """# A heading

One two. `a.b.c` is `one word`. See [two words](x.md), 1.5 of 3!

- An item
  goes on.

```
no prose
```

| a cell. And | another |
|---|---|
"""
    found = [
        (sentence.line, sentence.words) for sentence in prose.sentences(page) if sentence.words
    ]
    assert found == [(3, 2), (3, 3), (3, 6), (5, 4), (12, 2), (12, 1), (12, 1)]


def test_a_fault_is_printed_with_its_place(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("A row.\n\nIt is alone.\n")
    assert prose.main([str(page)]) == 1
    out = capsys.readouterr().out
    assert "page.md:3: 'alone': write only, by itself; begins with 'It'" in out


def test_a_long_sentence_is_found(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("Short.\n\n" + "word " * 30 + "end.\n")
    assert prose.main([str(page)]) == 1
    assert "page.md:3: 31 words" in capsys.readouterr().out
    assert prose.main([str(page), "--most", "31"]) == 0
