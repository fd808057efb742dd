"""An engine over two processes of two devices each, and what its connections refuse."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxattn.engine import hosts
from jaxattn.parallel import Parallel
from tests.helpers.virtual_devices import FLAGS, on_virtual_devices
from tests.parallel import test_engine as one_process

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_the_leader_generates_what_one_device_does():
    flags = FLAGS.replace("device_count=8", "device_count=2")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.processes", str(rank), *addresses],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (led, errors), (followed, others) = (each.communicate(timeout=240) for each in processes)
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0, 0], errors[-2000:] + others[-2000:]
    assert followed.splitlines()[-1] == "followed"
    compare(tokens=json.loads(led.splitlines()[-1]))


@on_virtual_devices
def compare(tokens: list[list[int]]) -> None:
    with one_process.engine(Parallel()) as one:
        expected = [list(each.tokens) for each in one.generate(one_process.requests())]
    assert tokens == expected


@pytest.fixture
def linked() -> Iterator[tuple[hosts.Link, hosts.Link]]:
    """(the leader's end, the other's)."""
    address, found = f"127.0.0.1:{free_port()}", []
    waiting = threading.Thread(target=lambda: found.append(hosts.follow(address, timeout=10)))
    waiting.start()
    [leader] = hosts.lead(address, 2, timeout=10)
    waiting.join()
    yield leader, found[0]
    leader.close()
    found[0].close()


def test_messages_arrive_as_they_were_sent(linked):
    leader, other = linked
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    leader.send(hosts.PREFILL, array, 4, 128, 1)
    leader.send(hosts.FORGET)
    kind, found, numbers = other.receive()
    assert (kind, numbers) == (hosts.PREFILL, [4, 128, 1])
    np.testing.assert_array_equal(found, array)
    assert other.receive()[:2] == (hosts.FORGET, None)
    leader.close()
    with pytest.raises(hosts.HostError, match="the leader at .* is gone"):
        other.receive()


def test_what_is_no_process_of_this_engine_is_refused(linked):
    leader, other = linked
    leader._connection.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.else\r\n\r\n")
    with pytest.raises(hosts.HostError, match="is no process of this engine"):
        other.receive()


def test_a_leader_says_how_many_are_missing_and_a_follower_that_there_is_no_leader():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(hosts.HostError, match="0 of 2 other processes came"):
        hosts.lead(address, 3, timeout=0.2)
    with pytest.raises(hosts.HostError, match=f"no leader at {address}"):
        hosts.follow(address, timeout=0.2)
