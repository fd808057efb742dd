"""Numbers of each token that the backward kernels meet, made by XLA, and what becomes of theirs.

Gates are [N, Hv, 64] here: chunk, value head, and token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import LOG2E, LOWEST_LOG2_DECAY
from jaxattn.kernels.gdn.prefill.tiles import CHUNK, VECTORS

# Rows behind those of prefill/tiles.py: beta, the running sum of the log2 decays, and log2 of what
# brings a query and a key to length 1, or 0.
BETA, SUM, LOG_Q, LOG_K = range(VECTORS, VECTORS + 4)
ROWS = VECTORS + 4
# Where channels have decays of their own, behind the two halves of exp(G_last).
CHANNEL_BETA = 2
# Rows that the input gradients' kernel writes, of each half of the channels: the gradient of the
# gates' sums; its part that is also one of the chunk's last sum, negative; of the state's decay,
# for 64 of its rows; and of beta.
OF_SUM, OF_WRITE, OF_DECAY, OF_BETA = range(4)
GRADIENTS = 4

# The bodies name their layouts: to infer them takes minutes. What orders stores to shared memory is
# told in prefill/tiles.py.
LANE = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def log2_sums(g: jax.Array) -> jax.Array:
    """Running sums of the log2 decays, as the forward pass has them."""
    return jnp.cumsum(jnp.maximum(g * LOG2E, LOWEST_LOG2_DECAY), axis=-1)


def log2_inverse_lengths(x: jax.Array) -> jax.Array:
    """log2 of `rsqrt(sum(x^2) + 1e-6)` for rows [N, 64, H, 128], as [N, H, 64]."""
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)
    return -0.5 * jnp.log2(squares.swapaxes(1, 2) + 1e-6)


def chunk_vectors(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, *, scale: float, l2norm: bool
) -> jax.Array:
    """float32 [N, Hv, ROWS, 64], of q and k [N, 64, Hk, 128]."""
    sums = log2_sums(g)
    if l2norm:
        group = g.shape[1] // k.shape[2]
        log_q, log_k = (jnp.repeat(log2_inverse_lengths(x), group, axis=1) for x in (q, k))
    else:
        log_q = log_k = jnp.zeros_like(sums)
    last = sums[..., -1:]
    read, out = -jnp.exp2(sums + log_k), scale * jnp.exp2(sums + log_q)
    write, decay = jnp.exp2(last - sums + log_k), jnp.broadcast_to(jnp.exp2(last), sums.shape)
    return jnp.stack([read, out, write, decay, beta, sums, log_q, log_k], axis=2)


def gate_gradients(parts: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Those of g and beta [N, Hv, 64], of what the kernel wrote, [N, Hv, 2, GRADIENTS, 64]."""
    parts = parts.sum(axis=2)
    of_sum, of_write, of_decay, of_beta = (parts[:, :, row] for row in range(GRADIENTS))
    decay = jnp.exp2(log2_sums(g)[..., -1])
    of_last = of_write.sum(axis=-1) + decay * of_decay.sum(axis=-1)
    # A gate is in the sums of its own token and of those behind it.
    of_g = lax.cumsum(of_sum, axis=2, reverse=True) + of_last[..., None]
    # Of a decay of 0 the sums' rounding would be left, and its gradient is 0.
    return jnp.where(g * LOG2E > LOWEST_LOG2_DECAY, of_g, 0.0), of_beta


def as_rows(gates: jax.Array) -> jax.Array:
    """[N, Hv, 64] -> tokens [N * 64, Hv]."""
    return gates.swapaxes(1, 2).reshape(-1, gates.shape[1])


def by_chunk(gates: jax.Array) -> jax.Array:
    """Tokens [N * 64, Hv] -> [N, Hv, 64]."""
    return gates.reshape(-1, CHUNK, gates.shape[1]).swapaxes(1, 2)
