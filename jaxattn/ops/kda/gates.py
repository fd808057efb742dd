"""The gates of Kimi Delta Attention: a log decay per key channel and a strength per head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.core.validation.array_checks import finite, floats
from jaxattn.ops.gdn.decode import check_gate_shapes


def kda_gates(
    f: Float[Array, "*B Hv Dk"],
    b: Float[Array, "*B Hv"],
    A_log: Float[Array, " Hv"],
    dt_bias: Float[Array, "Hv Dk"],
    *,
    lower_bound: float | None = None,
) -> tuple[Float[Array, "*B Hv Dk"], Float[Array, "*B Hv"]]:
    """Computes `g = -exp(A_log) * softplus(f + dt_bias)` and `beta = sigmoid(b)`, in float32.

    Args:
        lower_bound: If given, a number below 0. The log decay g is then
            `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`, which stays above `lower_bound`
            (Ling-3.0, and FLA's safe gate).

    Raises:
        TypeError, ValueError: An argument is not an array, or has a wrong shape, dtype or value.

    Source: the layers of Kimi-Linear and Ling-3.0.
    """
    op = "kda_gates"
    f, b, A_log, dt_bias = floats(op, f=f, b=b, A_log=A_log, dt_bias=dt_bias)
    if f.ndim < 2:
        raise ValueError(f"{op}: f must be [..., Hv, Dk], got {list(f.shape)}")
    heads = f.shape[-2:-1]
    check_gate_shapes(
        op, (("b", b, f.shape[:-1]), ("A_log", A_log, heads), ("dt_bias", dt_bias, f.shape[-2:]))
    )
    check_lower_bound(op, lower_bound)
    rate = jnp.exp(A_log.astype(jnp.float32))[:, None]
    x = f.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    if lower_bound is None:
        return -rate * jax.nn.softplus(x), beta
    return lower_bound * jax.nn.sigmoid(rate * x), beta


def check_lower_bound(op: str, lower_bound: float | None) -> None:
    if lower_bound is not None and finite(op, "lower_bound", lower_bound) >= 0:
        raise ValueError(f"{op}: lower_bound must be below 0, got {lower_bound}")
