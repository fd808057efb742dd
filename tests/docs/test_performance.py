"""The docs' tables are those of the stored runs, and the losses stay in them."""

import json
import re

import pytest

from jaxattn.bench.harness.result_tables import run_json
from scripts.performance import cells, pages, picture, serving
from scripts.performance.pages import PAGES, PLACE, stale, written
from scripts.performance.tables import CLAIMS, TABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_is_stale(page):
    assert stale(page.read_text()) == [], "run `python -m scripts.performance`"


def test_the_picture_is_of_the_stored_runs():
    drawn = pages.PICTURE.read_text()
    assert picture.digest() in drawn, "run `python -m scripts.performance --picture`"
    for row in cells.rows_of("mla-flashmla"):
        assert picture.described(row["B,H,T,S"]) in drawn


def test_every_table_is_on_a_page():
    shown = {place[2] for page in PAGES for place in PLACE.finditer(page.read_text())}
    assert shown == set(TABLES)


def test_every_stored_run_is_shown_or_named():
    """In a table, on a page or in a script: a mention in the log keeps no file."""
    docs = [pages.ROOT / "README.md", *(pages.ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in docs)
    scripts = (path.read_text() for path in (pages.ROOT / "scripts").glob("**/*.py"))
    used = "\n".join((text, *scripts))
    shown = {table.run for table in TABLES.values() if hasattr(table, "run")}
    for path in cells.RESULTS.iterdir():
        by_name = any(path.match(f"{run}.json") for run in shown)
        assert by_name or path.name in used, f"no table, page or script uses {path.name}"
    for name in re.findall(r"benchmarks/results/([\w.*-]+\w)", text):
        assert (cells.RESULTS / name).is_file(), f"a page names {name}, which is not stored"


def test_a_stored_run_has_a_measurement_per_line():
    """As the bench writes it, so that a run that is stored again differs by its rows."""
    for path in cells.RESULTS.glob("*.json"):
        assert path.read_text() == run_json(json.loads(path.read_text())), path.name


def test_a_table_whose_run_changed_is_stale(tmp_path, monkeypatch):
    page = PAGES[1].read_text()
    for path in cells.RESULTS.glob("*.json"):
        run = json.loads(path.read_text())
        if path.name == "mla-flashmla.json":
            run["rows"][0]["us"] += 0.1
        (tmp_path / path.name).write_text(json.dumps(run))
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    assert stale(page) == ["mla-flashmla"]
    assert stale(written(page)) == []


def test_columns_without_figures_are_left_out_and_a_run_may_be_missing(tmp_path, monkeypatch):
    rows = [{"B": "1", "us": 2.0, "fa3 us": ""}, {"B": "2", "us": 3.0}]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    columns = {"B": cells.text("B"), "us": cells.number("us")}
    empty = {"FA3": cells.number("fa3 us")}
    table = cells.Table(run="some", columns=columns | empty)
    assert table().splitlines() == ["| B | us |", "| --- | --- |", "| 1 | 2.0 |", "| 2 | 3.0 |"]
    missing = cells.Table(run="none", columns=columns, missing="Not timed.")
    assert missing() == "Not timed."
    with pytest.raises(FileNotFoundError, match="no stored run .*none.json"):
        cells.Table(run="none", columns=columns)()


def test_runs_beside_vllm_have_a_table_and_a_line_for_their_options(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    monkeypatch.setattr(serving, "RESULTS", tmp_path)
    assert serving.compared() == "- No run with default options and vLLM is stored yet."
    assert "`python -m jaxattn.bench serve` with default" in TABLES["serve"]()
    ours = {"what": "256 requests", "unit": "s", "jaxattn": 2.0}
    rows = [ours | {"vLLM": 1.5}, ours | {"unit": "output tok/s", "vLLM": 1.0}]
    run = {"model": "M", "options": "chunks of 2", "rows": rows}
    (tmp_path / "offline-m.json").write_text(json.dumps(run))
    run |= {"options": "default", "rows": [ours | {"vLLM": 3.0}]}
    (tmp_path / "offline-m-default.json").write_text(json.dumps(run))
    rows = [{"what": "TTFT p50", "unit": "ms", "jaxattn": 1.0, "vLLM": 3.0}]
    rows += [{"what": "8 req/s, ITL p99", "unit": "ms", "jaxattn": 5.0, "vLLM": 4.0}]
    rows += [{"what": "memory", "unit": "GB", "jaxattn": 9.0, "vLLM": 3.0}, ours]
    run = {"model": "M", "options": "default", "rows": rows}
    (tmp_path / "serve-m.json").write_text(json.dumps(run))
    assert serving.compared().splitlines() == [
        "| jaxattn, vLLM | 256 requests |",
        "| --- | --- |",
        "| M | **2.00 s**, 3.00 s |",
        "",
        "- M with default options: jaxattn is faster than vLLM in 1 of 1 "
        "[measures](docs/performance.md#whole-requests) and slower in none.",
        "- M with chunks of 2: jaxattn is faster than vLLM in 1 of 2 "
        "[measures](docs/performance.md#whole-requests) and slower in 1.",
        "    - M, 256 requests, s: jaxattn loses, 0.75 times as fast",
        "- M behind HTTP with default options: jaxattn is faster than vLLM in 1 of 2 "
        "[measures](docs/performance.md#whole-requests) and slower in 1. Losses of M, 8 req/s: "
        "ITL p99 (0.80 times as fast).",
    ]
    assert TABLES["serve"]().splitlines()[2:] == [
        "| M | TTFT p50 | 1.00 ms | 3.00 ms | default | jaxattn wins, 3.00 times as fast |",
        "| M | 8 req/s, ITL p99 | 5.00 ms | 4.00 ms | default "
        "| jaxattn loses, 0.80 times as fast |",
        "| M | 256 requests | 2.00 s |  | default |  |",
    ]


def test_check_changes_nothing_and_fails_where_a_table_is_stale(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    text = "before\n\n<!-- table: claims -->\n| old |\n<!-- end -->\n\nafter\n"
    page.write_text(text)
    monkeypatch.setattr(pages, "PAGES", (page,))
    drawn = tmp_path / "drawn.svg"
    drawn.write_text(picture.digest())
    monkeypatch.setattr(pages, "PICTURE", drawn)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.main(["--check"]) == 1
    assert "page.md: claims is stale" in capsys.readouterr().out
    assert page.read_text() == text
    assert pages.main([]) == 0
    assert page.read_text().startswith("before\n\n<!-- table: claims -->\n\n| what |")
    assert page.read_text().endswith("<!-- end -->\n\nafter\n")
    assert pages.main(["--check"]) == 0
    drawn.write_text("of another run")
    assert pages.main(["--check"]) == 1


def test_the_readme_has_eight_rows_and_says_where_we_lose():
    rows = [claim.cells() for claim in CLAIMS]
    assert len(rows) == 8
    lost = [row for row in rows if not row[-1].startswith("jaxattn")]
    assert len(lost) >= 3
    for row in rows:
        ours, theirs = float(row[2]), float(row[3].partition(": ")[2])
        assert row[-1].startswith("jaxattn") == (ours < theirs)


def test_a_time_of_one_method_stands_beside_no_time_of_another():
    for claim in CLAIMS:
        both = (claim.ours.startswith("call"), "call" in claim.theirs)
        assert both in ((True, True), (False, False)), claim.what
