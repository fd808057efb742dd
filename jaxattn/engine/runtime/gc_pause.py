"""Pauses of Python's garbage collector during work that creates thousands of objects.

Python 3.12 starts a collection whenever there are 700 more objects. Now and then it collects all
generations. JAX keeps some hundred thousand objects, so such a full collection takes 0.1 s.
Lowering creates as many objects. A call of 8 steps of 256 rows creates 2,048 events and frees them.
"""

import contextlib
import gc
from collections.abc import Iterator

from jaxattn.engine.runtime.process_state import PROCESS_STATE


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses automatic garbage collection.

    Several threads may be inside. The thread that turned the collection off turns it on again.
    """
    searched = False
    try:
        with PROCESS_STATE.searching:  # else another thread could turn it on in between
            searched = gc.isenabled()
            gc.disable()
        yield
    finally:
        if searched:
            with PROCESS_STATE.searching:
                gc.enable()


def freeze_gc_heap() -> None:
    """Excludes all current objects from later collections.

    Reference cycles among them are then never freed, so use it in a process that keeps its initial
    objects.
    """
    gc.collect()
    gc.freeze()
