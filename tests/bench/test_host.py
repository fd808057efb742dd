"""`bench host`: a round beside its executables, of a model that a CPU runs in no time."""

import json

import pytest

from jaxattn.bench import host
from jaxattn.models import Hybrid
from jaxattn.models.checkpoint import EMBEDDED, read_config


@pytest.mark.slow
def test_rounds_stand_beside_their_queued_executables(tmp_path, capsys):
    file = tmp_path / "host.json"
    given = ["--small", "--rows", "2", "--steps", "20", "--repeats", "2", "--json", str(file)]
    assert host.main(given, "bench") == 0
    assert "exposed us" in capsys.readouterr().out
    result = json.loads(file.read_text())
    [row] = result["rows"]
    assert result["steps"] == 20 and row["B"] == 2 and row["sealed"] == "yes"
    assert 0 < row["executable ms"] and 0 < row["host us"] <= row["round ms"] * 1e3
    assert row["tokens/s"] == pytest.approx(2e3 / row["round ms"])


def test_the_rows_of_the_default_options_fit_the_embedded_model():
    given = host.parse([], "bench")
    model = Hybrid(read_config(EMBEDDED))
    for rows in given.rows:
        assert host.longest(rows, given.steps) <= model.max_position_embeddings


def test_several_steps_of_a_call_count_one_by_one(tmp_path):
    file = tmp_path / "host.json"
    given = ["--small", "--rows", "2", "--steps", "40", "--repeats", "1", "--json", str(file)]
    assert host.main([*given, "--steps-per-round", "4"], "bench") == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["steps"] == 4 and row["sealed"] == "yes"


@pytest.mark.parametrize(
    "given, message",
    [
        (["--rows", "0"], "--rows must be positive; got 0"),
        (["--repeats", "0"], "--repeats must be positive; got 0"),
        (["--small", "DeepSeek-V2-Lite"], "--small has a model of its own; give no MODEL"),
        (["--steps-per-round", "9"], "--steps-per-round: steps_per_round must be at most 8; got 9"),
        (["nobody"], "nobody"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(given, message, capsys):
    with pytest.raises(SystemExit):
        host.parse(given, "bench")
    assert message in capsys.readouterr().err


def test_more_steps_than_the_model_has_positions_are_refused(capsys):
    assert host.main(["--small", "--rows", "4", "--steps", "9000"], "bench") == 2
    assert "4 rows of 9000 steps take 9,082 tokens" in capsys.readouterr().err
