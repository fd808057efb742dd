"""An engine over two GPUs, with the kernels: the embedded model's text, each GPU's plan, its seal.

Each engine has a process of its own (two_gpus_engine.py), and all run at a time: a GPU's peak
cannot be reset, and what NCCL takes of it is taken once in a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxattn.plan.group import COLLECTIVES

ROOT = Path(__file__).parents[2]
LAYOUTS = ["tensor=2", "tensor=2,context=2", "data=2"]
# Of the GPU. One pool is so large that 1% of it is more than what its allocator may round up.
FRACTIONS = {"alone": 0.08, "tensor=2": 0.08, "tensor=2,context=2": 0.45, "data=2": 0.08}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, Any]]:
    """What the process of each layout says of its engine."""
    processes = {layout: begun(layout, share) for layout, share in FRACTIONS.items()}
    found = {}
    try:
        for layout, process in processes.items():
            out, errors = process.communicate(timeout=300)
            print(layout, out, errors[-2000:])
            assert process.returncode == 0, f"{layout}: {errors[-6000:]}"
            found[layout] = json.loads(out.splitlines()[-1])
    finally:
        for process in processes.values():
            process.kill()
    return found


def begun(layout: str, share: float) -> subprocess.Popen[str]:
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(share),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.two_gpus_engine", layout, str(share)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_collectives_take_less_of_each_gpu_than_a_plan_says():
    """Before `served` begins, while no other process takes or gives back memory."""
    code = (
        "import jax; from jaxattn.parallel import Group, Parallel; "
        "from jaxattn.parallel.probe import collectives_bytes; "
        "print(collectives_bytes(Group(Parallel(tensor=2), tuple(jax.devices()[:2]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    taken = int(done.stdout.splitlines()[-1])
    print(f"NCCL and the collective kernels take {taken / 2**20:.0f} MiB of each GPU")
    assert 0 < taken <= COLLECTIVES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_is_that_of_one_gpu_for_the_first_tokens_at_least(served, layout):
    one, two = served["alone"]["tokens"], served[layout]["tokens"]
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, two, strict=True)
    ]
    print(f"{layout}: tokens of each row until the first that differs: {same}")
    # Partial sums are rounded to bfloat16: where two tokens are as likely, rows part.
    assert min(same) >= 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_compiled_moved_or_allocated_after_the_seal(served, layout):
    two = served[layout]
    assert two["after_seal"] == {}
    assert two["in_use_at_the_end"] == two["in_use_when_sealed"]


def test_each_gpus_peak_is_within_one_percent_of_the_plan_and_never_over_it(served):
    for layout, found in served.items():
        for peak in found["peaks"]:
            print(f"{layout}: planned {found['planned_inside']:,}, peak {peak:,}")
            assert peak <= found["planned_inside"]
            if FRACTIONS[layout] > 0.4:
                assert found["planned_inside"] <= peak * 1.01
