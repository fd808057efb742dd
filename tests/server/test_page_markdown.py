"""The page's Markdown: as markdown-it-py, which rich brings, reads it, and bounded on odd text."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from jaxattn.server.chat_page import PAGE

NODE = shutil.which("node")
SCRIPT = Path(__file__).parents[1] / "helpers" / "markdown_html.mjs"
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js, which runs the page's modules")
MOST_MS = 1000.0

REFERENCE = MarkdownIt("commonmark", {"breaks": True, "html": False})
REFERENCE.enable(["table", "strikethrough"])
REFERENCE.disable(["html_block", "html_inline", "code", "reference"])  # as blocks.js says


def answers(texts):
    """The HTML of each text, and how many milliseconds it took."""
    result = subprocess.run(
        [NODE, SCRIPT, PAGE / "scripts" / "markdown"],
        input=json.dumps(texts), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def html(*texts):
    return [plain(each["html"]) for each in answers(texts)]


def expected(text):
    found = REFERENCE.render(text).replace(' style="text-align:left"', "")
    return plain(re.sub(r' style="text-align:(\w+)"', r' class="\1"', found))


def plain(found):
    """Without the white space between tags, which code keeps."""
    parts = re.split(r"(<pre>.*?</pre>)", found, flags=re.DOTALL)
    return "".join(
        part if part.startswith("<pre>") else re.sub(r">\s+<", "><", part.replace("\n", ""))
        for part in parts
    ).strip()


class Writer:
    """Random Markdown of what language models write."""

    WORDS = (
        "alpha", "the", "x", "2", "**bold**", "*it*", "`co de`", "~~gone~~", "_u_", "a*b", "end.",
        "[link](https://a.b/c)", "snake_case_x", "__s__", "***bi***", "5 * 6", "**a *b* c**",
        "<tag>", "&amp;", "\\*esc\\*", "`<b>`", "(paren)",
    )  # fmt: skip

    def __init__(self, seed):
        self.random = random.Random(seed)

    def document(self):
        makers = (
            self.lines, self.lines, self.fence, self.items, self.items, self.table, self.quote,
            lambda: "#" * self.random.randint(1, 6) + " " + self.line(), lambda: "---",
        )  # fmt: skip
        return "\n\n".join(self.random.choice(makers)() for _ in range(self.random.randint(1, 5)))

    def line(self):
        return " ".join(self.random.choices(self.WORDS, k=self.random.randint(1, 6)))

    def lines(self):
        return "\n".join(self.line() for _ in range(self.random.randint(1, 3)))

    def fence(self, space=""):
        code = ("```" + self.random.choice(("python", "", "js")), "x = 1", "", "    y < 2", "```")
        return "\n".join(space + line if line else line for line in code)

    def items(self, depth=0, space=""):
        numbered, loose = self.random.random() < 0.5, self.random.random() < 0.3
        found = []
        for number in range(self.random.randint(1, 4)):
            mark = f"{number + 1}. " if numbered else "- "
            inner = space + " " * len(mark)
            found.append(space + mark + self.line())
            what = self.random.random()
            if what < 0.2 and depth < 2:
                found.append(self.items(depth + 1, inner))
            elif what < 0.3:
                found += ["", inner + self.line()]
            elif what < 0.4:
                found.append(self.fence(inner))
            found += [""] * loose
        return "\n".join(found).rstrip("\n")

    def table(self):
        columns = self.random.randint(1, 4)

        def row():
            return "| " + " | ".join(self.random.choices(self.WORDS, k=columns)) + " |"

        rule = "|".join(self.random.choices(("---", ":--:", "--:", ":--"), k=columns))
        return "\n".join([row(), f"|{rule}|", *(row() for _ in range(self.random.randint(0, 3)))])

    def quote(self):
        inner = self.random.choice((self.lines, self.items, self.lines))()
        return "\n".join("> " + line for line in inner.split("\n"))


def test_documents_read_as_in_the_reference():
    writer = Writer(51)
    documents = [writer.document() for _ in range(300)]
    for document, found in zip(documents, html(*documents), strict=True):
        assert found == expected(document), document


def test_what_models_write_otherwise_is_read_too():
    """Lists below "1." with two spaces, formulas, <br>, bare addresses, a fence that is open."""
    assert html(
        "1. a\n  - b\n2. c",
        "\\(x_1 * y\\) and\n\n\\[\na * b * c\n\\]\n\n$$\nE = mc^2\n$$",
        "| a |\n|---|\n| b<br>c |",
        "see https://a.b/c_d_e, and (https://f.g).",
        "```py\nx = 1\n",
        "- [x] done\n- [ ] open",
    ) == [
        "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
        "<p><math>x_1 * y</math> and</p><math>a * b * c</math><math>E = mc^2</math>",
        "<table><thead><tr><th>a</th></tr></thead>"
        "<tbody><tr><td>b<br />c</td></tr></tbody></table>",
        '<p>see <a href="https://a.b/c_d_e">https://a.b/c_d_e</a>, and '
        '(<a href="https://f.g">https://f.g</a>).</p>',
        '<pre><code class="language-py">x = 1\n\n</code></pre>',
        "<ul><li>done</li><li>open</li></ul>",
    ]


def test_no_link_leads_anywhere_but_to_the_web_and_mail():
    texts = (
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](\x01javascript:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "[x](//evil.example)",
        "[x](vbscript:x)",
        "![x](file:///etc/passwd)",
        "<javascript:alert(1)>",
        "[x](&#106;avascript:alert(1))",
        "<a href='javascript:alert(1)'>x</a>",
    )
    for text, found in zip(texts, html(*texts), strict=True):
        assert "<a" not in found, text
    assert "".join(html("[x](mailto:a@b.c)")) == '<p><a href="mailto:a@b.c">x</a></p>'


def test_odd_text_is_read_in_bounded_time():
    """Marks without an end, deep nesting: nothing takes a time that grows with its square."""
    odd = [
        "*a" * 9000, "[" * 20000, "`a``" * 5000, "> " * 5000, "- " * 3000 + "x", "_*~~" * 5000,
        "<" * 19000, "|" * 5000 + "\n" + "|-" * 5000, "$$\n" * 3000, "1. a\n\n" * 3000, "**" * 9999,
        "[a](" * 5000, "![" * 9000, "\\(" * 9000, "&#" * 9000, "h" * 19000, "https://" * 2400,
        "\n".join("  " * k + "- x" for k in range(300)), "```\n" * 5000, "~~~a\n" * 3000,
        *(f"```{language}\n" + mark * 6000 for language in ("python", "c", "html", "css", "json")
          for mark in ('"', "/*", "<!--", "a-", "a ", "'''", '"\\', "1_")),
    ]  # fmt: skip
    slow = {text[:12]: each["ms"] for text, each in zip(odd, answers(odd), strict=True)}
    assert {text: ms for text, ms in slow.items() if ms > MOST_MS} == {}


def test_no_text_is_refused():
    marks = [
        "*", "_", "~~", "`", "```", "[", "](", ")", "!", "<", ">", "|", "-", "#", "1.", "\n",
        "\n\n", "    ", " ", "\\", "&amp;", "$$", "\\[", "x", "é", "😀", "\ud83d", "\0", "\t", "\r",
    ]  # fmt: skip
    generator = random.Random(51)
    texts = ["".join(generator.choices(marks, k=generator.randint(1, 60))) for _ in range(1000)]
    assert len(answers(texts)) == 1000
