"""Stores of few numbers: what a block writes of a row's log-sum-exps."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# jax 0.12 refuses a plain store of registers that do not fill whole sectors of 32 bytes.
_SAID = getattr(plgpu, "store", None)


def store(ref: Any, value: jax.Array) -> None:
    """Registers to global memory, whether they fill whole sectors or not."""
    if _SAID is None:
        ref[...] = value
    else:
        _SAID(ref, value, optimized=False)
