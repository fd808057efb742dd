"""A row's output gate and its head's attention sink, as kernels apply them in the epilogue."""

import jax
import jax.numpy as jnp

from jaxattn.kernels.attention.softmax_constants import LOG2E


def gated(out: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns float32 out * sigmoid(gate)."""
    return out / (1.0 + jnp.exp2(gate.astype(jnp.float32) * -LOG2E))


def with_sink(top: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (maximum, sum) in powers of two, including one more key without a value. Not for rows
    without keys."""
    sink = sink * LOG2E
    new_top = jnp.maximum(top, sink)
    joined = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
    return jnp.where(total == 0, top, new_top), jnp.where(total == 0, total, joined)
