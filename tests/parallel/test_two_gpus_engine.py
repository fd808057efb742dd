"""An engine over two GPUs, with the kernels: the embedded model's text, each GPU's plan, its seal.

    python -m pytest -m gpu -p no:xdist -s -v tests/parallel/test_two_gpus_engine.py

Each engine has a process of its own, all at a time, as they compile for most of it. One takes
almost half of both GPUs: the peak of its process is compared with its plan.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import jax
import pytest

from jaxattn.plan.group import COLLECTIVES
from tests.parallel.processes import LONG
from tests.parallel.test_two_processes import two_ports
from tests.parallel.two_gpus_engine import ONE_LAUNCH

ROOT = Path(__file__).parents[2]
CONTEXT, DATA, ALONE = "tensor=2,context=2", "data=2", "alone"
FUSED = f"tensor=2{ONE_LAUNCH}"
PROCESSES, KILLED = "two processes", "two processes, and one is killed"
# Of each GPU's memory. A plan leaves the allocator 256 MiB for pieces that it does not split, which
# are less than 1% of the first pool.
SHARES = {CONTEXT: 0.45, DATA: 0.03, ALONE: 0.03, FUSED: 0.03, PROCESSES: 0.03, KILLED: 0.03}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]


class Served:
    """What the engines' processes say, read when it is asked for."""

    def __init__(self, layouts: Iterable[str]) -> None:
        self._began, self._found = time.perf_counter(), dict[str, Any]()
        # Of the leader that loses the other. A pipe that nobody reads yet would fill, and stop it.
        self.errors = tempfile.TemporaryFile("w+")
        self.processes = {layout: begun(layout, self.errors) for layout in layouts}

    def __getitem__(self, layout: str) -> Any:
        if layout not in self._found:
            first, *others = self.processes[layout]
            said, _ = first.communicate()
            lines = [line for line in said.splitlines() if line.startswith(("{", "["))]
            assert lines, f"{layout}: the process ended with {first.returncode}"
            assert all(each.wait() == 0 for each in others)
            self._found[layout] = json.loads(lines[-1])
            spent = time.perf_counter() - self._began
            print(f"{layout}: there after {spent:.0f} s", flush=True)
        return self._found[layout]

    def tokens(self, layout: str) -> list[list[int]]:
        return self[layout] if layout == PROCESSES else self[layout]["tokens"]

    def end(self) -> None:
        for process in itertools.chain(*self.processes.values()):
            with process:  # closes its pipes, and waits
                process.kill()
        self.errors.close()


def begun(layout: str, errors: IO[str]) -> list[subprocess.Popen[str]]:
    """The layout's process; of two the leader first, each with a GPU of its own.

    Args:
        errors: where the leader writes what is wrong, of the two of which one is killed.
    """
    share, environment = str(SHARES[layout]), dict(os.environ)
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = share
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    if layout not in (PROCESSES, KILLED):
        whole = [share] if layout == CONTEXT else []
        command = ["tests.parallel.two_gpus_engine", layout, *whole]
        return [process(command, environment)]
    found, coordinator = [], f"127.0.0.1:{two_ports()}"
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    for rank in range(2):
        wrong = layout == KILLED and rank == 0
        what = "killed" if layout == KILLED else "nothing"
        command = ["tests.parallel.processes", str(rank), coordinator, what]
        own = environment | {"CUDA_VISIBLE_DEVICES": gpus[rank]}
        found.append(process(command, own, errors if wrong else None))
    return found


def process(
    command: list[str], environment: dict[str, str], errors: IO[str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def needed(item: pytest.Item) -> set[str]:
    """The layouts that a test asks for."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    names = {"killed": {KILLED}, "text": {ALONE}, "peak": {CONTEXT}, "collectives": {CONTEXT}}
    found = set().union(*(layouts for name, layouts in names.items() if name in item.name))
    return found | {params["layout"]} if params else found


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    here = [each for each in request.session.items if each.path == request.path]
    asked = set().union(*map(needed, here))
    served = Served(layout for layout in SHARES if layout in asked)
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


@pytest.mark.parametrize("layout", [CONTEXT, DATA, FUSED])
def test_nothing_is_compiled_moved_or_allocated_after_the_seal(served, layout):
    two = served[layout]
    assert two["after_seal"] == {}
    assert two["in_use_at_the_end"] == two["in_use_when_sealed"]


@pytest.mark.parametrize("layout", [CONTEXT, DATA, FUSED, PROCESSES])
def test_the_text_is_that_of_one_gpu_for_the_first_tokens_at_least(served, layout):
    one, two = served.tokens(ALONE), served.tokens(layout)
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, two, strict=True)
    ]
    print(f"{layout}: tokens of each row until the first that differs: {same}")
    # Partial sums are rounded to bfloat16: where two tokens are as likely, rows part.
    assert min(same) >= 8


def test_a_process_that_is_killed_ends_the_other_with_one_message_and_frees_its_gpu(served):
    leader, other = served.processes[KILLED]
    try:
        assert other.wait(timeout=LONG + 10) == -signal.SIGKILL
        began = time.perf_counter()
        leader.wait(timeout=30)
    finally:
        served.errors.seek(0)
        errors = served.errors.read()
        print(errors[-3000:], flush=True)
    print(f"the leader ended {time.perf_counter() - began:.1f} s later")
    assert leader.returncode not in (0, None)
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "process 1 at 127.0.0.1 is gone" in said[0], errors[-3000:]
