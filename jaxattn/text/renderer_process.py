"""The process that renders chat templates. It starts at the first chat, and is killed on timeout.

A template may spend its time inside one C call, such as `10 ** 10 ** 9` or `"%99999999999d" % 1`,
which Python cannot interrupt in a thread. Counting loops in the sandbox would miss filters, macros
and formats. The system can always kill a process, and can limit its memory separately from the
engine's. The process stays for the next chat. A render takes 0.1 ms longer than in-process, and a
start 0.15 s (one core of a server, Python 3.12).
"""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxattn.text.json_files import TextError
from jaxattn.text.template_renderer import packed, receive, send

FILE = Path(__file__).with_name("template_renderer.py")
START_SECONDS = 60.0


class RendererProcess:
    """A renderer of templates in a separate process, one at a time. It is thread-safe."""

    def __init__(
        self,
        *,
        seconds: float = 5.0,
        max_characters: int = 2**24,
        max_bytes: int = 2**30,
    ):
        """
        Args:
            seconds: The time limit of a render.
            max_characters: The maximum length of the rendered text.
            max_bytes: The memory limit of the process, if the system supports one.
        """
        self.seconds = seconds
        self.max_characters = max_characters
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None

    def render(self, source: str, variables: dict[str, Any], name: str) -> str:
        """Renders a template.

        Args:
            source: The template's source.
            variables: The template's variables, including `messages`, as JSON values.
            name: The name of the template's file, for error messages.

        Raises:
            TextError: If the template is damaged, rejects the messages, or exceeds a limit.
        """
        request = {"source": source, "variables": variables, "most": self.max_characters}
        try:
            data = packed(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise TextError(f"a chat must consist of JSON values: {error}") from error
        with self._lock:
            reply = self._ask(data, name)
        if "text" in reply:
            return reply["text"]
        if "refused" in reply:
            raise TextError(
                f"the chat template of {name} rejected the messages: {reply['refused']}"
            )
        raise TextError(f"the chat template of {name} {reply['failed']}")

    def close(self) -> None:
        """Ends the process. The next render starts a new one."""
        with self._lock:
            self._end()

    def _ask(self, data: bytes, name: str) -> dict[str, str]:
        process = self._started()
        assert process.stdin and process.stdout
        try:
            with _killed_after(process, self.seconds) as timed_out:
                send(process.stdin, data)
                reply = receive(process.stdout)
        except OSError:
            reply = None  # the process ended during the write
        except BaseException:  # Ctrl-C: the next request must not read this request's reply
            self._end()
            raise
        if timed_out.is_set() or reply is None:
            self._end()
        if timed_out.is_set():
            raise TextError(
                f"the chat template of {name} did not finish within {self.seconds:g} s and was "
                "stopped"
            )
        if reply is None:
            raise TextError(
                f"the process of the chat template of {name} died; its memory limit is "
                f"{self.max_bytes / 2**20:,.0f} MiB"
            )
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        # Inherits this process's import path to find jinja2; -P leaves out the script's folder.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # If this process dies, the renderer ends itself after twice the time limit.
        limits = [str(self.max_bytes), str(2 * self.seconds)]
        command = [sys.executable, "-P", str(FILE), *limits]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # keeps a terminal's Ctrl-C from the process
            )
        except (OSError, ValueError) as error:
            raise TextError(f"the process for chat templates cannot be started: {error}") from error
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdout
        with _killed_after(process, START_SECONDS):
            ready = receive(process.stdout)
        if ready != "ready":
            code = process.wait()
            self._end()
            raise TextError(
                f"the process for chat templates exited at its start with code {code}; run "
                f"`{' '.join(command)}` to see why"
            )
        return process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        try:
            if stream:
                stream.close()
        except OSError:
            pass  # the process has not read all bytes


@contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Kills the process unless the `with` block ends in time. Yields an event that is set then."""
    timed_out, guard, done = threading.Event(), threading.Lock(), False

    def kill() -> None:
        with guard:
            if not done:
                timed_out.set()
                process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield timed_out
    finally:
        timer.cancel()
        with guard:
            done = True
