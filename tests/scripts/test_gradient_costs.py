"""Memory and time of gradients: the command runs, and a gradient takes more than its forward."""

import json

from scripts import gradient_costs


def test_small_shapes_run_and_are_stored(tmp_path, capsys):
    file = tmp_path / "gradients.json"
    assert gradient_costs.main(["--small", "--json", str(file)]) == 0
    stored = json.loads(file.read_text())
    assert [row["op"] for row in stored["rows"]] == ["causal_attention", "chunk_gated_delta_rule"]
    for row in stored["rows"]:
        assert 0 < row["forward GiB"] < row["with gradient GiB"]
        assert row["forward ms"] > 0 and row["with gradient ms"] > 0
    assert "gradients, cpu" in capsys.readouterr().out


def test_the_stored_run_has_every_case():
    from scripts.performance.cells import rows_of

    cases = [case() for case in gradient_costs.CASES]
    stored = [(row["op"], row["shape"]) for row in rows_of("gradients")]
    assert stored == [(case.name, case.shape) for case in cases]
