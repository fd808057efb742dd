"""Clients of every kind, good and bad, at once, which a server has to survive."""

import asyncio
import collections
import contextlib
import json
import random
import socket
import struct

import httpx

from tests.helpers.live_server import objects

BAD = (
    b"",
    b"{",
    b"[]",
    b"\xff",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "logit_bias": {"a": 1}}',
    b'{"prompt": "x", "response_format": {"type": "regex", "pattern": "("}}',
)
MOST_BODY = 10_000
EXTRAS = (
    {},
    {},
    {"logprobs": 2},
    {"stop": "zz"},
    {"stop": ["a", "e"]},
    {"temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"97": 5}},
    {"priority": 1},
    {"cache_salt": "s"},
)


class Storm:
    """One storm against one server.

    Args:
        port: The server's port on loopback.
        grammars: Whether some requests have a grammar.

    Attributes:
        outcomes: The number of events of each kind.
        whole: The number of answers that were read to the end, with any content.
    """

    def __init__(self, port: int, *, grammars: bool):
        self.port, self.outcomes, self.whole = port, collections.Counter[str](), 0
        self._extras = EXTRAS
        if grammars:
            ruled = {"response_format": {"type": "regex", "pattern": "[ab]+"}}
            self._extras = (*EXTRAS, ruled)
        self._kinds = {
            "whole": self._ask,
            "stream": self._ask,
            "abort": self._leave,
            "impatient": self._lose_patience,
            "disconnect": self._reset,
            "half": self._send_half,
            "slow": self._read_slowly,
            "bad JSON": self._send_bad,
            "huge body": self._send_huge,
            "too long": self._send_long,
            "lost": self._miss,
        }

    async def rage(self, events: int, guests: int, seed: int) -> None:
        """Runs `events` events, with `guests` clients at once."""
        limits = httpx.Limits(max_connections=guests)
        url = f"http://127.0.0.1:{self.port}"
        numbers = iter(range(events))
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:

            async def guest(luck: random.Random) -> None:
                for _ in numbers:
                    kind = luck.choice(list(self._kinds))
                    await self._kinds[kind](client, luck, kind)
                    self.outcomes[kind] += 1

            lucks = [random.Random(f"{seed} {number}") for number in range(guests)]
            await asyncio.gather(*map(guest, lucks))

    def _body(self, luck: random.Random, **more: object) -> dict[str, object]:
        body = {"prompt": "ab" * luck.randint(1, 50), "max_tokens": luck.choice((1, 2, 5, 9))}
        return {**body, "n": luck.choice((1, 1, 1, 3)), **luck.choice(self._extras), **more}

    async def _ask(self, client: httpx.AsyncClient, luck: random.Random, kind: str) -> None:
        body = self._body(luck, stream=kind == "stream")
        # Many requests share an id: it belongs to the client, and names nothing in the server.
        headers = {"x-request-id": f"id-{luck.randrange(3)}"}
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code in (200, 429, 500, 503), response.text
        if response.status_code == 200:
            found = objects(response.text) if body["stream"] else [response.json()]
            ends = [choice["finish_reason"] for each in found for choice in each.get("choices", ())]
            failed = [each["error"] for each in found if "error" in each]
            assert len(failed) <= 1
            assert failed or sum(map(bool, ends)) == body["n"], found
        self.whole += 1

    async def _leave(self, client: httpx.AsyncClient, luck: random.Random, _: str) -> None:
        body = self._body(luck, stream=True, max_tokens=40)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_text():
                break

    async def _lose_patience(self, client: httpx.AsyncClient, luck: random.Random, _: str) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=self._body(luck), timeout=luck.random() / 20)

    async def _send_bad(self, client: httpx.AsyncClient, luck: random.Random, _: str) -> None:
        response = await client.post("/v1/completions", content=luck.choice(BAD))
        assert response.status_code in (400, 429, 503), response.text

    async def _send_huge(self, client: httpx.AsyncClient, luck: random.Random, _: str) -> None:
        data = b"x" * (2 * MOST_BODY)

        async def pieces():
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]

        content = data if luck.random() < 0.5 else pieces()  # with and without a length
        try:
            response = await client.post("/v1/completions", content=content)
        except httpx.TransportError:
            return  # the server refused it and closed the connection during the upload
        assert response.status_code in (413, 429, 503), response.text

    async def _send_long(self, client: httpx.AsyncClient, luck: random.Random, _: str) -> None:
        body = {"prompt": "x" * luck.randint(256, 2000)}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code in (400, 429, 503), response.text

    async def _miss(self, client: httpx.AsyncClient, luck: random.Random, _: str) -> None:
        method, path = luck.choice((("GET", "/v1/none"), ("GET", "/v1/completions")))
        assert (await client.request(method, path)).status_code in (404, 405)

    async def _reset(self, _: httpx.AsyncClient, luck: random.Random, kind: str) -> None:
        """Sends a whole request, and resets the connection at once or a little later."""
        with self._connection() as connection:
            await self._send(connection, self._head(luck, stream=luck.random() < 0.5))
            await asyncio.sleep(luck.choice((0, luck.random() / 10)))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _send_half(self, _: httpx.AsyncClient, luck: random.Random, kind: str) -> None:
        """Sends a part of a head or of a body, and closes the connection."""
        data = self._head(luck)
        with self._connection() as connection:
            await self._send(connection, data[: luck.randrange(len(data))])
            await asyncio.sleep(luck.random() / 20)

    async def _read_slowly(self, _: httpx.AsyncClient, luck: random.Random, kind: str) -> None:
        """Reads a few bytes of a long stream now and then."""
        with self._connection() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            await self._send(connection, self._head(luck, stream=True, n=4, max_tokens=20))
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, TimeoutError):
                for _ in range(luck.randint(1, 4)):
                    async with asyncio.timeout(5):
                        if not await loop.sock_recv(connection, 20):
                            break
                    await asyncio.sleep(luck.random() / 5)

    def _head(self, luck: random.Random, **more: object) -> bytes:
        body = json.dumps(self._body(luck, **more)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        return head % len(body) + body

    def _connection(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setblocking(False)
        return connection

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(connection, data)
