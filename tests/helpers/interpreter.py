"""The interpreter of kernels with host callbacks that take NumPy arrays.

Each load, store and barrier of an interpreted kernel is a callback. JAX puts the arguments of each
on a device and makes them NumPy arrays again: four fifths of a kernel's time. The interpreter
computes with NumPy alone, so results and races are the same, to the bit.
"""

from typing import Any

import jax
import numpy as np


def on_the_host(*args: np.ndarray, callback: Any, **_: Any) -> Any:
    """The results of a callback of copies of what XLA lends it; numbers are NumPy's scalars."""
    given = [x.copy() if x.ndim else x[()] for x in args]
    return jax.tree.map(np.asarray, callback(*given))


def use_numpy_callbacks() -> None:
    """For the whole process. Where JAX has moved what this replaces, it stays as it is."""
    try:
        from jax._src import callback
        from jax._src.pallas.mosaic_gpu.interpret import shared_memory

        to_int = shared_memory._to_int
        callback.io_callback_impl  # noqa: B018
    except (ImportError, AttributeError):
        return

    def number(x: Any) -> Any:
        return int(x) if isinstance(x, np.integer) else to_int(x)

    callback.io_callback_impl = on_the_host
    shared_memory._to_int = number
