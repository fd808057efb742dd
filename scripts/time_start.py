"""Times the server's start with and without cached executables, and its first token.

    python -m scripts.time_start RESULT.json [--random MODEL] [-- OPTIONS OF SERVE]

The script starts `python -m jaxattn.serve --port` twice: with an empty folder of executables, and
then with the executables of the first start. In between it sends prompts of 1,000 tokens one at a
time, and pairs of prompts with a common prefix. The embedded model uses bytes as tokens. With
--random the model is a shipped configuration with random weights, drawn anew in each start
(bench/load/random_server.py).
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONGEST_START = 600.0  # seconds
PREFILL = "vllm:request_prefill_time_seconds"


class Server:
    """A server process, which is ready after construction.

    Args:
        kept: The folder of its executables.
        options: Additional options of `serve`.
        random: A shipped configuration; None serves the embedded model.
    """

    def __init__(self, kept: str, options: list[str], random: str | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        begin = time.perf_counter()
        given = ["--port", str(self.port), "--compile-cache", kept, *options]
        command = ["jaxattn.bench.load.random_server", random] if random else ["jaxattn.serve"]
        # With a cache from the environment, the first start would already be a cached one.
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self.process = subprocess.Popen([sys.executable, "-m", *command, *given], env=environment)
        while not self._ready():
            if self.process.poll() is not None or time.perf_counter() - begin > LONGEST_START:
                self.end()
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        self.seconds = time.perf_counter() - begin

    def _ready(self) -> bool:
        try:
            return self.ask("GET", "/health").status == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Sends a request and returns the response once its headers have arrived."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, body=text, headers={"content-type": "application/json"})
        return connection.getresponse()

    def first_token(self, prompt: str) -> float:
        """Seconds from sending a prompt to the first event of its stream."""
        body = {"prompt": prompt, "max_tokens": 4, "stream": True, "temperature": 0}
        begin = time.perf_counter()
        answer = self.ask("POST", "/v1/completions", body)
        while not (line := answer.readline()).startswith(b"data: "):
            if not line:
                raise SystemExit(f"no event came: status {answer.status}")
        seconds = time.perf_counter() - begin
        answer.read()
        return seconds

    def prefill_seconds(self) -> tuple[float, float]:
        """(sum of the prefill seconds, number) of all prompts so far."""
        text = self.ask("GET", "/metrics").read().decode().splitlines()
        total, count = (
            next(float(line.split()[-1]) for line in text if line.startswith(f"{PREFILL}_{part}{{"))
            for part in ("sum", "count")
        )
        return total, count

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def text_of(draw: random.Random, length: int) -> str:
    return "".join(chr(draw.randrange(97, 123)) for _ in range(length))


def first_tokens(server: Server, requests: int, prefix_tokens: int) -> dict[str, float]:
    """Times to the first token on an idle server, in milliseconds."""
    draw = random.Random(1)
    for _ in range(5):
        server.first_token(text_of(draw, 1000))
    total, count = server.prefill_seconds()
    times = [server.first_token(text_of(draw, 1000)) for _ in range(requests)]
    total_after, count_after = server.prefill_seconds()
    pairs = []
    for _ in range(9):
        prefix = text_of(draw, prefix_tokens)
        pairs.append([server.first_token(prefix + end * 40) for end in "ab"])
    return {
        "first token ms": 1e3 * statistics.median(times),
        "worst ms": 1e3 * max(times),
        "prefill ms": 1e3 * (total_after - total) / (count_after - count),
        "long prompt ms": 1e3 * statistics.median(first for first, _ in pairs),
        "its prefix again ms": 1e3 * statistics.median(second for _, second in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--requests", type=int, default=50, help="prompts of 1,000 tokens")
    parser.add_argument("--prefix", type=int, default=3584, help="tokens that pairs share")
    parser.add_argument("--random", metavar="MODEL", help="a shipped configuration")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args, options = parser.parse_args(given[:end]), given[end + 1 :]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as kept:
        for name in ("ready s", "ready with kept executables s"):
            server = Server(kept, options, args.random)
            found[name] = server.seconds
            try:
                if name == "ready s":
                    found |= first_tokens(server, args.requests, args.prefix)
            finally:
                server.end()
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    args.result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
