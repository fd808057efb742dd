"""An engine over two processes of two devices each, and what ends both of them."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxattn.parallel import Parallel
from tests.helpers.virtual_devices import FLAGS, on_virtual_devices
from tests.parallel import test_engine as one_process
from tests.parallel.processes import STUCK

ROOT = Path(__file__).parents[2]
# What the leader says of what is wrong with process 1.
FAULTS = {
    "version": "the processes differ in jaxattn: process 1 at 127.0.0.1 has 0.9, but process 0 "
    "has 1.0",
    "checkpoint": "the processes differ in checkpoint: process 1 at 127.0.0.1 has aaaa, but "
    "process 0 has 5f3c",
    "memory": "process 1: the plan takes 90 GB, and 80 GB are free",
    "killed": "the connection to process 1 at 127.0.0.1 failed",
    "stuck": "process 1 at 127.0.0.1 is 1 step(s) behind",
}

pytestmark = pytest.mark.slow(
    reason="processes that do not agree; found by links and one process of several devices too"
)


def two_ports() -> int:
    """The first of two ports that are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def begun(what: str, **environment: str) -> list[subprocess.Popen[str]]:
    flags = FLAGS.replace("device_count=8", "device_count=2")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **environment}
    coordinator = f"127.0.0.1:{two_ports()}"
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.processes", str(rank), coordinator, what],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("what", ["nothing", "groups"])
def test_the_leader_generates_what_one_device_does_and_no_process_keeps_executables(what, tmp_path):
    # On GPUs a process that finds one, where another does not, would leave that waiting.
    processes = begun(
        what,
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    try:
        (led, errors), (followed, others) = (each.communicate(timeout=500) for each in processes)
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0, 0], errors[-2000:] + others[-2000:]
    assert followed.splitlines()[-1] == "followed"
    compare(tokens=json.loads(led.splitlines()[-1]))
    assert not [*tmp_path.iterdir()]


@on_virtual_devices
def compare(tokens: list[list[int]]) -> None:
    one = one_process.engine(Parallel())  # shared by all tests of this process
    expected = [list(each.tokens) for each in one.generate(one_process.requests())]
    assert tokens == expected


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_with_one_process_ends_both_with_one_message_within_30_seconds(what):
    leader, other = begun(what)
    try:
        if what in ("killed", "stuck"):
            assert leader.stdout is not None
            assert "leads\n" in leader.stdout  # what goes wrong does so after this
            began = time.monotonic()
            _, errors = leader.communicate(timeout=30)
        else:
            _, errors = leader.communicate(timeout=500)
            began = time.monotonic()
        other.communicate(timeout=30)
        assert time.monotonic() - began < 30 + STUCK
    finally:
        leader.kill()
        other.kill()
    assert leader.returncode not in (0, None) and other.returncode not in (0, None)
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and FAULTS[what] in said[0] and "Traceback" not in errors, errors[-3000:]
