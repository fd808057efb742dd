"""Links between the project's pages lead somewhere, headings included."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "benchmarks/log", "tests/failure_modes")
NAMES = [
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).glob("*.md"))])
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """The page without its code, which may have brackets of its own."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(path: Path) -> set[str]:
    """The addresses of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", name).strip().lower().replace(" ", "-") for name in plain}


@pytest.mark.parametrize("name", NAMES)
def test_a_link_leads_somewhere(name):
    page = ROOT / name
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), f"{name} links to {target}"
        assert place.is_relative_to(ROOT), f"{name} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(place), f"{name}: {file or name} has no heading #{anchor}"


def test_a_page_of_the_site_links_to_the_site_alone():
    """mkdocs has docs/ alone; what lies beside it is named in code, not linked."""
    for page in (ROOT / "docs").glob("*.md"):
        for target in LINK.findall(prose(page)):
            assert not target.startswith("../"), f"{page.name} links to {target}"


def test_the_readme_leads_to_every_page_or_to_one_that_does():
    index = (ROOT / "README.md").read_text() + (ROOT / "docs" / "index.md").read_text()
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in index or page.name in site, f"nothing leads to docs/{page.name}"
