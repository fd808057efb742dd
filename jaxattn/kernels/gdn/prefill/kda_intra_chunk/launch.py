"""Intra-chunk work of Kimi Delta Attention's prefill: each chunk of 64 tokens by itself.

Every channel of the key has its own decay. With `G` [64, 128] the running sums of the log decays in
a chunk, and rows i, j of it,

    A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd)       for i > j, else 0
    X    = (I + A)^-1 diag(beta)                         by intra_chunk/triangular_inverse.py
    P_ij = scale sum_d q_id k_jd exp(G_id - G_jd)        for i >= j, else 0

and q exp(G), k exp(G), k exp(G_last - G), which are multiplied with the state. The chunk is divided
recursively into halves: a row of a second half and a column of a first half meet at the boundary
between them. One decay leads up to the row and one follows the column, both at most 1.

Limits: those of gdn/prefill/launch.py. Reference: `jaxattn.ops.kda.chunk_xla`; tests:
tests/kernels/gdn/prefill/test_kda.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels.gdn.chunk.tiles import CHUNK, DIM, TRIANGLE, compiler_params
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.mainloop import (
    SCALING,
    WARPGROUPS,
    KdaIntraChunkConfig,
    KdaIntraChunkCta,
    KdaIntraChunkRefs,
    scratch_types,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS

# The names of `KdaIntraChunkRefs`, in the order of `KdaChunkOperands`.
OUTPUTS = ("q_read_ref", "k_read_ref", "k_written_ref", "x_ref", "p_ref", "ends_ref")


class KdaChunkOperands(NamedTuple):
    """The operands of the state passes, instead of tokens and `chunk_matrices`."""

    q: jax.Array  # [N, Hv, 64, 128], times scale exp(G)
    k: jax.Array  # times -exp(G)
    written: jax.Array  # keys times exp(G_last - G)
    x: jax.Array  # [N, Hv, *TRIANGLE], the shape also of p
    p: jax.Array
    ends: jax.Array  # float32 [N, Hv, 2, 64], exp(G_last) in halves


def channel_chunks(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunks: jax.Array,
    count: int,
    *,
    scale: float,
    use_qk_l2norm: bool,
    backward: bool = False,
    interpret: bool = False,
    detect_races: bool = False,
) -> KdaChunkOperands:
    """Returns the operands of the chunks of a plan.

    Args:
        q, k: [T, Hk, 128] bfloat16 or float16. Numbers outside of the chunks may be NaN.
        g: float32 [T, Hv, 128], log decays; beta: float32 [T, Hv]. Numbers outside of the chunks
            may be NaN.
        chunks: int32 [2 or more, N + 1 or more], the first token of a chunk and its tokens, 0 to
            64; and in column N how many chunks from the first are to be computed.
        count: N.
        backward: Whether X is only the inverse, without beta.
    """
    value_heads, dtype = beta.shape[1], q.dtype
    cut = KdaIntraChunkConfig(
        count=count,
        group=value_heads // k.shape[1],
        blocks=min(count * value_heads, NUM_SMS),
        scale=scale,
        l2norm=use_qk_l2norm,
        backward=backward,
        dtype=dtype,
        interpret=interpret,
    )
    rows = jax.ShapeDtypeStruct((count, value_heads, CHUNK, DIM), dtype)
    matrix = jax.ShapeDtypeStruct((count, value_heads, *TRIANGLE), dtype)
    ends = jax.ShapeDtypeStruct((count, value_heads, SCALING, 64), jnp.float32)
    out = launch(
        lambda **refs: KdaIntraChunkCta(cut, KdaIntraChunkRefs(**refs)).run(),
        name="kda_prefill_chunk",
        grid={"block": cut.blocks},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "g_ref": g,
            "beta_ref": _by_chunk(beta, chunks, count),
            "chunks_ref": chunks,
        },
        outputs=dict(zip(OUTPUTS, (rows, rows, rows, matrix, matrix, ends), strict=True)),
        scratch=scratch_types(dtype, interpret=interpret),
        warpgroups=WARPGROUPS,
        compiler_params=compiler_params(),
        interpret=interpret,
        detect_races=detect_races,
    )
    return KdaChunkOperands(*(out[name] for name in OUTPUTS))


def _by_chunk(beta: jax.Array, chunks: jax.Array, count: int) -> jax.Array:
    """Returns [T, Hv] as [N, Hv, 64], 0 outside of the chunk."""
    place = jnp.arange(CHUNK, dtype=jnp.int32)
    inside = place < chunks[1, :count, None]
    token = jnp.where(inside, chunks[0, :count, None] + place, beta.shape[0])
    return jnp.swapaxes(beta.at[token].get(mode="fill", fill_value=0), 1, 2)
