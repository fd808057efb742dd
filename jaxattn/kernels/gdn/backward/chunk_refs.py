"""Arrays and barriers of a block that makes the gradients of a chunk, by either rule."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.prefill.tiles import TILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkGradientRefs:
    """Operands and results, then shared memory and barriers."""

    q_ref: Any
    k_ref: Any
    v_ref: Any
    do_ref: Any
    m_ref: Any
    vectors_ref: Any
    states_ref: Any  # by head those that are not in the place of dQ and dK, or None
    dstates_ref: Any
    y_ref: Any  # Y, then dV
    dq_ref: Any  # by head states, then dQ and dK
    dk_ref: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    do_smem: Any
    y_smem: Any
    state_smem: Any  # S, then results or operands
    dstate_smem: Any
    m_smem: Any
    products_smem: Any  # of q and k with their gradients, of each half of the channels
    first: Any  # what the first products read
    rest: Any
    met: Any


def tile(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=TILE).astype(jnp.float32)


def vector(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
