"""What clients send: openai-python, and the request shapes of benchmarks that drive servers."""

import asyncio
import json
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import openai
import pydantic
import pytest

from tests.helpers.live_server import live, objects, served
from tests.helpers.scripted_engine import CALL, ScriptedEngine

MESSAGES = [{"role": "user", "content": "hi"}]
# As `vllm bench serve` sends them, and guidellm after a GET of /health and /v1/models.
VLLM_COMPLETION = {
    "model": "model", "prompt": "ab", "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None,
    "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
    "ignore_eos": True,
}  # fmt: skip
VLLM_CHAT = {
    "model": "model", "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
    "max_completion_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
    "temperature": 0.0, "ignore_eos": True,
}  # fmt: skip
GUIDELLM = {
    "model": "model", "prompt": "ab", "max_tokens": 5, "ignore_eos": True, "stop": None,
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_models_completions_and_chats(client):
    assert [model.id for model in client.models.list()] == ["model"]
    found = client.completions.create(model="model", prompt="ab", max_tokens=4)
    assert found.choices[0].text == "abab" and found.usage.completion_tokens == 4
    found = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=4)
    assert found.choices[0].message.content == "user"
    assert found.choices[0].finish_reason == "length"


def test_openai_streams(client):
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=4, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "user"
    assert chunks[-1].usage.total_tokens == 24
    stream = client.completions.create(model="model", prompt="ab", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abab"


def test_openai_async(scripted):
    async def ask():
        base = f"{scripted.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            answers = [
                client.completions.create(model="model", prompt="ab" * n, max_tokens=4)
                for n in range(1, 9)
            ]
            whole = [answer.choices[0].text for answer in await asyncio.gather(*answers)]
            stream = await client.chat.completions.create(
                model="model", messages=MESSAGES, max_tokens=4, stream=True
            )
            return whole, [chunk.choices[0].delta.content async for chunk in stream]

    whole, pieces = asyncio.run(ask())
    assert whole == ["abab"] * 8 and "".join(pieces) == "user"


def test_openai_raises_what_was_refused(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be a number") as refused:
        client.completions.create(model="model", prompt="ab", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="ab")


def test_openai_raises_an_error_within_a_stream():
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        base = f"{server.url}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="model", prompt="ab", max_tokens=200, stream=True
            )
            next(stream)
            engine.failures = 1
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(stream)
            stream.close()


def test_openai_tries_again_when_the_queue_is_full():
    engine = ScriptedEngine(step_seconds=0.05)
    with live(served(lambda: engine), max_waiting=0) as server:
        base = f"{server.url}/v1"

        async def ask():
            async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=5) as client:
                answers = [
                    client.completions.create(model="model", prompt="ab", max_tokens=4)
                    for _ in range(6)
                ]
                return await asyncio.gather(*answers)

        assert [answer.choices[0].text for answer in asyncio.run(ask())] == ["abab"] * 6


def test_openai_streams_calls_of_tools():
    with (
        live(served(lambda: ScriptedEngine(lambda request: f"So: {CALL}".encode()))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="model",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "weather", "parameters": {}}}],
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    assert kinds >= {"content.delta", "tool_calls.function.arguments.delta"}
    assert choice.message.content == "So:" and choice.finish_reason == "tool_calls"
    [found] = choice.message.tool_calls
    assert (found.function.name, found.function.arguments) == ("weather", '{"city":"Ulm"}')


def test_openai_parses_an_answer_of_a_schema():
    class Point(pydantic.BaseModel):
        x: int
        name: str

    with (
        live(served(lambda: ScriptedEngine(lambda request: b'{"x": 3, "name": "a"}'))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        found = client.chat.completions.parse(
            model="model", messages=MESSAGES, response_format=Point
        )
        assert found.choices[0].message.parsed == Point(x=3, name="a")
        [request] = server.service.worker.engine.added
        assert request.grammar is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_as_the_docs_have_it(scripted):
    def curl(*arguments):
        command = ["curl", "-sS", "--max-time", "20", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    page = Path(__file__).parents[2] / "docs" / "server.md"
    [line] = [line for line in page.read_text().splitlines() if line.startswith("curl ")]
    _, address, *rest = shlex.split(line)
    address = address.replace("localhost:8000", f"localhost:{scripted.port}")
    found = json.loads(curl(address, *rest))
    assert found["choices"][0]["message"]["content"].startswith("user: Hello")
    body = {"prompt": "ab", "max_tokens": 3, "stream": True}
    text = curl("-N", f"{scripted.url}/v1/completions", "-d", json.dumps(body))
    assert [event["choices"][0]["text"] for event in objects(text)] == ["a", "b", "a"]


def test_openai_closes_a_stream_and_the_row_is_freed():
    engine = ScriptedEngine(step_seconds=0.02)
    with live(served(lambda: engine)) as server:
        base = f"{server.url}/v1"
        with openai.OpenAI(base_url=base, api_key="none") as client:
            stream = client.completions.create(
                model="model", prompt="ab", max_tokens=250, stream=True
            )
            next(stream)
            stream.close()
        ended = time.perf_counter() + 3
        while engine.busy and time.perf_counter() < ended:
            time.sleep(0.01)
        assert server.quiet()
        assert len(engine.added) == 1


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", VLLM_COMPLETION),
        ("/v1/chat/completions", VLLM_CHAT),
        ("/v1/completions", GUIDELLM),
    ],
    ids=["vllm completion", "vllm chat", "guidellm"],
)
def test_benchmarks_read_tokens_times_and_usage(scripted, path, body):
    assert scripted.client.get("/health").status_code == 200
    assert scripted.client.get("/v1/models").json()["data"][0]["id"] == "model"
    *events, last = scripted.stream(path, body)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    # A benchmark takes one chunk for one token, the first of them for the time to the first token.
    assert len([event for event in events if event["choices"]]) == 5
    assert all(event["choices"] for event in events)
