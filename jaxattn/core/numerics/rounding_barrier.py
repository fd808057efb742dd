"""Roundings that XLA may not omit."""

import jax
from jax import lax
from jax.typing import DTypeLike


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns `x.astype(dtype)`, behind a barrier against simplification.

    XLA's GPU compiler replaces `x.astype(bfloat16).astype(float32)` by x itself, so the rest of a
    rounding, `x - x.astype(bfloat16).astype(float32)`, would become 0.
    """
    return lax.optimization_barrier(x.astype(dtype))
