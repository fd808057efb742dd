"""scripts/sanitize.py without a GPU: its cases are ones that the ops take, and its verdicts."""

import importlib.util
import os
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "scripts" / "sanitize.py"
spec = importlib.util.spec_from_file_location("sanitize", FILE)
sanitize = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sanitize)


@pytest.mark.parametrize("name", [name for name in sanitize.CASES if name != "out_of_bounds"])
def test_the_ops_take_its_cases(name, capsys):
    sanitize.run(name, "xla")
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, said, status, exits",
    [
        ("mla_append", "ERROR SUMMARY: 0 errors", 0, 0),
        ("mla_append", "ERROR SUMMARY: 0 errors", 2, 1),  # the case failed by itself
        ("mla_append", "ERROR SUMMARY: 172 errors", 1, 0),
        ("mla_append", "ERROR SUMMARY: 172 errors", 1, 1),
        ("mla_append", "Segmentation fault", 2, 0),
        ("out_of_bounds", "ERROR SUMMARY: 172 errors", 0, 0),
        ("out_of_bounds", "ERROR SUMMARY: 0 errors", 1, 0),
        ("mla_append", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0),
        ("mla_append", "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 1, 0),
    ],
)
def test_a_tool_that_said_nothing_is_no_verdict(name, said, status, exits, tmp_path):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '========= {said}'\nexit {exits}\n")
    program.chmod(0o755)
    tool = "racecheck" if "RACECHECK" in said else "memcheck"
    assert sanitize.watched(tool, str(program), name, dict(os.environ))[0] == status
