"""Engines over all GPUs that there are, with the kernels: text, each GPU's plan, seal, faults.

    python -m pytest -m gpu -p no:xdist -s -v tests/parallel/test_gpus_engine.py

Each engine has a process of its own, or two with half of the GPUs each. They compile for most of
the time, so all begin at a time but such pairs: eleven pairs at a time on the same GPUs had not met
after a minute. One takes a quarter of each GPU: the peak of its process is compared
with its plan.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import jax
import pytest

from jaxattn.plan.estimated_plan import collectives
from tests.parallel.gpus_engine import EIGHT, ONE_LAUNCH, PROMPTS, TOKENS
from tests.parallel.processes import LONG
from tests.parallel.test_two_processes import FAULTS as SAID
from tests.parallel.test_two_processes import two_ports

ROOT = Path(__file__).parents[2]
GPUS = next((gpus for gpus in (8, 4) if gpus <= jax.device_count()), 2)
ALONE = "alone"
# What is wrong with the second of two processes; or each has a data group.
PROCESSES = {"two processes": "nothing", "two processes of a data group each": "groups"}
# Of the embedded model's two heads, and where there are more GPUs of eight heads.
TEXTS = {
    2: ["tensor=2,context=2", "data=2"],
    4: ["data=2,tensor=2,context=2", "data=4"],
    8: ["data=4,tensor=2,context=2", "data=8"],
}[GPUS]
WIDE = (
    [] if GPUS == 2 else [f"tensor={GPUS},context={GPUS}{EIGHT}", f"tensor={GPUS},context=2{EIGHT}"]
)
FUSED = f"tensor=2{ONE_LAUNCH}" if GPUS == 2 else f"tensor={GPUS}{EIGHT}{ONE_LAUNCH}"
WHOLE = (WIDE or TEXTS)[0]
SEALED = [*TEXTS, *WIDE, FUSED, f"{WHOLE}{ONE_LAUNCH}"]
FAULTS = {f"two processes: {what}": what for what in SAID}
# Of each GPU's memory. A plan leaves the allocator 256 MiB for pieces that it does not split, which
# are less than 1% of a pool of 27 GB.
SHARE, MOST_SHARE = "0.012", "0.27"
APART = 15.0  # seconds from one pair of processes to the next
LACKS = "0.001"  # too little for any plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]


class Served:
    """What the engines' processes say, read when it is asked for."""

    def __init__(self, layouts: Iterable[str]) -> None:
        self._began, self._found = time.perf_counter(), dict[str, Any]()
        # Of leaders that lose the other. A pipe that nobody reads yet would fill, and stop it.
        self._errors = {layout: tempfile.TemporaryFile("w+") for layout in FAULTS}
        self.processes = dict[str, list[subprocess.Popen[str]]]()
        for layout in layouts:
            if self.processes and layout in PROCESSES | FAULTS:
                time.sleep(APART)
            self.processes[layout] = begun(layout, self._errors.get(layout))
        self._pool = ThreadPoolExecutor(2 * len(FAULTS))
        wrong = FAULTS.keys() & self.processes.keys()
        self._ends = {
            layout: [self._pool.submit(ended, each) for each in self.processes[layout]]
            for layout in wrong
        }

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
        return self[layout] if layout in PROCESSES else self[layout]["tokens"]

    def errors(self, layout: str) -> str:
        """What the leader wrote."""
        self._errors[layout].seek(0)
        return self._errors[layout].read()

    def ends(self, layout: str) -> list[float]:
        """When its processes ended, by `time.time()`."""
        return [each.result(timeout=LONG) for each in self._ends[layout]]

    def end(self) -> None:
        for process in itertools.chain(*self.processes.values()):
            with process:  # closes its pipes, and waits
                process.kill()
        self._pool.shutdown()
        for errors in self._errors.values():
            errors.close()


def ended(process: subprocess.Popen[str]) -> float:
    process.wait()
    return time.time()


