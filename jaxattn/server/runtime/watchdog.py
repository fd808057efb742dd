"""Ends the process when the device thread is stuck: a step that never ends serves nobody.

A GPU that hangs makes the thread wait in a library, where nothing of Python interrupts it. What
started the process, such as systemd or Kubernetes, starts it anew.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable

CODE = 70  # EX_SOFTWARE


class Watchdog:
    """Looks at the device thread from a thread of its own.

    Args:
        stuck_for: the seconds that the step in flight has taken.
        most: seconds that it may take.
        end: ends the process; a test gives another.
    """

    def __init__(
        self,
        stuck_for: Callable[[], float],
        most: float,
        end: Callable[[], None] | None = None,
    ):
        self._stuck_for, self._most = stuck_for, most
        self._end = end or self._end_process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._most / 4)):
            if self._stuck_for() > self._most:
                self._end()
                return

    def _end_process(self) -> None:
        print(
            f"error: a step of the engine has taken more than {self._most:g} s; the process ends "
            "here, and what its threads were doing is:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(CODE)
