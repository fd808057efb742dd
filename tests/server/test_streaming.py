"""Streams as they stand on the wire: headers, chunks, usage, comments, errors and the end."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxattn.server.openai.completions import CompletionResponseBuilder
from tests.helpers.live_server import live, objects, served
from tests.helpers.scripted_engine import ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_headers_and_lines(scripted):
    response = scripted.complete("ab", stream=True, max_tokens=3)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    lines = response.text.split("\n\n")
    assert lines.pop() == "" and lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)


def test_one_chunk_for_each_token_and_the_role_with_the_first(scripted):
    events = scripted.stream("/v1/chat/completions", CHAT)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "u"}
    assert deltas[1:] == [{"content": text} for text in "ser"]
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_several_tokens_of_a_step_are_one_chunk_and_stop_strings_have_them_one_by_one():
    engine = ScriptedEngine(tokens=4)
    with live(served(lambda: engine)) as server:
        engine.before_step = server.settle
        body = {"prompt": "abcdefgh", "max_tokens": 11, "stream": True}
        events = server.stream("/v1/completions", body)
        assert [each["choices"][0]["text"] for each in events] == ["a", "bcde", "fgha", "bc"]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        events = server.stream("/v1/completions", body | {"stop": "g"})
        assert [each["choices"][0]["text"] for each in events] == [*"abcdef", ""]
        assert server.quiet()


def test_a_loop_that_is_behind_makes_a_chunk_of_several_steps():
    async def busy():
        time.sleep(0.4)

    with live(served(lambda: ScriptedEngine(step_seconds=0.004))) as server:
        body = {"prompt": "abcdefgh", "max_tokens": 120, "stream": True}
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(server.stream, "/v1/completions", body)
            while not server.service.metrics.totals.generated_tokens:
                time.sleep(0.001)
            server.call(busy())
            events = stream.result()
        assert "".join(each["choices"][0]["text"] for each in events) == "abcdefgh" * 15
        assert len(events) < 100
        assert server.service.metrics.totals.generated_tokens == 120
        assert server.quiet()


def test_the_usage_chunk_has_no_choices(scripted):
    options = {"stream_options": {"include_usage": True}}
    *events, last = scripted.stream("/v1/chat/completions", CHAT | options)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(event["usage"] is None for event in events)


def test_usage_in_every_chunk(scripted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "max_tokens": 3, "stream_options": options}
    events = scripted.stream("/v1/completions", body)
    assert [event["usage"]["completion_tokens"] for event in events][-1] == 3
    assert all(event["usage"]["prompt_tokens"] == 2 for event in events)


def test_a_first_token_without_a_character_has_a_chunk(scripted):
    events = scripted.stream("/v1/completions", {"prompt": "é", "max_tokens": 4})
    assert [event["choices"][0]["text"] for event in events] == ["", "é", "é"]


def test_a_row_that_fails_in_a_stream_gives_an_error_and_the_end():
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        body = {"prompt": "ab", "max_tokens": 200, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            begun = next(pieces)
            engine.failures = 1
            *events, error = objects(begun + "".join(pieces))
        assert events and error["error"]["code"] == "engine_error"
        assert server.complete("ab").status_code == 200  # the engine goes on
        assert server.quiet()


def test_a_row_that_fails_at_once_has_a_status():
    engine = ScriptedEngine()
    engine.failures = 1
    with live(served(lambda: engine)) as server:
        response = server.complete("ab", stream=True)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the engine failed; the answer is incomplete"
        assert "device" not in response.text  # no internals


@pytest.mark.parametrize("choices", [1, 3])
def test_comments_keep_a_waiting_stream_open(choices):
    engine = ScriptedEngine()
    engine.hold.clear()
    with live(served(lambda: engine), ping_seconds=0.05) as server:
        threading.Timer(0.3, engine.hold.set).start()
        response = server.complete("ab", stream=True, n=choices, max_tokens=2)
        assert response.text.startswith(": ping\n\n: ping\n\n")
        assert len(objects(response.text)) == 2 * choices


def raw(port, version, body):
    """All bytes of an answer, as a client that only knows sockets reads them."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return b"".join(iter(lambda: client.recv(2**16), b"")).partition(b"\r\n\r\n")


def test_chunks_are_framed_for_http_1_1_alone(scripted):
    body = {"prompt": "ab", "max_tokens": 40, "stream": True}
    head, _, text = raw(scripted.port, "1.1", body)
    assert b"transfer-encoding: chunked" in head.lower()
    parts, rest = [], text
    while rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]
    head, _, plain = raw(scripted.port, "1.0", body)
    assert b"chunked" not in head.lower()
    for whole in (b"".join(parts), plain):
        events = objects(whole.decode())
        assert "".join(event["choices"][0]["text"] for event in events) == "ab" * 20
    assert len(parts) > 2  # a write for each step, or for several where the loop is behind


def test_a_fault_in_one_answer_s_json_ends_no_other(scripted, monkeypatch):
    def choice(self, piece, *, begins, choice=CompletionResponseBuilder.choice):
        if "z" in piece.text:
            raise ZeroDivisionError("of a test")
        return choice(self, piece, begins=begins)

    monkeypatch.setattr(CompletionResponseBuilder, "choice", choice)
    with ThreadPoolExecutor(2) as pool:
        body = {"max_tokens": 200, "stream": True}
        fine = pool.submit(scripted.post, "/v1/completions", {"prompt": "ab", **body})
        bad = pool.submit(scripted.post, "/v1/completions", {"prompt": "a" * 99 + "z", **body})
        assert "internal server error" in bad.result().text
        events = objects(fine.result().text)
    assert "".join(event["choices"][0]["text"] for event in events) == "ab" * 100
