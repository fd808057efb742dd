"""Stores that may be slow, deliberately.

From jax 0.12 on a plain store raises an error if threads of a warp have a bank conflict in shared
memory, or write only part of a sector of global memory.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def store(target: Any, value: jax.Array, *, interpret: bool) -> None:
    """Runs `target[...] = value`, whatever it costs."""
    if hasattr(plgpu, "store") and not interpret:
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value
