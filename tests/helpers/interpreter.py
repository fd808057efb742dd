"""The interpreter of kernels with host callbacks that take NumPy arrays.

Each load, store and barrier of an interpreted kernel is a callback. JAX puts its arguments on a
device and converts them back to NumPy arrays, which takes 80% of a kernel's time. The interpreter
computes only with NumPy, so results and races are the same, to the bit.

Each block and each warpgroup runs its part of a kernel in a thread, for which JAX looks up an
executable by tracing, lowering and compiling. That takes a millisecond each, so this module keeps
the executables.
"""

import threading
from typing import Any

import jax
import numpy as np


def on_the_host(*args: np.ndarray, callback: Any, **_: Any) -> Any:
    """Runs a callback on copies of XLA's buffers; scalars become NumPy scalars."""
    given = [x.copy() if x.ndim else x[()] for x in args]
    return jax.tree.map(np.asarray, callback(*given))


class Executables:
    """The executables of kernels' parts, by their jaxpr and the shapes of their arguments.

    A jaxpr is kept with its executable, so that no other jaxpr gets its id.
    """

    def __init__(self, part: Any):
        self.jitted = jax.jit(part, static_argnums=0)
        self.kept: dict[Any, tuple[Any, Any]] = {}
        self.lock = threading.Lock()

    def run(self, jaxpr: Any, consts: Any, *args: Any) -> None:
        shapes = [(np.shape(x), x.dtype) for x in (*jax.tree.leaves(consts), *args)]
        key = (id(jaxpr), *shapes)
        if key not in self.kept:
            with self.lock:  # one thread compiles while the others wait
                if key not in self.kept:
                    traced = self.jitted.trace(jaxpr, consts, *args)
                    self.kept[key] = jaxpr, traced.lower().compile()
        self.kept[key][1](consts, *args)


def use_numpy_callbacks() -> None:
    """Enables this in the whole process, unless JAX has moved the replaced functions."""
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
