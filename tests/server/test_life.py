"""From start to end: what is served when, who left, and what a stuck or lost device does."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxattn.server.runtime import watchdog
from jaxattn.server.runtime.server_state import ServerState
from jaxattn.server.runtime.watchdog import CODE, Watchdog
from tests.helpers.live_server import live, objects, served
from tests.helpers.scripted_engine import ScriptedEngine

LONG = {"prompt": "ab", "max_tokens": 250, "stream": True}


@contextlib.contextmanager
def streaming(server, body=LONG):
    """A stream of which the first piece has come: (the response, its pieces)."""
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_text()
        next(pieces)
        yield response, pieces


def until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


def test_while_the_model_is_compiled_the_answer_is_503():
    compiled = threading.Event()

    def make():
        compiled.wait()
        return ScriptedEngine()

    with live(served(make), wait=False) as server:
        for response in (server.client.get("/health"), server.complete("ab")):
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json()["error"]["code"] == "starting"
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/ping").json() == {"status": "starting"}
        compiled.set()
        server.call(server.service.ready())
        assert server.client.get("/health").json() == {"status": "ready"}
        assert server.complete("ab").status_code == 200


def test_an_engine_that_cannot_be_made_fails_the_server():
    def make():
        raise ValueError("no such model")

    with live(served(make)) as server:
        assert server.service.phase is ServerState.FAILED
        assert server.client.get("/health").json()["error"]["code"] == "failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(stream):
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        body = b'{"prompt": "ab", "max_tokens": 250, "stream": %s}' % str(stream).lower().encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            until(lambda: engine.scheduler.rows)
        until(lambda: not engine.busy)
        assert server.quiet() and engine.scheduler.pages.in_use == 0
        text = server.client.get("/metrics").text
        assert 'jaxattn:requests_left_total{model_name="model"} 1.0' in text
        assert 'finished_reason="abort"' in text
        begun = time.perf_counter()
        assert server.complete("ab", max_tokens=1).status_code == 200
        assert time.perf_counter() - begun < 2


def test_a_client_that_leaves_while_it_waits_frees_its_place():
    engine = ScriptedEngine()
    engine.hold.clear()
    with live(served(lambda: engine)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = b'{"prompt": "ab"}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            until(lambda: server.service.admission.open)
        until(lambda: not server.service.admission.open)
        engine.hold.set()
        assert server.quiet()


def test_a_slow_reader_holds_up_nobody_and_is_dropped():
    engine = ScriptedEngine()
    prompt = "ab" * 50
    with live(served(lambda: engine), write_seconds=0.5, buffered=4096) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", server.port))
        body = b'{"prompt": "%s", "max_tokens": 9, "n": 100, "stream": true, "echo": true}'
        body %= b"ab" * 60
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        slow.sendall(head % len(body) + body)
        for _ in range(20):
            assert server.complete(prompt, max_tokens=3).status_code == 200
        until(lambda: not server.service.admission.open)
        assert server.quiet()
        assert 'requests_left_total{model_name="model"} 1.0' in server.client.get("/metrics").text
        slow.close()


def test_a_drain_lets_answers_end_and_takes_no_more_in():
    engine = ScriptedEngine(step_seconds=0.01)
    body = LONG | {"max_tokens": 60}
    with live(served(lambda: engine)) as server, streaming(server, body) as (_, pieces):
        engine.hold.clear()  # the answer lasts as long as the questions
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(10), server._loop)
        until(lambda: server.service.phase is ServerState.DRAINING)
        for response in (server.client.get("/health"), server.complete("ab")):
            assert response.status_code == 503 and response.headers["connection"] == "close"
            assert response.json()["error"]["code"] == "draining"
        engine.hold.set()
        events = objects("".join(pieces))
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert draining.result(10) is True


def test_what_a_drain_does_not_wait_for_ends_with_an_error():
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server, streaming(server) as (_, pieces):
        assert server.call(server.service.drain(0.1)) is False
        *_, error = objects("".join(pieces))
        assert error["error"]["code"] == "draining"
        assert not engine.busy


def test_an_engine_that_fails_again_and_again_ends_every_answer_and_the_server():
    engine = ScriptedEngine(step_seconds=0.01)
    engine.script = lambda request: [97] * 1000
    with live(served(lambda: engine)) as server, streaming(server) as (_, pieces):
        engine.step = lambda: 1 / 0
        *_, error = objects("".join(pieces))
        assert error["error"]["code"] == "engine_error"
        until(lambda: server.service.phase is ServerState.FAILED)
        assert server.complete("ab").status_code == 503
        assert engine.closed
        server.service.worker.engine = None


def test_a_watchdog_ends_its_process_and_tells_what_each_thread_did():
    code = (
        "import runpy, sys, threading, time\n"
        "Watchdog = runpy.run_path(sys.argv[1])['Watchdog']\n"  # without JAX, which takes seconds
        "began = time.perf_counter()\n"
        "def device(): time.sleep(60)\n"
        "threading.Thread(target=device, daemon=True).start()\n"
        "Watchdog(lambda: time.perf_counter() - began, 0.2).start(); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, watchdog.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == CODE == 70
    assert "has taken more than 0.2 s" in done.stderr and "in device" in done.stderr


def test_a_step_that_hangs_ends_the_process():
    ended = threading.Event()
    engine = ScriptedEngine()
    with live(served(lambda: engine)) as server:
        guard = Watchdog(server.service.worker.get_step_seconds, 0.3, ended.set)
        guard.start()
        for _ in range(10):
            server.complete("ab", max_tokens=5)
            time.sleep(0.05)  # an idle engine is not stuck
        assert not ended.is_set()
        engine.hold.clear()
        waiting = threading.Thread(target=server.complete, args=("ab",))
        waiting.start()
        assert ended.wait(5)
        engine.hold.set()
        waiting.join()
        guard.stop()
