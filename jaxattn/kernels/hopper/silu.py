"""SiLU of single numbers, as the delta-rule kernels compute it."""

import jax
import jax.numpy as jnp


def silu(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x / (1.0 + jnp.exp(-x))
