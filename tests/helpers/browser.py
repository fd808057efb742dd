"""A headless Chromium, driven by the DevTools protocol through a pipe."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--no-first-run", "--remote-debugging-pipe",
)  # fmt: skip


def installed() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab of the browser.

    Attributes:
        events: All events that the browser has sent so far.
    """

    def __init__(self, writing: int, reading: int):
        self._writing, self._reading, self._held = writing, reading, b""
        self._number, self._session = 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """Evaluates an expression in the page and returns its value."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> Any:
        """Waits until an expression is true, and returns its value."""
        ended = time.perf_counter() + seconds
        while not (found := self.run(script)):
            assert time.perf_counter() < ended, f"{script} did not come true"
            time.sleep(0.05)
        return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._reading, 2**16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def page(path: str, profile: Path) -> Iterator[Page]:
    """Opens a tab in a new browser.

    Args:
        path: The path of Chromium.
        profile: The folder for the browser's profile.
    """
    theirs_in, writing = os.pipe()
    reading, theirs_out = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", path, *SWITCHES, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    for end in (theirs_in, theirs_out):
        os.close(end)
    try:
        yield Page(writing, reading)
    finally:
        process.terminate()
        process.wait(10)
        for end in (writing, reading):
            os.close(end)
