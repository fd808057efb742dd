"""Public models' real shapes with random weights: the plan against the allocator, and the seal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.whole_gpu]


MODELS = [
    "DeepSeek-V2-Lite",
    "GLM-4.7-Flash",
    "Qwen3.5-35B-A3B",
    "Qwen3-32B",
    "Qwen3-Next-80B-A3B-FP8",
]


@pytest.fixture(scope="module", params=MODELS)
def served(request):
    """In a process of its own: JAX reads these once, and its peak cannot be reset. A fraction that
    the environment names is kept, for several such tests on one device."""
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.97",
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    command = [sys.executable, "-m", "tests.helpers.serve_real_shapes", request.param]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-8000:]
    print(done.stdout, done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    if "too_large" in found:
        pytest.skip(found["too_large"])
    return found


def test_the_peak_is_within_one_percent_of_the_plan_and_never_over_it(served):
    assert served["peak"] <= served["planned_inside"] <= served["peak"] * 1.01


def test_mixed_steps_compile_nothing_and_keep_no_new_buffer(served):
    assert min(served["prefill_steps"], served["decode_steps"]) > 50
    assert served["finished"] == ["length"] * len(served["finished"])
    assert served["after_seal"] == {}
    assert served["in_use_at_the_end"] == served["in_use_when_sealed"]
