"""Refs of a CTA that computes the gradients of a chunk, for the gated delta rule and for KDA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import TILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkGradientRefs:
    """The refs of operands and results, then of shared memory and barriers."""

    q_ref: Any
    k_ref: Any
    v_ref: Any
    do_ref: Any
    m_ref: Any
    vectors_ref: Any
    states_ref: Any  # by head, those that are not in the memory of dQ and dK, or None
    dstates_ref: Any
    y_ref: Any  # Y, overwritten by dV
    dq_ref: Any  # by head: states, overwritten by dQ and dK
    dk_ref: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    do_smem: Any
    y_smem: Any
    state_smem: Any  # S, overwritten by results or operands
    dstate_smem: Any
    m_smem: Any
    products_smem: Any  # products of q and k with their gradients, for each half of the channels
    first_loaded: Any  # the operands of the first products
    rest: Any
    warpgroup_barrier: Any


def tile(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=TILE).astype(jnp.float32)


def vector(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
