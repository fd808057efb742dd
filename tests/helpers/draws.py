"""Random arrays by NumPy, because XLA compiles a program for each shape that `jax.random` draws."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array


def normal(*shape, seed=1, scale=1.0):
    """Normal numbers, float32; equal seeds and shapes give equal numbers."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def normals(seed: int) -> Callable[..., Array]:
    """Returns a function (*shape, scale, mean, dtype) that draws normal numbers."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0, dtype=jnp.float32) -> Array:
        numbers = rng.standard_normal(shape, np.float32)
        return jnp.asarray(np.float32(mean) + np.float32(scale) * numbers, dtype)

    return draw
