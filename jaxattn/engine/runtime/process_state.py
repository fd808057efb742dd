"""`PROCESS_STATE`, the one object that all engines of a process share.

JAX itself has one allocator, one set of listeners and one cache of executables per process, so an
engine must know about the others. No other module of the package keeps state.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax.monitoring

CACHE_HIT = "/jax/compilation_cache/cache_hits"


class ProcessState:
    """The state that the engines of a process share. It keeps no engine and no array alive.

    Attributes:
        steps: The `CompiledSteps` by their key, while an engine or its plan holds them.
        collectives: The bytes that collectives took of each of these devices when they first ran,
            by layout. Another layout may connect GPUs of several processes in other sets.
        weight_programs: The `WeightPrograms` by model and devices. They are small, hold no arrays
            and stay, so that consecutive engines compile them once.
        lowering: A lock for lowering steps, which is Python code that one thread runs at a time.
        searching: A lock for turning Python's garbage collection off or on.
        sending: A lock for sending a step to several devices. These wait for each other inside a
            step, so all must run the steps in one order, and no other thread may send in between.
    """

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self.steps: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self.collectives: dict[tuple[Any, ...], dict[Any, int]] = {}
        self.weight_programs: dict[Hashable, Any] = {}
        self.lowering = threading.Lock()
        self.searching = threading.Lock()
        self.sending = threading.Lock()
        self._locks: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()
        self._inside = threading.local()
        self._listening = self._counting = False

    def lock(self, key: Hashable) -> Any:
        """Returns the lock of a set of entry points, so that only one thread compiles it."""
        with self._guard:
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = threading.Lock()
            return lock

    @property
    def engines(self) -> list[Any]:
        """The open engines. Any may run a step while another plans, so plans count their temp."""
        with self._guard:
            return list(self._engines)

    def opened(self, engine: Any) -> None:
        with self._guard:
            self._engines.add(engine)

    def closed(self, engine: Any) -> None:
        with self._guard:
            self._engines.discard(engine)

    @property
    def seal(self) -> Any:
        """The `RecompilationGuard` whose `watch` this thread is inside, or None."""
        return getattr(self._inside, "seal", None)

    @seal.setter
    def seal(self, seal: Any) -> None:
        self._inside.seal = seal

    def listen(self, listener: Callable[..., None]) -> None:
        """Registers the one listener of the process with JAX, once."""
        with self._guard:
            if not self._listening:
                jax.monitoring.register_scalar_listener(listener)
                self._listening = True

    def cache_hits(self) -> int:
        """Returns how many programs this thread has read from JAX's cache since the first call."""
        with self._guard:
            if not self._counting:
                jax.monitoring.register_event_listener(self._on_event)
                self._counting = True
        return getattr(self._inside, "hits", 0)

    def _on_event(self, event: str, **details: Any) -> None:
        if event == CACHE_HIT:
            self._inside.hits = getattr(self._inside, "hits", 0) + 1


PROCESS_STATE = ProcessState()
