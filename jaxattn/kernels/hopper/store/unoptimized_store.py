"""Stores that are slower than they could be, by choice.

From jax 0.12 on a plain store is an error where threads of a warp would meet in a bank of shared
memory, or would write part of a sector of global memory.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def store(target: Any, value: jax.Array, *, interpret: bool) -> None:
    """`target[...] = value`, whatever it costs."""
    if hasattr(plgpu, "store") and not interpret:
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value
