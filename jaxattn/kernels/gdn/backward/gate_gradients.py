"""Gradients of the gates, which XLA computes from the per-token sums that `input_gradients`
leaves."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.matmul import summed
from jaxattn.kernels.gdn.chunk.tiles import CHUNK, DECAY
from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import LOG2E, LOWEST_LOG2_DECAY

# Rows of the parts, for each half of the channels: the gradient of the sums of log decays; the
# portion of it that the chunk's last sum gets back; that of the state's decay, for 64 of its rows;
# and that of beta.
OF_SUM, OF_WRITE, OF_DECAY, OF_BETA = range(4)
PARTS = 4

# The bodies of these kernels name their layouts: JAX 0.11.2 takes minutes to infer them.
# chunk/tiles.py describes how stores to shared memory are ordered.
LANE = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def gate_gradients(
    parts: jax.Array, vectors: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of g and beta, [N * 64, Hv].

    Args:
        parts: [N, Hv, 2, PARTS, 64].
        vectors: Those of `chunk_matrices`; g is [N * 64, Hv].
    """
    parts = parts.sum(axis=2)
    of_sum, of_write, of_decay, of_beta = (parts[:, :, row] for row in range(PARTS))
    of_last = of_write.sum(axis=-1) + vectors[:, :, DECAY, 0] * of_decay.sum(axis=-1)
    of_g = summed("nhi,ij->nhj", of_sum, _make_suffix_mask()) + of_last[..., None]
    of_g, of_beta = (x.swapaxes(1, 2).reshape(g.shape) for x in (of_g, of_beta))
    # For a decay of 0 only the sums' rounding would be left, and its gradient is 0.
    return jnp.where(g * LOG2E > LOWEST_LOG2_DECAY, of_g, 0.0), of_beta


def split_bf16(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log2 decays as two bfloat16 terms: the rounded value and the remainder."""
    decays = jnp.maximum(g * LOG2E, LOWEST_LOG2_DECAY)
    # XLA may drop a conversion to bfloat16 and back.
    rounded = lax.reduce_precision(decays, exponent_bits=8, mantissa_bits=7)
    return rounded.astype(jnp.bfloat16), (decays - rounded).astype(jnp.bfloat16)


def _make_suffix_mask() -> jax.Array:
    """The sums [64, 64] that contain a gate: those of its own token and of later ones."""
    token = jnp.arange(CHUNK)
    return (token[:, None] >= token).astype(jnp.float32)
