"""Connections between processes, and a crew that ends together: in threads of one process."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.engine.distributed import transport
from jaxattn.engine.distributed.driver import DriverRunner, run_worker_loop
from jaxattn.engine.distributed.process_group import CODE, ProcessGroup
from jaxattn.engine.distributed.transport import HostError, TransportLink
from jaxattn.engine.execution.model_runner import ModelRunner
from jaxattn.engine.lifecycle import EngineLifecycle


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def pair() -> tuple[TransportLink, TransportLink]:
    """(the leader's end, the other's)."""
    address, found = f"127.0.0.1:{free_port()}", []
    waiting = threading.Thread(
        target=lambda: found.append(transport.connect_to_driver(address, timeout=10))
    )
    waiting.start()
    [leader] = transport.listen_for_workers(address, 2, timeout=10)
    waiting.join()
    return leader, found[0]


@pytest.fixture
def linked() -> Iterator[tuple[TransportLink, TransportLink]]:
    leader, other = pair()
    yield leader, other
    leader.close()
    other.close()


class Ends:
    """What would have ended a process."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._inbox = threading.Event()

    def __call__(self, message: str) -> None:
        self.messages.append(message)
        self._inbox.set()

    def wait(self, seconds: float = 5.0) -> str:
        assert self._inbox.wait(seconds), "nothing ended"
        return self.messages[0]


@pytest.fixture(params=[1.0])
def crews(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[ProcessGroup, ProcessGroup, Ends, Ends]]:
    """(the leader, another, what ends either). The parameter is how long one may be silent."""
    ends = Ends(), Ends()
    made = [
        ProcessGroup(rank, [link], link_timeout=request.param, step_timeout=0.5, end=end)
        for rank, (link, end) in enumerate(zip(pair(), ends, strict=True))
    ]
    yield made[0], made[1], *ends
    for crew in made:
        crew.close()


def test_messages_arrive_as_they_were_sent(linked):
    leader, other = linked
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    leader.send(transport.PREFILL, array, 4, 128, 1, 0)
    leader.send(transport.ALIVE, None, 3)
    leader.send(transport.FORGET)
    leader.send_text(transport.FACTS, "naïve")
    kind, found, numbers = other.receive()
    assert (kind, numbers) == (transport.PREFILL, [4, 128, 1, 0])
    np.testing.assert_array_equal(found, array)
    assert other.receive()[:2] == (transport.FORGET, None)
    assert other.receive().text == "naïve"
    leader.close()
    with pytest.raises(
        HostError, match="the connection to the leader at .* failed: the other side closed it"
    ):
        other.receive()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere.else\r\n\r\n",
        np.array([transport.MAGIC, transport.UPDATE, 1, -4, 0, 0, 0, 0, 0], np.int32).tobytes(),
        np.array([transport.MAGIC, transport.UPDATE, 2, *[2**15] * 2, 0, 0, 0, 0], "i4").tobytes(),
        np.array([transport.MAGIC, 99, 0, 0, 0, 0, 0, 0, 0], np.int32).tobytes(),
    ],
    ids=["HTTP", "less than nothing", "four gigabytes", "of no kind"],
)
def test_what_is_no_process_of_this_engine_is_refused(linked, sent):
    leader, other = linked
    leader._connection.sendall(sent)
    with pytest.raises(HostError, match="is not a process of this engine"):
        other.receive()


def test_a_leader_says_how_many_are_missing_and_a_follower_that_there_is_no_leader():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(HostError, match="0 of 2 other processes connected"):
        transport.listen_for_workers(address, 3, timeout=0.2)
    with pytest.raises(HostError, match=f"no connection to the leader at {address}"):
        transport.connect_to_driver(address, timeout=0.2)


def test_a_closed_link_accepts_nothing(linked):
    """As from a watch that looks at the links while another thread closes them."""
    leader, other = linked
    assert leader.offer(transport.ALIVE)
    leader.close()
    assert not leader.offer(transport.ALIVE)
    other.close()


def test_an_address_without_a_port_is_refused():
    for address in ("host", "host:", ":1", "host:port", "host:70000"):
        with pytest.raises(ValueError, match="address must be HOST:PORT"):
            transport.host_and_port(address)


def agreed(
    leader: ProcessGroup, other: ProcessGroup, ours: dict[str, str], theirs: dict[str, str]
) -> list[str]:
    """What the two sides raise, the leader's first."""
    raised = ["", ""]

    def side(place: int, crew: ProcessGroup, facts: dict[str, str]) -> None:
        try:
            crew.agree(facts)
        except HostError as error:
            raised[place] = str(error)

    waiting = threading.Thread(target=side, args=(1, other, theirs))
    waiting.start()
    side(0, leader, ours)
    waiting.join(5)
    return raised


def test_processes_with_the_same_facts_agree(crews):
    leader, other, *_ = crews
    facts = {"jaxattn": "1.0", "checkpoint": "5f3c"}
    assert agreed(leader, other, facts, facts) == ["", ""]
    assert leader.links[0].name == "process 1 at 127.0.0.1"


@pytest.mark.parametrize("name", ["jaxattn", "checkpoint"])
def test_another_value_is_named_with_both_and_all_are_told(crews, name):
    leader, other, _, ended = crews
    facts = {"jaxattn": "1.0", "checkpoint": "5f3c"}
    message = f"differ in {name}: process 1 at 127.0.0.1 has other, but process 0 has {facts[name]}"
    for raised in agreed(leader, other, facts, {**facts, name: "other"}):
        assert message in raised
    assert message in ended.wait()


