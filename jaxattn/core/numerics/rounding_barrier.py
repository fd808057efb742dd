"""Roundings that XLA may not leave out."""

import jax
from jax import lax
from jax.typing import DTypeLike


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x.astype(dtype)`, whose way back to x's dtype is another number than x.

    XLA's GPU compiler takes `x.astype(bfloat16).astype(float32)` for x itself: what a rounding
    left, `x - x.astype(bfloat16).astype(float32)`, is 0 there.
    """
    return lax.optimization_barrier(x.astype(dtype))
