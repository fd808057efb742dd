"""A child process in a group of its own: it ends with the bench, and so do its own children."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LONGEST_END = 60.0  # seconds


@contextlib.contextmanager
def child_process(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in a group of its own. Leaving the context ends the group.

    vLLM has processes of its own, which hold the device's memory until they end.

    Args:
        environment: what it has beside ours.
        streams: `stdout` and `stderr` of `subprocess.Popen`.
    """
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LONGEST_END)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
