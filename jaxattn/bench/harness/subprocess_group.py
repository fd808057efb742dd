"""A child process in its own process group, which ends with the bench, as do its children."""

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
    """Starts a process in its own process group, which ends when the context exits.

    The group matters for vLLM, whose worker processes hold device memory until they end.

    Args:
        environment: Variables in addition to those of this process.
        streams: The arguments `stdout` and `stderr` of `subprocess.Popen`.
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
