"""`PROCESS_STATE`, the one object that all engines of a process share.

JAX itself has one allocator, one set of listeners and one cache of executables per process, so an
engine has to know of the others. Nothing else in the package keeps state in a module.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax.monitoring

CACHE_HIT = "/jax/compilation_cache/cache_hits"


class ProcessState:
    """What the engines of a process share. Nothing here keeps an engine or an array alive.

    Attributes:
        steps: `CompiledSteps` by what decides them, while an engine or its plan holds them.
        collectives: bytes that collectives took of each of these devices when they first ran, by
            the layout: another may make GPUs of several processes meet in other sets.
        weight_programs: `WeightPrograms` by their model and devices. They are small, hold no array,
            and stay, so that engines after one another compile them once.
        lowering: held by who lowers steps. It is work of Python, which one thread runs at a time.
        searching: held by who turns Python's search for garbage off or on.
        sending: held by who sends a step to several devices. Steps wait for one another there, so
            all devices have to run them in one order: of two threads neither may send between.
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
        """The lock of a set of entry points, so that two threads do not both compile it."""
        with self._guard:
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = threading.Lock()
            return lock

    @property
    def engines(self) -> list[Any]:
        """Each open `Engine`. It may be in a step while another plans, so its temp is taken."""
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
        """The `RecompilationGuard` that this thread is inside of, or None."""
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
        """How many programs this thread has read from JAX's cache since the first call of this."""
        with self._guard:
            if not self._counting:
                jax.monitoring.register_event_listener(self._on_event)
                self._counting = True
        return getattr(self._inside, "hits", 0)

    def _on_event(self, event: str, **details: Any) -> None:
        if event == CACHE_HIT:
            self._inside.hits = getattr(self._inside, "hits", 0) + 1


PROCESS_STATE = ProcessState()
