"""Root-mean-square and layer normalization as modules."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.validation.array_checks import check_features, check_sizes, finite
from jaxattn.ops.linear.norm_branch import rms_norm_branch


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

    def branch(
        self,
        x: Float[Array, "*T F"],
        added: Float[Array, "*T F"] | None = None,
        *,
        readers: int = 1,
        gradient_dtype: DTypeLike | None = None,
    ) -> tuple[Float[Array, "*T F"], tuple[Float[Array, "*T F"], ...]]:
        """Returns the stream `x + added` and copies of its norm, for training residual layers:

            x, normed = norm.branch(x, y, readers=layer.readers, gradient_dtype=layer.dtype)
            y = layer(normed)

        On a Hopper GPU a kernel computes the gradients of x, `added` and the weight in one pass, in
        reverse mode only. A layer whose products read different copies leaves their gradients to
        that kernel.

        Args:
            added: the previous layer's output, in x's shape.
            readers: the number of copies of the norm, at no cost of memory.
            gradient_dtype: dtype to which that kernel and its caller round the gradients of the
                copies and of `added`, best the dtype of the layer's products. None: no rounding.
        """
        check_features("RMSNorm", x, "F", "weight", self.weight.shape, -1)
        return rms_norm_branch(
            x,
            self.weight[...],
            added=added,
            eps=self.eps,
            readers=readers,
            gradient_dtype=gradient_dtype,
        )


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
