"""SiLU of single numbers, and its slope, as the kernels of delta rules and experts compute them."""

import jax
import jax.numpy as jnp
from jax import lax


def silu(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x / (1.0 + jnp.exp(-x))


def sigmoid(x: jax.Array) -> jax.Array:
    """Returns the sigmoid of float32 numbers without a division, which takes many instructions."""
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def sigmoid_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the sigmoid of float32 numbers, the derivative of SiLU there)."""
    opened = sigmoid(x)
    return opened, opened * (1 + x * (1 - opened))
