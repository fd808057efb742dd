"""`bench host`: a round beside its executables, of a model that a CPU runs in no time."""

import json
import sys

import numpy as np
import pytest

from jaxattn.bench.host import executable_replay, host_overhead, word_grammar
from jaxattn.engine.engine import Engine
from jaxattn.limits import Limits
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED, load, read_config

pytestmark = pytest.mark.lazy_steps


@pytest.mark.slow(
    reason="a column of another run; found by several steps of a call, counted one by one too"
)
def test_rounds_stand_beside_their_queued_executables(tmp_path, capsys):
    file = tmp_path / "host.json"
    given = ["--small", "--rows", "2", "--steps", "20", "--repeats", "2", "--json", str(file)]
    assert host_overhead.main(given, "bench") == 0
    assert "exposed us" in capsys.readouterr().out
    result = json.loads(file.read_text())
    [row] = result["rows"]
    assert result["steps"] == 20 and row["B"] == 2 and row["sealed"] == "yes"
    assert (
        row["same tokens"] == "yes"
        and 0 < row["executable ms"]
        and 0 < row["host us"] <= row["round ms"] * 1e3
    )
    assert row["tokens/s"] == pytest.approx(2e3 / row["round ms"])


def test_the_rows_of_the_default_options_fit_the_embedded_model():
    given = host_overhead.parse([], "bench")
    model = Hybrid(read_config(EMBEDDED))
    for rows in given.rows:
        assert host_overhead.longest(rows, given.steps) <= model.max_position_embeddings


@pytest.mark.slow_cases(
    reason="a count of one step per call; found by four steps per call, and engines of one step too"
)
@pytest.mark.parametrize("several", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_several_steps_of_a_call_count_one_by_one(several, tmp_path):
    file = tmp_path / "host.json"
    given = ["--small", "--rows", "3", "--steps", "40", "--repeats", "1", "--json", str(file)]
    given += ["--grammars", "1", "3", "--steps-per-round", str(several)]
    assert host_overhead.main(given, "bench") == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["steps"] == several and row["sealed"] == row["same tokens"] == "yes"
    for rows in (1, 3):  # rows that follow a grammar have columns of their own
        assert 0 < row[f"{rows} grammars us"] <= row[f"{rows} grammars ms"] * 1e3


@pytest.mark.slow(
    reason="a queue that decodes other tokens than the rounds; found by several steps of a call, "
    "counted one by one too"
)
@pytest.mark.parametrize("several", [1, 4])
def test_the_queue_decodes_what_the_rounds_decode(several):
    """Row by row, through all steps that count: so lengths, pages and experts are the same."""
    config, params = load(EMBEDDED)
    model = Hybrid(config)
    rows, steps = 2, 72  # the last tokens have a page of their own
    length = host_overhead.longest(rows, steps)
    limits = Limits(batch=rows, max_model_len=length, prefill_chunk=16, steps_per_round=several)
    with Engine(model, params, limits) as engine:
        for _ in range(2):  # the queue's pages come from nowhere else; then behind rounds
            alone = executable_replay.queued(engine, rows, steps)
            more = len(alone.texts[-1]) - (executable_replay.WARM + 1 + steps)
            assert 0 <= more < several  # it ends with the last call that counts
            pages = [np.asarray(engine._runner.rows.tables)]
            run = host_overhead.rounds(engine, rows, steps)
            assert host_overhead.differing(run.texts, alone.texts) == "yes"
            pages.append(np.asarray(engine._runner.rows.tables))
            used = -(
                -(len(executable_replay.PROMPT) + len(alone.texts[-1])) // engine.limits.page_tokens
            )
            assert used > 1 and np.array_equal(pages[0][:, :used], pages[1][:, :used])
    first = alone.texts[0]
    assert len(set(first)) > 4  # a text, which other rows or lengths would not give


def test_tokens_that_differ_are_counted():
    assert host_overhead.differing([[1, 2, 3], [4, 5]], [[1, 2], [4, 5]]) == "yes"
    assert host_overhead.differing([[1, 2, 3], [4, 5]], [[1, 3], [4, 5, 6]]) == "2 of 5 differ"


@pytest.mark.parametrize(
    "given, message",
    [
        (["--rows", "0"], "--rows must be positive; got 0"),
        (["--rows", "4", "2", "--grammars", "3"], "from 1 to the smallest --rows; got 3"),
        (["--repeats", "0"], "--repeats must be positive; got 0"),
        (["--small", "DeepSeek-V2-Lite"], "--small has its own model; leave MODEL out"),
        (["--steps-per-round", "9"], "--steps-per-round: steps_per_round must be at most 8; got 9"),
        (["nobody"], "nobody"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(given, message, capsys):
    with pytest.raises(SystemExit):
        host_overhead.parse(given, "bench")
    assert message in capsys.readouterr().err


def test_grammars_without_their_library_are_refused_at_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SystemExit):
        host_overhead.parse(["--small", "--grammars", "1"], "bench")
    assert "--grammars needs llguidance" in capsys.readouterr().err


def test_more_steps_than_the_model_has_positions_are_refused(capsys):
    assert host_overhead.main(["--small", "--rows", "4", "--steps", "9000"], "bench") == 2
    assert "4 rows of 9000 steps need 9,082 tokens" in capsys.readouterr().err


def test_words_are_tokens_of_a_large_vocabulary():
    words = word_grammar.WordTokenizer(5000)
    texts = {words.token_bytes(id) for id in range(5000)}
    assert len(texts) == 5000 and words.token_bytes(97) == b"a"
    [grammar] = word_grammar.maker(5000)(1)
    mask = np.zeros(-(-5000 // 32), np.int32)
    grammar.mask(mask)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:5000]
    assert allowed[ord("a")] and not allowed[ord("A")] and allowed[256:].all()
