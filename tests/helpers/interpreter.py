"""The interpreter of kernels with host callbacks that take NumPy arrays.

Each load, store and barrier of an interpreted kernel is a callback. JAX puts the arguments of each
on a device and makes them NumPy arrays again: four fifths of a kernel's time. The interpreter
computes with NumPy alone, so results and races are the same, to the bit.

Each block and each warpgroup runs its part of a kernel in a thread, and JAX looks up its executable
step by step: traced, lowered, compiled. That takes a millisecond for each of them, so it is kept.
"""

import threading
from typing import Any

import jax
import numpy as np


def on_the_host(*args: np.ndarray, callback: Any, **_: Any) -> Any:
    """The results of a callback of copies of what XLA lends it; numbers are NumPy's scalars."""
    given = [x.copy() if x.ndim else x[()] for x in args]
    return jax.tree.map(np.asarray, callback(*given))


class Executables:
    """Of the parts of kernels, by their jaxpr and the shapes that they are given.

    A jaxpr is kept with its executable, so that no other gets its id.
    """

    def __init__(self, part: Any):
        self.jitted = jax.jit(part, static_argnums=0)
        self.kept: dict[Any, tuple[Any, Any]] = {}
        self.lock = threading.Lock()

    def run(self, jaxpr: Any, consts: Any, *args: Any) -> None:
        shapes = [(np.shape(x), x.dtype) for x in (*jax.tree.leaves(consts), *args)]
        key = (id(jaxpr), *shapes)
        if key not in self.kept:
            with self.lock:  # one compiles it, and the others wait
                if key not in self.kept:
                    traced = self.jitted.trace(jaxpr, consts, *args)
                    self.kept[key] = jaxpr, traced.lower().compile()
        self.kept[key][1](consts, *args)


def use_numpy_callbacks() -> None:
    """For the whole process. Where JAX has moved what this replaces, it stays as it is."""
    try:
        from jax._src import callback
        from jax._src.pallas.mosaic.interpret import thread_map
        from jax._src.pallas.mosaic_gpu.interpret import shared_memory

        to_int = shared_memory._to_int
        callback.io_callback_impl  # noqa: B018
        executables = Executables(thread_map._run)
        thread_map._run_jaxpr  # noqa: B018
    except (ImportError, AttributeError):
        return

    def number(x: Any) -> Any:
        return int(x) if isinstance(x, np.integer) else to_int(x)

    callback.io_callback_impl = on_the_host
    shared_memory._to_int = number
    thread_map._run_jaxpr = executables.run
