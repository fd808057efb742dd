"""How the commands end: one line and an exit code where what they were asked for cannot be done."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxattn.cli.options import InputError

# What goes wrong with files that the user named, or with the disk.
OF_FILES = (
    errno.EACCES, errno.EIO, errno.EISDIR, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EROFS,
)  # fmt: skip


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def exit_code(program: str, run: Callable[[], int]) -> int:
    """What `run` returns; 2 for bad input or no place for the output, 1 if the output's reader
    left, 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except InputError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return code_of(interrupt)
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in OF_FILES:
            raise
        _discard_output()
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: error: {where}{error.strerror or error}", file=sys.stderr)
        return 2


def code_of(interrupt: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM."""
    terminated = isinstance(interrupt, Terminated) or isinstance(interrupt.__cause__, Terminated)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Around what has something to report. Elsewhere SIGTERM ends the process at once, also where
    it waits in a library, which no Python handler would reach."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _discard_output() -> None:
    """What is still buffered for stdout has to go somewhere, or Python complains at its exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
