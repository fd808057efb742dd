"""The plan against the allocator: a 40 GiB model that serves from a full GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxattn.engine.startup.capacity_planner import SPARE

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.whole_gpu]


@pytest.fixture(scope="module")
def served():
    """In a process of its own: JAX reads these once, and its peak cannot be reset."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.98",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    command = [sys.executable, "-m", "tests.helpers.serve_full_device"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    print(done.stderr[-4000:])
    assert done.returncode == 0, done.stderr[-8000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_model_is_of_40_gib(served):
    assert 39 * 2**30 < served["weights"] < 42 * 2**30


def test_the_peak_is_within_one_percent_of_the_plan_and_never_over_it(served):
    assert served["peak"] <= served["planned_inside"] <= served["peak"] * 1.01


def test_the_cache_fills_what_the_plan_promised(served):
    assert served["cache_bytes"] == served["items"]["kv cache"]
    assert served["most_pages_owned"] == served["pages"] < served["wanted_pages"]
    page = served["cache_bytes"] // served["pages"]
    assert 0 <= served["reserve"] < (2 + SPARE * served["pages"]) * page
    assert served["planned_inside"] > 0.97 * served["limit"]


def test_500_mixed_steps_compile_nothing_and_keep_no_new_buffer(served):
    assert served["steps"] >= 500 and served["finished"] > 50
    assert min(served["prefill_steps"], served["decode_steps"]) > 50
    assert served["after_seal"] == {}
    assert served["in_use_at_the_end"] == served["in_use_when_sealed"]
