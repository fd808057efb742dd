"""The commands' exit codes and one-line errors."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable

from jaxattn import interrupt
from jaxattn.cli.options.parser import InputError
from jaxattn.interrupt import Terminated

# The errors of files that the user named, or of the disk.
OF_FILES = (
    errno.EACCES, errno.EIO, errno.EISDIR, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EROFS,
)  # fmt: skip


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Calls `run`, prints its error in one line if it fails, and returns the exit code.

    Errors have the codes 2 for bad input or an output that cannot be written, and 1 if stdout or
    its pipe is closed. Ctrl-C has the code 130, and SIGTERM 143.
    """
    if sys.stdout is None:  # for example after `>&-`
        print(
            f"{program}: error: stdout is closed; redirect it to a file or a pipe", file=sys.stderr
        )
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


def code_of(interrupt: KeyboardInterrupt) -> int:
    """Returns 130 for Ctrl-C and 143 for SIGTERM."""
    terminated = isinstance(interrupt, Terminated) or isinstance(interrupt.__cause__, Terminated)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)


def _discard_output() -> None:
    """Redirects stdout to the null device, so that flushing its buffer at the exit cannot fail."""
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:
        return  # the stream belongs to the caller
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
