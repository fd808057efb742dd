"""RMS norms as functions, computed in float32 for any input dtype."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) * weight over the last axis (DeepSeek's convention)."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32)


def gated_rms_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, sigmoid: bool = False
) -> jax.Array:
    """Returns rms_norm(x) * silu(z) of heads, in x's dtype (Qwen3-Next's convention).

    Args:
        x: [*T, H, D].
        gate: [*T, N], with z in its last H * D columns, head after head. A packed projection can be
            passed as it is.
        weight: [D].
        sigmoid: Whether the factor is sigmoid(z) (Kimi-Linear's convention).
    """
    z = gate[..., gate.shape[-1] - x.shape[-2] * x.shape[-1] :].reshape(x.shape)
    z = z.astype(jnp.float32)
    factor = jax.nn.sigmoid(z) if sigmoid else jax.nn.silu(z)
    return (rms_norm(x, weight, eps) * factor).astype(x.dtype)
