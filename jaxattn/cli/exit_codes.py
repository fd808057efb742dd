"""The commands' exit codes, one-line errors and signal handling."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from jaxattn import interrupt
from jaxattn.cli.options.parser import InputError

# The errors of files that the user named, or of the disk.
OF_FILES = (
    errno.EACCES, errno.EIO, errno.EISDIR, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EROFS,
)  # fmt: skip


class Terminated(KeyboardInterrupt):
    """The exception for SIGTERM, which ends a command as Ctrl-C does."""


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Calls `run`, prints its error in one line if it fails, and returns the exit code.

    Errors have the codes 2 for bad input or an output that cannot be written, and 1 if stdout or
    its pipe is closed. Ctrl-C has the code 130, and SIGTERM 143.
    """
    if sys.stdout is None:  # for example after `>&-`
        print(f"{program}: error: stdout is closed; give the output a place", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may not support all of Unicode
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except InputError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as ended:
        print("interrupted", file=sys.stderr)
        return code_of(ended)
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
    finally:
        interrupt.finished()


def code_of(ended: KeyboardInterrupt) -> int:
    """Returns 130 for Ctrl-C and 143 for SIGTERM."""
    terminated = isinstance(ended, Terminated) or isinstance(ended.__cause__, Terminated)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


class InterruptRequest:
    """The Ctrl-C or SIGTERM that arrived within `interrupts_raised`, if any.

    Attributes:
        code: The exit code for the signal, or None.
    """

    code: int | None = None

    def check(self) -> None:
        """Raises the interrupt again, since Python ignores an exception raised in a destructor."""
        if self.code is not None:
            raise KeyboardInterrupt if self.code == interrupt.CODE else Terminated


@contextlib.contextmanager
def interrupts_raised() -> Iterator[InterruptRequest]:
    """A context in which Ctrl-C and SIGTERM raise KeyboardInterrupt, so that a command can report.

    A second Ctrl-C ends the command at once. Outside of the context, the first one and SIGTERM do.
    """
    asked = InterruptRequest()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread can set signal handlers
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        asked.code = 128 + number
        if before[signal.SIGINT] is interrupt.end_process:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            interrupt.listen()
        asked.check()

    interrupt.listen(False)
    if before[signal.SIGINT] is not signal.SIG_IGN:  # ignored if a shell runs it in the background
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler or signal.SIG_DFL)
        interrupt.listen()


def _discard_output() -> None:
    """Redirects stdout to the null device, so that flushing its buffer at the exit cannot fail."""
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:
        return  # the stream belongs to the caller
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
