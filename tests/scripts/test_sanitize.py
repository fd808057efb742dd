"""scripts/sanitize.py without a GPU: its cases are ones that ops and kernels take; its verdicts."""

import os
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from scripts import sanitize

NAMES = [name for name in sanitize.SMALL if name != "out_of_bounds"]
# Other cases' functions and kinds of inputs, in sizes that take XLA seconds on a CPU.
LARGE = ("gdn_prefill_many", "mla_decode_many_rows")
# One of each op; the kernels below are given the same inputs of all cases.
OF_EACH_OP = ("mla_decode_few_rows", "mla_append", "mla_prefill", "gqa_prefill_window") + (
    "gdn_prefill_short", "gdn_decode_few_states", "moe_sorted", "mla_index", "mla_sparse"
)  # fmt: skip


@pytest.mark.slow_cases(reason="inputs that an op refuses; found by a case of each op too")
@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_EACH_OP else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if name not in LARGE
    ],
)
def test_the_ops_take_its_cases(name, capsys):
    sanitize.run(name, "xla")
    assert "nan" not in capsys.readouterr().out


def test_a_case_whose_output_is_0_fails(monkeypatch):
    """It would find no number that a kernel gets wrong."""
    case = SimpleNamespace(arrays=dict, function=lambda implementation: lambda: np.zeros(3))
    monkeypatch.setitem(sanitize.SMALL, "of_nothing", case)
    with pytest.raises(SystemExit, match="of_nothing: every number of the first output is 0"):
        sanitize.run("of_nothing", "xla")


@pytest.mark.slow(reason="inputs that a kernel refuses; found by scripts.sanitize on a GPU too")
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_take_its_cases(name, monkeypatch):
    """Traced, which is what finds what a kernel does not serve; lowered they are elsewhere."""
    for module in [module for at, module in sys.modules.items() if at.startswith("jaxattn.")]:
        if hasattr(module, "require_hopper"):
            monkeypatch.setattr(module, "require_hopper", lambda *args, **kwargs: None)
    op, arguments = sanitize.SMALL[name].launch()
    assert "kernel_name=" in str(jax.make_jaxpr(op)(*arguments))


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
