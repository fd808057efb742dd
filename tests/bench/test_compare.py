"""Result files say what they are of, and two of different methods are not held together."""

import copy
import json

import pytest

from jaxattn.bench import __main__ as bench
from jaxattn.bench import comparison
from jaxattn.bench.harness import run_metadata


@pytest.fixture
def run():
    rows = [
        {"B,H,T,S": "2,16,256,1", "us": 10.0, "call us": 12.0, "xla us": 30.0, "TFLOP/s": 1.0},
        {"B,H,T,S": "1,20,130,2", "us": 5.0, "call us": 6.0, "TFLOP/s": 1.0},
    ]
    made = run_metadata.begin("mla", "jaxattn-bench", ["mla", "--seed", "a b"]) | {"rows": rows}
    run_metadata.end(made, None)
    return json.loads(json.dumps(made))


def files(tmp_path, *runs):
    paths = []
    for i, made in enumerate(runs):
        path = tmp_path / f"{'AB'[i]}.json"
        path.write_text(json.dumps(made))
        paths.append(str(path))
    return paths


def test_a_run_says_of_what_it_is(run):
    wanted = {"what", "commit", "command", "date", "seed", "method", "device", "jax", "card"}
    assert wanted <= run.keys()
    assert run["command"] == "jaxattn-bench mla --seed 'a b'"
    assert {"name", "version", "warm-up s", "loop s"} <= run["method"].keys()


def test_times_of_one_name_are_held_together(run, tmp_path, capsys):
    other = copy.deepcopy(run)
    other["commit"], other["jax"] = "fedcba987654", "0.11.3"
    other["rows"][0] |= {"us": 8.0, "TFLOP/s": 9.0}
    other["rows"][1]["B,H,T,S"] = "1,20,131,2"  # of another shape
    assert bench.main(["compare", *files(tmp_path, run, other)]) == 0
    told = capsys.readouterr().out
    assert "fedcba987654" in told and "0.800" in told and "1.000" in told
    assert "TFLOP/s" not in told and "1,20,130,2" not in told


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("what", "gdn", "what: 'mla' and 'gdn'"),
        ("device", "NVIDIA H100", "and 'NVIDIA H100'"),
        ("seed", 7, "seed: 0 and 7"),
        ("method", {"name": "the wall clock"}, "method: name: .*'the wall clock'.*method: version"),
        ("card", {"power limit W": "500.00"}, "power limit W: None and '500.00'"),
    ],
)
def test_runs_of_different_conditions_are_refused(name, value, words, run, tmp_path, capsys):
    paths = files(tmp_path, run, run | {name: value})
    assert bench.main(["compare", *paths]) == 2
    said = capsys.readouterr().err
    assert "not comparable, because they differ in" in said
    with pytest.raises(comparison.ComparisonError, match=words):
        comparison.check(run, run | {name: value})


def test_files_that_say_no_method_or_are_none_are_refused(run, tmp_path, capsys):
    old = {name: value for name, value in run.items() if name != "method"}
    for broken, words in ((old, "an older version wrote it"), ([], "is not a result of a bench")):
        assert bench.main(["compare", *files(tmp_path, run, broken)]) == 2
        assert words in capsys.readouterr().err
    assert bench.main(["compare", str(tmp_path / "none.json"), str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_runs_without_a_time_in_common_are_refused(run, tmp_path, capsys):
    assert bench.main(["compare", *files(tmp_path, run, run | {"rows": []})]) == 2
    assert "the results have no time with the same name" in capsys.readouterr().err
