"""A row's output gate and its head's attention sink, as kernels apply them at a row's end."""

import jax
import jax.numpy as jnp

from jaxattn.kernels.attention.softmax_constants import LOG2E


def gated(out: jax.Array, gate: jax.Array) -> jax.Array:
    """float32 out * sigmoid(gate)."""
    return out / (1.0 + jnp.exp2(gate.astype(jnp.float32) * -LOG2E))


def with_sink(top: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(maximum, sum) in powers of two, with a key more, of no value; not where there is none."""
    sink = sink * LOG2E
    new_top = jnp.maximum(top, sink)
    joined = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
    return jnp.where(total == 0, top, new_top), jnp.where(total == 0, total, joined)