def test_what_one_process_raises_ends_all(crews):
    leader, other, leaders_end, others_end = crews
    with pytest.raises(RuntimeError), other.together():
        raise RuntimeError("GPU 3 has 2 GB less\nthan planned")
    message = "the process group ends: process 1: GPU 3 has 2 GB less than planned"
    assert leaders_end.wait() == message
    assert others_end.messages == [message], "itself too, and once"


def test_a_process_that_is_gone_ends_the_others(crews):
    leader, other, leaders_end, _ = crews
    other._closed.set()
    other.links[0].close()
    assert "the other side closed it" in leaders_end.wait()


def test_a_process_that_says_nothing_ends_the_others(crews):
    leader, other, leaders_end, _ = crews
    other._closed.set()  # its thread sends no more; the connection is there
    assert "has sent nothing for" in leaders_end.wait()


def test_a_process_that_reads_no_more_while_it_is_sent_to_ends_the_others():
    leaders, others = pair()
    end = Ends()
    crew = ProcessGroup(0, [leaders], link_timeout=1.0, step_timeout=60.0, end=end)

    def send() -> None:  # and so it waits, as the other reads nothing
        with contextlib.suppress(HostError):
            leaders.send(transport.MASKS, np.zeros(2**24, np.int32))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    late = time.monotonic() + 5
    while leaders.offer(transport.ALIVE, None, 1):  # the thread has not begun
        assert time.monotonic() < late
        time.sleep(0.01)
    assert "has sent nothing for" in end.wait(10)
    others._connection.close()
    sending.join(5)
    crew.close()


def test_another_thread_waits_for_the_one_that_ends_the_process():
    leaders, others = pair()
    begun, ended, messages = threading.Event(), threading.Event(), []

    def end(message: str) -> None:
        messages.append(message)
        begun.set()
        assert ended.wait(10)

    crew = ProcessGroup(0, [leaders], link_timeout=60.0, step_timeout=60.0, end=end)
    threads = [threading.Thread(target=crew.end_all, args=(name,)) for name in ("first", "later")]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    ended.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert messages == ["the process group ends: first"]
    crew.close()
    others._connection.close()


def test_a_process_ends_also_where_nobody_reads_what_it_says():
    code = (
        "import sys; from jaxattn.engine.distributed.process_group import end_process; "
        "print('begun', flush=True); sys.stdin.read(); print('more'); end_process('it is over')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # "more" waits in a buffer
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        assert process.stdout.readline() == b"begun\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"error: it is over\n"
        assert process.wait(30) == CODE
    finally:
        process.kill()
        process.stderr.close()


def test_tokens_that_no_step_reads_come_into_the_histories_of_all(crews):
    """Of a prefix that is cached, and of a replay: no prefill step has them."""
    leader, other, *_ = crews
    nothing: Any = ()
    seal: Any = SimpleNamespace(allowed=contextlib.nullcontext)
    came: list[list[np.ndarray]] = [[], []]
    runners = [
        ModelRunner(
            nothing,
            {"history of 64 tokens": lambda rows, packed, own=own: own.append(packed)},
            nothing,
            nothing,
            nothing,
            seal,
        )
        for own in came
    ]
    follower = threading.Thread(target=run_worker_loop, args=(runners[1], other))
    follower.start()
    packed = np.arange(6, dtype=np.int32).reshape(1, 6)
    DriverRunner.of(runners[0], leader).remember(64, packed)
    leader.close()
    follower.join(10)
    for own in came:
        np.testing.assert_array_equal(own, [packed])


def test_a_leader_that_lost_its_state_ends_all_and_does_not_go_on_alone(crews):
    leader, _, leaders_end, others_end = crews
    nothing: Any = ()
    runner = DriverRunner.of(ModelRunner(nothing, {}, nothing, nothing, nothing, nothing), leader)
    runner.failed = True
    engine: Any = SimpleNamespace(
        _weights=SimpleNamespace(leaves=()),
        _runner=runner,
        _released=False,
        _end_rows=lambda reason: None,
    )
    with pytest.raises(HostError, match="its state is lost; start all processes again"):
        EngineLifecycle._start(engine)
    assert "its state is lost" in leaders_end.wait() and "its state is lost" in others_end.wait()


class Never:
    """A result that does not come."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return False


@pytest.mark.parametrize("sent", [True, False], ids=["not ready", "not even sent"])
def test_a_step_that_does_not_end_names_the_process_that_is_behind(crews, sent):
    leader, other, leaders_end, others_end = crews
    for crew in (leader, other):
        crew.begin()
        crew.sent(jnp.zeros(1))
    leader.begin()
    if sent:
        leader.sent(Never())
    message = leaders_end.wait()
    assert (
        "a step of process 0 has been running for" in message and "is 1 step(s) behind" in message
    )
    assert message in others_end.wait(), "the other ends with the same words"


# On a busy machine a thread may come late with its word that it is alive.
in_patience = pytest.mark.parametrize("crews", [30.0], indirect=True, ids=["patient"])


@in_patience
def test_a_process_that_follows_judges_no_step(crews):
    _, other, *ends = crews
    other.begin()
    other.sent(Never())
    time.sleep(1.2)
    assert [end.messages for end in ends] == [[], []], "its leader may be slow to send the next"


@in_patience
def test_a_step_that_ends_and_a_crew_that_is_closed_end_nothing(crews):
    leader, other, *ends = crews
    result = jnp.zeros(1)
    leader.begin()
    leader.sent(result)
    time.sleep(1.0)
    leader.close()
    assert other.links[0].receive().kind == transport.END
    other.close()
    time.sleep(0.3)
    assert [end.messages for end in ends] == [[], []]
