"""Gradients of the gates, of what `input_gradients` leaves of each token, by XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.matmul import summed
from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import LOG2E, LOWEST_LOG2_DECAY
from jaxattn.kernels.gdn.prefill.tiles import CHUNK, DECAY

# Rows of the parts, of each half of the channels: the gradient of the sums of log decays; what of
# it the chunk's last sum gets back; that of the state's decay, for 64 of its rows; and of beta.
OF_SUM, OF_WRITE, OF_DECAY, OF_BETA = range(4)
PARTS = 4

# The bodies of these kernels name their layouts: JAX 0.11.2 takes minutes to infer them. What
# orders stores to shared memory is told in prefill/tiles.py.
LANE = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def gate_gradients(
    parts: jax.Array, vectors: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Those of g and beta, [N * 64, Hv].

    Args:
        parts: [N, Hv, 2, PARTS, 64].
        vectors: of `chunk_matrices`; g [N * 64, Hv].
    """
    parts = parts.sum(axis=2)
    of_sum, of_write, of_decay, of_beta = (parts[:, :, row] for row in range(PARTS))
    of_last = of_write.sum(axis=-1) + vectors[:, :, DECAY, 0] * of_decay.sum(axis=-1)
    of_g = summed("nhi,ij->nhj", of_sum, _behind()) + of_last[..., None]
    of_g, of_beta = (x.swapaxes(1, 2).reshape(g.shape) for x in (of_g, of_beta))
    # Of a decay of 0 the sums' rounding would be left, and its gradient is 0.
    return jnp.where(g * LOG2E > LOWEST_LOG2_DECAY, of_g, 0.0), of_beta


def two_terms(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log2 decays in bfloat16: rounded, and what the rounding left."""
    decays = jnp.maximum(g * LOG2E, LOWEST_LOG2_DECAY)
    # XLA may take a conversion to bfloat16 and back for nothing.
    rounded = lax.reduce_precision(decays, exponent_bits=8, mantissa_bits=7)
    return rounded.astype(jnp.bfloat16), (decays - rounded).astype(jnp.bfloat16)


def _behind() -> jax.Array:
    """Which sums [64, 64] a gate is in: those of its own token and of the ones behind it."""
    token = jnp.arange(CHUNK)
    return (token[:, None] >= token).astype(jnp.float32)
