"""An engine over two GPUs, with the kernels: the embedded model's text, each GPU's plan, its seal.

    python -m pytest -m gpu -p no:xdist -s -v tests/parallel/test_two_gpus_engine.py

Each engine has a process of its own, all at a time, as they compile for most of it. One takes a
fifth of both GPUs: the peak of its process is compared with its plan.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxattn.plan.group import COLLECTIVES

ROOT = Path(__file__).parents[2]
CONTEXT, DATA, ALONE = "tensor=2,context=2", "data=2", "alone"
# Of each GPU's memory: a pool so large that 1% of it is more than what its allocator may round up.
SHARES = {CONTEXT: 0.2, DATA: 0.03, ALONE: 0.03}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]


class Served:
    """What the engines' processes say, read when it is asked for."""

    def __init__(self) -> None:
        self._began, self._found = time.perf_counter(), dict[str, Any]()
        self._processes = {layout: begun(layout) for layout in SHARES}

    def __getitem__(self, layout: str) -> dict[str, Any]:
        if layout not in self._found:
            said, _ = self._processes[layout].communicate()
            lines = [line for line in said.splitlines() if line.startswith("{")]
            assert lines, f"{layout}: the process ended with {self._processes[layout].returncode}"
            self._found[layout] = json.loads(lines[-1])
            spent = time.perf_counter() - self._began
            print(f"{layout}: there after {spent:.0f} s", flush=True)
        return self._found[layout]

    def end(self) -> None:
        for process in self._processes.values():
            with process:  # closes its pipe, and waits
                process.kill()


def begun(layout: str) -> subprocess.Popen[str]:
    whole = [str(SHARES[layout])] if layout == CONTEXT else []
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(SHARES[layout]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.two_gpus_engine", layout, *whole],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    try:
        yield served
    finally:
        served.end()


def test_each_gpus_peak_is_within_one_percent_of_the_plan_and_never_over_it(served):
    found = served[CONTEXT]
    print(f"planned {found['planned_inside']:,}, peaks {found['peaks']}")
    for peak in found["peaks"]:
        assert peak <= found["planned_inside"] <= peak * 1.01


def test_collectives_take_less_of_each_gpu_than_a_plan_says(served):
    taken = served[CONTEXT]["items"]["collectives"]
    print(f"NCCL and the collective kernels take {taken / 2**20:.0f} MiB of each GPU")
    assert 0 < taken <= COLLECTIVES


@pytest.mark.parametrize("layout", [CONTEXT, DATA])
def test_nothing_is_compiled_moved_or_allocated_after_the_seal(served, layout):
    two = served[layout]
    assert two["after_seal"] == {}
    assert two["in_use_at_the_end"] == two["in_use_when_sealed"]


@pytest.mark.parametrize("layout", [CONTEXT, DATA])
def test_the_text_is_that_of_one_gpu_for_the_first_tokens_at_least(served, layout):
    one, two = served[ALONE]["tokens"], served[layout]["tokens"]
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, two, strict=True)
    ]
    print(f"{layout}: tokens of each row until the first that differs: {same}")
    # Partial sums are rounded to bfloat16: where two tokens are as likely, rows part.
    assert min(same) >= 8
