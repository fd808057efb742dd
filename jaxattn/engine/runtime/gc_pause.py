"""Pauses of Python's garbage collector within work that makes objects by the thousand.

Python 3.12 looks whenever 700 objects more are there than before. Now and then it looks through all
that the process has. JAX keeps some hundred thousand objects, so one such search takes 0.1 s.
Lowering makes as many. A call of 8 steps of 256 rows makes 2,048 events, and gives them back.
"""

import contextlib
import gc
from collections.abc import Iterator

from jaxattn.engine.runtime.process_state import PROCESS_STATE


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Within it nothing is searched, unless somebody asks for it.

    Several threads may be within it. The one that turned the search off turns it on again.
    """
    searched = False
    try:
        with PROCESS_STATE.searching:  # or another thread turns it on between the two
            searched = gc.isenabled()
            gc.disable()
        yield
    finally:
        if searched:
            with PROCESS_STATE.searching:
                gc.enable()


def freeze_gc_heap() -> None:
    """Takes all that is there out of later searches. What of it becomes garbage is not found, so
    this is for a process that keeps what it has begun with."""
    gc.collect()
    gc.freeze()
