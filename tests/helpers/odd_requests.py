"""Requests with arbitrary fields: none may give status 500 or leave a row behind."""

import asyncio
import json
import math

import httpx

from jaxattn.server.app import build
from tests.helpers.live_server import LiveServer


def sane(value):
    """Replaces NaN and infinity, which JSON lacks; orjson reads larger integers as floats."""
    if isinstance(value, dict):
        return {key: sane(each) for key, each in value.items()}
    if isinstance(value, list):
        return [sane(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer(server: LiveServer, path: str, body: dict) -> httpx.Response:
    """A server's answer to a request, sent without a socket."""

    async def ask():
        transport = httpx.ASGITransport(build(server.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=json.dumps(body))

    response = server.call(asyncio.wait_for(ask(), 20))
    assert response.status_code in (200, 400, 404), (body, response.text)
    assert server.service.admission.open == 0
    return response
