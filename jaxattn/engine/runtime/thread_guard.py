"""A guard that lets one thread at a time use an engine, and limits what callbacks may call."""

import contextlib
import threading
from collections.abc import Iterator


class EngineBusyError(RuntimeError):
    """The engine's one state is in use."""


class ThreadGuard:
    """The thread that is inside an engine.

    Attributes:
        closed: the engine was closed; nobody may use it.
    """

    def __init__(self) -> None:
        self.closed = False
        self._thread: int | None = None
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def alone(self, what: str, *, nested: bool) -> Iterator[None]:
        """Keeps other threads out while this one calls `what`.

        Args:
            nested: a callback of the thread that is inside may call it too.

        Raises:
            EngineBusyError: another thread is inside, or a callback calls what is not nested.
            RuntimeError: the engine is closed.
        """
        me = threading.get_ident()
        if self._thread == me:
            if not nested:
                raise EngineBusyError(f"{what} was called by a callback of this engine")
            yield
            return
        if self.closed:
            raise RuntimeError("this engine is closed; make a new one")
        held = False
        try:
            held = self._busy.acquire(blocking=False)
            if not held:
                raise EngineBusyError(
                    f"{what}: another thread uses this engine, which has one state; give each "
                    "thread an engine of its own (they share executables)"
                )
            self._thread = me
            yield
        finally:
            if held:
                self._thread = None
                self._busy.release()
