"""A guard that lets one thread at a time use an engine, and limits what callbacks may call."""

import contextlib
import threading
from collections.abc import Iterator


class EngineBusyError(RuntimeError):
    """The engine, which has only one state, is in use."""


class ThreadGuard:
    """A lock on an engine that knows which thread is inside.

    Attributes:
        closed: Whether the engine is closed, so that no thread may use it.
    """

    def __init__(self) -> None:
        self.closed = False
        self._thread: int | None = None
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def alone(self, method_name: str, *, nested: bool) -> Iterator[None]:
        """Keeps other threads out while this one calls `method_name`.

        Args:
            nested: Whether a callback of the thread that is inside may also make this call.

        Raises:
            EngineBusyError: Another thread is inside, or a callback makes a call that is not
                nested.
            RuntimeError: The engine is closed.
        """
        me = threading.get_ident()
        if self._thread == me:
            if not nested:
                raise EngineBusyError(f"{method_name} was called from a callback of this engine")
            yield
            return
        if self.closed:
            raise RuntimeError("this engine is closed; create a new one")
        acquired = False
        try:
            acquired = self._busy.acquire(blocking=False)
            if not acquired:
                raise EngineBusyError(
                    f"{method_name}: another thread is using this engine; give each thread its own "
                    "engine (engines share executables)"
                )
            self._thread = me
            yield
        finally:
            if acquired:
                self._thread = None
                self._busy.release()
