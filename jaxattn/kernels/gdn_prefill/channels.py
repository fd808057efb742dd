"""Chunks of keys whose channels decay by themselves, as the passes over the states take them.

XLA makes them, in matmuls over all chunks: `jaxattn.ops.kda.channel_decay`. What is left for the
kernels is what goes from chunk to chunk.

Limits: those of launch.py. Reference and tests: `jaxattn.kda.chunk_kda` (implementation="xla"),
tests/kernels/gdn_prefill/test_channels.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels.gdn_prefill.tiles import CHUNK


class Made(NamedTuple):
    """By chunk and value head; [C, Dk] is [64, 128]."""

    q_read: jax.Array  # [N, Hv, C, Dk], times scale exp(G)
    k_read: jax.Array  # times exp(G)
    k_written: jax.Array  # times exp(G_last - G)
    x: jax.Array  # [N, Hv, C, C], (I + A)^-1 diag(beta)
    p: jax.Array  # [N, Hv, C, C], times scale
    decay: jax.Array  # float32 [N, Hv, Dk], exp(G_last)


# Of q and k float32 [N, Hv, C, Dk], g float32 of that shape, beta float32 [N, Hv, C], and the dtype
# of what is made.
type Make = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jnp.dtype], Made]


class Operands(NamedTuple):
    """What the passes take in the place of tokens and of `chunk_matrices`."""

    q: jax.Array  # [N, Hv, 64, 128]
    k: jax.Array  # negated
    written: jax.Array
    x: jax.Array  # [N, Hv, *TRIANGLE], as p
    p: jax.Array
    vectors: jax.Array  # float32 [N, Hv, 2, 64], halves of the decays


def channel_chunks(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunks: jax.Array,
    count: int,
    make: Make,
    *,
    scale: float,
    use_qk_l2norm: bool,
) -> Operands:
    """The operands of the chunks of a plan.

    Args:
        q, k: [T, Hk, 128]; g: float32 [T, Hv, 128]; beta: float32 [T, Hv]. What lies outside the
            chunks may be NaN.
        chunks: int32 [2 or more, N or more], first token of a chunk and its tokens, 0 to 64.
        count: N.
    """
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    inside = place < chunks[1, :count, None]
    token = jnp.where(inside, chunks[0, :count, None] + place, q.shape[0])

    def chunked(x: jax.Array) -> jax.Array:
        """[T, H, ...] -> float32 [N, H, C, ...], 0 outside of the chunk."""
        x = x.at[token].get(mode="fill", fill_value=0)
        return jnp.moveaxis(x.astype(jnp.float32), 2, 1)

    group, dtype = beta.shape[1] // k.shape[1], q.dtype
    q, k, g, beta = (chunked(x) for x in (q, k, g, beta))
    if use_qk_l2norm:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, group, axis=1) for x in (q * scale, k))
    made = make(q, k, g, beta, dtype)
    return Operands(
        made.q_read,
        -made.k_read,
        made.k_written,
        _triangle(made.x),
        _triangle(made.p),
        made.decay.reshape(*made.decay.shape[:2], 2, CHUNK),
    )


def _triangle(x: jax.Array) -> jax.Array:
    """[..., 64, 64] -> [..., *TRIANGLE]."""
    return jnp.concatenate([x[..., :32], x[..., 32:, 32:]], axis=-2)
