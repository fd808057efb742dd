"""The handling of Ctrl-C in the package's commands: one line and exit code 130, at any time.

`jaxattn/__init__.py` calls `guard_command` before the import of JAX, which takes over a second. A
KeyboardInterrupt during an import prints a traceback, or is lost where Python ignores exceptions.
While XLA compiles, the main thread runs no Python code and cannot raise. Instead of an exception, a
thread therefore waits for the signal and ends the process.

While a command generates, it has output to report, and therefore uses KeyboardInterrupt
(`interrupts_raised`). Programs that only import jaxattn keep Python's handling. This file imports
nothing slow, so that only Python's own start precedes it.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

COMMANDS = ("serve", "plan", "bench")
CODE = 128 + signal.SIGINT

_ending = _thread.allocate_lock()
_on_end: list[bytes] = []
_wakeup = -1


def guard_command() -> None:
    """Makes Ctrl-C end the process if Python was started as a command of this package."""
    if started_as() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        guard()


def started_as() -> str | None:
    """Returns the command of this package that Python was started with; None in other programs."""
    orig_argv, argv = getattr(sys, "orig_argv", []), getattr(sys, "argv", [])
    if not 0 < len(argv) < len(orig_argv):
        return None
    # While `python -m name` imports the package, sys.argv[0] is a placeholder for the last word of
    # orig_argv that belongs to Python itself.
    name = orig_argv[len(orig_argv) - len(argv)].removeprefix("-m")
    if name == "jaxattn":
        return " ".join(["python -m jaxattn", *(word for word in argv[1:2] if word in COMMANDS)])
    if name in (f"jaxattn.{command}" for command in COMMANDS):
        return f"python -m {name}"
    script = os.path.basename(name)
    return script if script in {f"jaxattn-{command}" for command in COMMANDS} else None


def program(command: str) -> str:
    """Returns the name of a command in messages: as the user started it, or its module."""
    started = started_as()
    return started if started and started.endswith(command) else f"python -m jaxattn.{command}"


def guard() -> None:
    """Makes Ctrl-C end the process, even while the main thread waits in a library."""
    global _wakeup
    signal.signal(signal.SIGINT, end_process)  # until the thread runs
    if sys.platform == "win32" or _wakeup >= 0:
        return
    import fcntl

    pipe = os.pipe()
    # A closed stdin, stdout or stderr frees its descriptor. The pipe must not reuse that number,
    # as other code would write into it.
    reading, _wakeup = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in pipe)
    for end in pipe:
        os.close(end)
    os.set_blocking(_wakeup, False)
    _thread.start_new_thread(_wait, (reading,))
    listen()


def active() -> bool:
    """Whether Ctrl-C ends this process."""
    return signal.getsignal(signal.SIGINT) is end_process


def listen(on: bool = True) -> None:
    """Turns the delivery of signals to the thread on or off. `guard` turns it on."""
    if _wakeup >= 0:
        signal.set_wakeup_fd(_wakeup if on else -1, warn_on_full_buffer=False)


def finished() -> None:
    """Ignores Ctrl-C after a command's work, as it could only change the exit code."""
    if active():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def before_end(text: bytes | None) -> None:
    """Sets what to write before the last line, such as a code that shows the cursor again."""
    _on_end[:] = [text] if text else []


def _wait(reading: int) -> None:
    while data := os.read(reading, 64):
        if signal.SIGINT in data:
            end_process()


def end_process(*_: object) -> None:
    """Writes the last line and ends the process."""
    if not _ending.acquire(blocking=False):
        return  # the thread and the handler both call this
    try:
        os.write(2, b"".join([*_on_end, b"interrupted\n"]))
    except OSError:
        pass  # stderr is closed
    os._exit(CODE)


class Terminated(KeyboardInterrupt):
    """The exception for SIGTERM, which ends a command as Ctrl-C does."""


class InterruptRequest:
    """The Ctrl-C or SIGTERM that arrived within `interrupts_raised`, if any.

    Attributes:
        code: The exit code for the signal, or None.
    """

    code: int | None = None

    def check(self) -> None:
        """Raises the interrupt again, since Python ignores an exception raised in a destructor."""
        if self.code is not None:
            raise KeyboardInterrupt if self.code == CODE else Terminated


@contextlib.contextmanager
def interrupts_raised() -> Iterator[InterruptRequest]:
    """A context in which Ctrl-C and SIGTERM raise KeyboardInterrupt, so that a command can report.

    A second Ctrl-C ends the command at once. Outside of the context, the first one and SIGTERM do.
    """
    request = InterruptRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread can set signal handlers
        return
    previous_handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        request.code = 128 + number
        if previous_handlers[signal.SIGINT] is end_process:
            signal.signal(signal.SIGINT, previous_handlers[signal.SIGINT])
            listen()
        request.check()

    listen(False)
    # A shell that runs the process in the background ignores Ctrl-C for it.
    if previous_handlers[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        yield request
    finally:
        for each, handler in previous_handlers.items():
            signal.signal(each, handler or signal.SIG_DFL)
        listen()
