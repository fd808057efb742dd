"""A watchdog that ends the process when an engine step does not finish.

If a GPU hangs, the device thread waits inside a library, where Python cannot interrupt it. The
process's supervisor, such as systemd or Kubernetes, then restarts the server.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable

CODE = 70  # EX_SOFTWARE


class Watchdog:
    """A thread that monitors the device thread.

    Args:
        get_step_seconds: Returns the seconds that the current step has taken.
        max_seconds: The maximum seconds of a step.
        end: Called when a step exceeds `max_seconds`; by default, it dumps all stacks and exits.
    """

    def __init__(
        self,
        get_step_seconds: Callable[[], float],
        max_seconds: float,
        end: Callable[[], None] | None = None,
    ):
        self._get_step_seconds, self._max_seconds = get_step_seconds, max_seconds
        self._end = end or self._end_process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._max_seconds / 4)):
            if self._get_step_seconds() > self._max_seconds:
                self._end()
                return

    def _end_process(self) -> None:
        print(
            f"error: a step of the engine has taken more than {self._max_seconds:g} s, so the "
            "process exits; these are the stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(CODE)
