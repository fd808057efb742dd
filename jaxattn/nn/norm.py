"""Root-mean-square and layer normalization as modules."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.validation.array_checks import check_features, check_sizes, finite


class RMSNorm(nnx.Module):
    """x / rms(x) * weight for x [*T, features], in float32 (DeepSeek's convention).

    Raises:
        TypeError: the dtype of x is not a floating dtype.
        ValueError: the last axis of x has a wrong size, or `features` is not a positive integer.
    """

    def __init__(self, features: int, *, eps: float = 1e-6, param_dtype: DTypeLike = jnp.float32):
        check_sizes("RMSNorm", features=features)
        self.eps = finite("RMSNorm", "eps", eps)
        self.weight = nnx.Param(jnp.ones((features,), jnp.dtype(param_dtype)))

    def __call__(self, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
        check_features("RMSNorm", x, "F", "weight", self.weight.shape, -1)
        return rms_norm(x, self.weight[...], self.eps)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * weight + bias for x [*T, features], in float32.

    Raises:
        TypeError: the dtype of x is not a floating dtype.
        ValueError: the last axis of x has a wrong size, or `features` is not a positive integer.
    """

    def __init__(self, features: int, *, eps: float = 1e-6, param_dtype: DTypeLike = jnp.float32):
        check_sizes("LayerNorm", features=features)
        self.eps = finite("LayerNorm", "eps", eps)
        self.weight = nnx.Param(jnp.ones((features,), jnp.dtype(param_dtype)))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.dtype(param_dtype)))

    def __call__(self, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
        check_features("LayerNorm", x, "F", "weight", self.weight.shape, -1)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centered = x - x.mean(-1, keepdims=True)
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
        normed = centered * lax.rsqrt(variance + self.eps)
        return normed * self.weight[...].astype(x.dtype) + self.bias[...].astype(x.dtype)
