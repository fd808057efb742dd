"""Exit codes and one-line errors of the commands."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from jaxattn import interrupt
from jaxattn.cli.options.parser import InputError

# What goes wrong with files that the user named, or with the disk.
OF_FILES = (
    errno.EACCES, errno.EIO, errno.EISDIR, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EROFS,
)  # fmt: skip


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def exit_code(program: str, run: Callable[[], int]) -> int:
    """What `run` returns, or what a command ends with where it fails.

    It is 2 for bad input or no place for the output, and 1 if stdout is closed or its reader left.
    After Ctrl-C it is 130, after SIGTERM 143.
    """
    if sys.stdout is None:  # as after `>&-`
        print(f"{program}: error: stdout is closed; give the output a place", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal need not know all of Unicode
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
    """130 after Ctrl-C, 143 after SIGTERM."""
    terminated = isinstance(ended, Terminated) or isinstance(ended.__cause__, Terminated)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


class InterruptRequest:
    """Whether Ctrl-C or SIGTERM came while `interrupts_raised` held.

    Attributes:
        code: the exit code that it asks for, or None.
    """

    code: int | None = None

    def check(self) -> None:
        """Raises the interrupt once more: Python ignores what is raised in a destructor."""
        if self.code is not None:
            raise KeyboardInterrupt if self.code == interrupt.CODE else Terminated


@contextlib.contextmanager
def interrupts_raised() -> Iterator[InterruptRequest]:
    """Around what has something to report: Ctrl-C and SIGTERM raise KeyboardInterrupt.

    A second Ctrl-C ends a command at once. Elsewhere Ctrl-C does that already, and so does SIGTERM.
    """
    asked = InterruptRequest()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may say what a signal does
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        asked.code = 128 + number
        if before[signal.SIGINT] is interrupt.end_process:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            interrupt.listen()
        asked.check()

    interrupt.listen(False)
    if before[signal.SIGINT] is not signal.SIG_IGN:  # as of a command that runs in the background
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler or signal.SIG_DFL)
        interrupt.listen()


def _discard_output() -> None:
    """What is still buffered for stdout has to go somewhere, or Python complains at its exit."""
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:
        return  # a caller's own stream, whose file is not ours to change
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
