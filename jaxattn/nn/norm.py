"""RMS normalisation, in float32 whatever comes in."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """x / rms(x) * weight: x [*T, features] -> float32, the same (DeepSeek's convention)."""

    def __init__(self, features: int, *, eps: float = 1e-6, param_dtype: DTypeLike = jnp.float32):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((features,), jnp.dtype(param_dtype)))

    def __call__(self, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + self.eps) * self.weight[...].astype(jnp.float32)
