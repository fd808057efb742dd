"""Requests whose fields hold anything: none is a 500, and none leaves a row behind."""

import asyncio
import json
import math

import httpx

from jaxattn.server.app import build
from tests.helpers.live_server import LiveServer


def sane(value):
    """JSON has neither NaN nor infinity, and orjson no integers beyond 64 bits: they are floats."""
    if isinstance(value, dict):
        return {key: sane(each) for key, each in value.items()}
    if isinstance(value, list):
        return [sane(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer(server: LiveServer, path: str, body: dict) -> httpx.Response:
    """What a server answers, asked without a socket."""

    async def ask():
        transport = httpx.ASGITransport(build(server.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=json.dumps(body))

    response = server.call(asyncio.wait_for(ask(), 20))
    assert response.status_code in (200, 400, 404), (body, response.text)
    assert server.service.admission.open == 0
    return response
