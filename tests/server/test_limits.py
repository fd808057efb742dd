"""Too much at once, too slow or too late: refused, with a time to come back, or cut."""

import contextlib
import socket
import threading
import time

import pytest

from jaxattn.server.http import uvicorn_connection
from jaxattn.server.http.errors import ApiError
from jaxattn.server.runtime.admission import AdmissionControl
from tests.helpers.live_server import live, objects, served
from tests.helpers.scripted_engine import ScriptedEngine


def test_a_full_queue_is_429_before_the_body_is_read():
    engine = ScriptedEngine()
    engine.hold.clear()
    with live(served(lambda: engine), max_waiting=1) as server:
        given = []

        def ask():
            given.append(server.complete("ab", max_tokens=1).status_code)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        while server.service.admission.open < 5:
            time.sleep(0.01)
        response = server.client.post("/v1/completions", content=b"not even JSON")
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        engine.hold.set()
        for thread in threads:
            thread.join()
        assert given == [200] * 5
        assert server.complete("ab").status_code == 200


def test_choices_count_each_and_more_than_ever_fit_are_400():
    with live(served(ScriptedEngine), max_waiting=0) as server:
        assert server.complete("ab", n=4).status_code == 200
        response = server.complete("ab", n=5)
        assert response.status_code == 400 and response.json()["error"]["param"] == "n"


def test_prompt_tokens_that_wait_are_limited():
    admission = AdmissionControl(rows=4, max_waiting=10, max_waiting_tokens=100)
    with admission.enter() as first, admission.enter() as second:
        first.grow(1, 80)
        with pytest.raises(ApiError, match="and 30 more would exceed the limit of 100"):
            second.grow(1, 30)
        first.begun()
        second.grow(1, 30)
        assert admission.waiting_tokens == 30
    assert admission.open == admission.choices == admission.waiting_tokens == 0


def test_the_time_to_come_back_grows_with_the_queue():
    admission = AdmissionControl(rows=2, max_waiting=98, max_waiting_tokens=None)
    for _ in range(50):
        admission.answered(2.0)
    with admission.enter() as ticket:
        assert admission.retry_seconds == 1
        ticket.grow(20, 0)
        assert 18 <= admission.retry_seconds <= 20
        ticket.grow(100, 0)
        assert admission.retry_seconds == 60


def test_a_request_that_waits_too_long_is_504_and_its_row_is_freed():
    engine = ScriptedEngine()
    engine.hold.clear()
    with live(served(lambda: engine), queue_seconds=0.2) as server:
        response = server.complete("ab", stream=True)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        engine.hold.set()
        assert server.quiet()


def test_an_answer_that_takes_too_long_ends_with_an_error():
    engine = ScriptedEngine(step_seconds=0.05)
    with live(served(lambda: engine), request_seconds=0.4) as server:
        response = server.complete("ab", stream=True, max_tokens=200)
        *events, error = objects(response.text)
        assert len(events) > 1 and error["error"]["code"] == "timeout"
        assert server.quiet()


def test_a_body_that_does_not_arrive_is_408():
    with live(served(ScriptedEngine), body_seconds=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
            connection.sendall(head + b"{")
            assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert server.quiet()


PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


def pinged(connection):
    connection.sendall(PING)
    answer = b""
    while not answer.endswith(b'{"status":"ready"}'):
        received = connection.recv(10_000)
        assert received, answer
        answer += received


@pytest.mark.parametrize(
    ("sent", "served_before"), [(b"", False), (PING[:30], False), (PING[:30], True)]
)
def test_a_head_that_does_not_arrive_closes_its_connection(sent, served_before):
    with live(served(ScriptedEngine), body_seconds=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=3) as connection:
            if served_before:
                pinged(connection)
            connection.sendall(sent)
            assert connection.recv(100) == b""


def test_an_idle_connection_stays_open_for_the_next_request(monkeypatch):
    """A client whose request meets the close of its connection gets no answer."""
    assert uvicorn_connection.KEEP_ALIVE_SECONDS > 60  # the longest of clients and proxies
    monkeypatch.setattr(uvicorn_connection, "KEEP_ALIVE_SECONDS", 1)
    with live(served(ScriptedEngine), body_seconds=0.1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            pinged(connection)
            time.sleep(0.4)  # longer than a head may take
            pinged(connection)
            begin = time.monotonic()
            assert connection.recv(100) == b"" and time.monotonic() - begin > 0.5


def test_a_body_that_trickles_on_behind_its_answer_closes_its_connection():
    """uvicorn's own time ends with the first byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    with live(served(ScriptedEngine), body_seconds=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=3) as connection:
            connection.sendall(head + b"{")
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 408 ")
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"x")
                while connection.recv(10_000):
                    pass


def test_an_answer_may_take_longer_than_a_head():
    with live(served(lambda: ScriptedEngine(step_seconds=0.1)), body_seconds=0.2) as server:
        assert server.complete("ab", max_tokens=6).status_code == 200
        assert server.complete("ab", max_tokens=1).status_code == 200
