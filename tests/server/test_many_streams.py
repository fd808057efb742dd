"""128 streams at once: no token is lost, doubled or another's, and no stream starves."""

import asyncio
import json
import statistics
import time

import pytest

from jaxattn.engine.engine import Engine
from jaxattn.engine.requests.request import Request
from jaxattn.limits import Limits
from jaxattn.models import load
from jaxattn.models.checkpoint import EMBEDDED
from tests.helpers.live_server import live, served
from tests.helpers.scripted_engine import ScriptedEngine

STREAMS = 128


async def streamed(port, prompt, tokens):
    """(the text, when each chunk of it came)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    body = json.dumps(asked).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    text, times = "", []
    async for line in reader:
        if line == b"data: [DONE]\n":
            break
        if line.startswith(b"data: "):
            times.append(time.perf_counter())
            text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    writer.close()
    return text, times


def crowd(port, prompts, tokens):
    async def all_of_them():
        return await asyncio.gather(*(streamed(port, prompt, tokens) for prompt in prompts))

    return asyncio.run(all_of_them())


def test_each_stream_has_its_own_text():
    prompts = [f"<{number}>" for number in range(STREAMS)]
    with live(served(ScriptedEngine), max_waiting=STREAMS) as server:
        found = crowd(server.port, prompts, 30)
        assert [text for text, _ in found] == [(prompt * 30)[:30] for prompt in prompts]
        assert server.quiet()


@pytest.mark.slow(
    reason="a stream that starves beside a real model; found by as many streams of a scripted "
    "engine too"
)
@pytest.mark.timeout(1800)
def test_streams_of_the_embedded_model_have_what_generate_gives_and_none_starves():
    """One bucket of 128 rows, so that a row's bits do not depend on how many others there are."""
    limits, tokens = Limits(batch=STREAMS, max_model_len=128, prefill_chunk=32), 24
    prompts = [f"def f{number}(x):\n    return " for number in range(STREAMS)]
    model, params = load(EMBEDDED)
    with Engine(model, params, limits) as engine:
        done = engine.generate([Request(prompt.encode(), max_tokens=tokens) for prompt in prompts])
        with live(served(lambda: engine, limits=limits)) as server:
            found = crowd(server.port, prompts, tokens)
    assert [text.encode() for text, _ in found] == [bytes(each.tokens) for each in done]
    # Two rounds that are read in one step give a chunk of two tokens. It must stay a rare case.
    assert sum(len(times) for _, times in found) >= 0.98 * STREAMS * tokens
    gaps = [
        after - before
        for _, times in found
        for before, after in zip(times, times[1:], strict=False)
    ]
    longest = statistics.quantiles(gaps, n=100)[-1]
    assert longest <= 3 * statistics.median(gaps)