def begun(layout: str, errors: IO[str] | None) -> list[subprocess.Popen[str]]:
    """The layout's process; of two the leader first, each with half of the GPUs.

    Args:
        errors: where the leader writes what is wrong, if something will be.
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    processes = PROCESSES | FAULTS
    if layout not in processes:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = MOST_SHARE if layout == WHOLE else SHARE
        whole = [MOST_SHARE] if layout == WHOLE else []
        return [process(["tests.parallel.gpus_engine", layout, *whole], environment)]
    what, coordinator = processes[layout], f"127.0.0.1:{two_ports()}"
    seen = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
    found, half = [], GPUS // 2
    for rank in range(2):
        lacks = what == "memory" and rank == 1
        own = environment | {
            "CUDA_VISIBLE_DEVICES": ",".join(seen[rank * half : (rank + 1) * half]),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": LACKS if lacks else SHARE,
        }
        command = ["tests.parallel.processes", str(rank), coordinator, what]
        found.append(process(command, own, None if rank else errors))
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
    names = {"text": {ALONE}, "peak": {WHOLE}, "collectives": {WHOLE}}
    found = set().union(*(layouts for name, layouts in names.items() if name in item.name))
    return found | {params["layout"]} if params else found


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    here = [each for each in request.session.items if each.path == request.path]
    asked = set().union(*map(needed, here))
    every = [ALONE, *SEALED, *PROCESSES, *FAULTS]
    served = Served(layout for layout in every if layout in asked)
    try:
        yield served
    finally:
        served.end()


def test_each_gpus_peak_is_within_one_percent_of_the_plan_and_never_over_it(served):
    found = served[WHOLE]
    print(f"planned {found['planned_inside']:,}, peaks {found['peaks']}")
    for peak in found["peaks"]:
        assert peak <= found["planned_inside"] <= peak * 1.01


def test_collectives_take_less_of_each_gpu_than_a_plan_says(served):
    taken = served[WHOLE]["items"]["collectives"]
    print(f"NCCL and the collective kernels take {taken / 2**20:.0f} MiB of each GPU")
    assert 0 < taken <= collectives(GPUS)


@pytest.mark.parametrize("layout", SEALED)
def test_nothing_is_compiled_moved_or_allocated_after_the_seal(served, layout):
    found = served[layout]
    assert found["after_seal"] == {}
    assert found["in_use_at_the_end"] == found["in_use_when_sealed"]


# Of more than two GPUs these have eight heads with random weights.
@pytest.mark.parametrize("layout", [*TEXTS, *([FUSED, *PROCESSES] if GPUS == 2 else [])])
def test_the_text_is_that_of_one_gpu_for_the_first_tokens_at_least(served, layout):
    one, more = served.tokens(ALONE), served.tokens(layout)
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, more, strict=True)
    ]
    print(f"{layout}: tokens of each row until the first that differs: {same}")
    # Partial sums are rounded to bfloat16: where two tokens are as likely, rows part.
    assert min(same) >= 8


@pytest.mark.parametrize("layout", PROCESSES)
def test_two_processes_with_half_of_the_gpus_each_answer_all_requests(served, layout):
    assert [len(tokens) for tokens in served.tokens(layout)] == [TOKENS] * len(PROMPTS)


@pytest.mark.parametrize("layout", FAULTS)
def test_what_is_wrong_with_one_process_ends_both_with_one_message_and_frees_the_gpus(
    served, layout
):
    leader, other = served.processes[layout]
    what, ends = FAULTS[layout], served.ends(layout)
    assert other.stdout is not None
    told = [line.split()[-1] for line in other.stdout if line.startswith("wrong from now on")]
    began = float(told[0]) if told else min(ends)
    errors = served.errors(layout)
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    print(f"{what}: both had ended {max(ends) - began:.1f} s later; {said}", flush=True)
    assert max(ends) - began < 30
    assert other.returncode == -signal.SIGKILL if what == "killed" else other.returncode > 0
    assert leader.returncode > 0
    wanted = "process 1: " if what == "memory" else SAID[what]
    assert len(said) == 1 and wanted in said[0], errors[-3000:]
