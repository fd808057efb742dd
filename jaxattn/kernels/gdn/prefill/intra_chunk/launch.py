"""Intra-chunk work of the gated delta rule's prefill: each chunk of 64 tokens by itself.

With `G` the running sum of the log decay inside a chunk and rows i, j of it,

    A_ij = beta_i (k_i . k_j) exp(G_i - G_j)            for i > j, else 0
    X    = (I + A)^-1 diag(beta)                        by triangular_inverse.py
    P_ij = scale (q_i . k_j) exp(G_i - G_j)             for i >= j, else 0

and vectors that scale rows and columns of the products in inter_chunk/launch.py. Everything is
masked before exp. Every warpgroup processes its chunks independently. Work that depends only on
keys and queries, their copies and lengths, is done once for several value heads of a key head, as
many as leave no warpgroup idle. The next keys and queries are loaded while the last of these heads
inverts its matrix.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.kernels.gdn.chunk.tiles import (
    BACKWARD_VECTORS,
    CHUNK,
    TRIANGLE,
    VECTORS,
    compiler_params,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import COPIED_HEADS, copyable
from jaxattn.kernels.gdn.prefill.intra_chunk.mainloop import (
    WARPGROUPS,
    GdnIntraChunkConfig,
    GdnIntraChunkCta,
    GdnIntraChunkRefs,
    scratch_types,
)
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS


class ChunkMatrices(NamedTuple):
    """The matrices of chunks that do not depend on the state; undefined for chunks without a
    token."""

    x: jax.Array | None  # [N, Hv, *TRIANGLE] in q's dtype, for the forward pass
    m: jax.Array | None  # the same without beta, for the backward pass
    p: jax.Array
    vectors: jax.Array  # float32 [N, Hv, VECTORS or BACKWARD_VECTORS, 64]
    zero: jax.Array  # int32 [1], for attention/work_queue.py


def value_heads_at_once(chunks: int, value_heads: int, group: int) -> int:
    """Returns the value heads of a chunk that a warpgroup takes at once, of the `group` that share
    a key head.

    Their shared work takes about 0.3 of the work of each, counted in instructions; the warpgroup
    with the most work ends last.
    """

    def time(share: int) -> float:
        turns = -(-chunks * value_heads // (share * NUM_SMS * WARPGROUPS))
        return turns * (share + 0.3)

    return min((n for n in (1, 2, COPIED_HEADS) if group % n == 0), key=time)


def chunk_matrices(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunks: jax.Array,
    count: int,
    *,
    scale: float,
    use_qk_l2norm: bool,
    forward: bool = True,
    backward: bool = False,
    interpret: bool = False,
    detect_races: bool = False,
) -> ChunkMatrices:
    """Returns X, P and the vectors of every chunk.

    Args:
        q, k: [T, Hk, 128] bfloat16 or float16. Numbers outside of the chunks may be NaN.
        g, beta: float32 [T, Hv], log decay and beta; numbers outside of the chunks may be NaN.
        chunks: int32 [2 or more, N + 1 or more], the first token of a chunk and its tokens, 0 to
            64; and in column N how many chunks from the first are to be computed.
        count: N.
        scale: Greater than 0.
        forward, backward: The passes that need the results, at least one. The vectors of the
            backward pass begin with those of the forward pass.
    """
    value_heads, dtype = g.shape[1], q.dtype
    group = value_heads // k.shape[1]
    # Most of N: there is one more for every sequence, in case its last chunk is not full.
    share = value_heads_at_once(-(-k.shape[0] // CHUNK), value_heads, group)
    # At most one CTA per SM: another one would wait for a whole CTA to end.
    items = count * (value_heads // share)
    blocks = min(-(-items // WARPGROUPS), NUM_SMS)
    cut = GdnIntraChunkConfig(
        count=count,
        group=group,
        share=share,
        workers=blocks * WARPGROUPS,
        scale=scale,
        l2norm=use_qk_l2norm,
        backward=backward,
        dtype=dtype,
        interpret=interpret,
    )
    matrix = jax.ShapeDtypeStruct((count, value_heads, *TRIANGLE), dtype)
    rows = BACKWARD_VECTORS if backward else VECTORS
    vectors = jax.ShapeDtypeStruct((count, value_heads, rows, CHUNK), jnp.float32)
    out = launch(
        lambda **refs: GdnIntraChunkCta(cut, GdnIntraChunkRefs(**refs)).run(),
        name="gdn_prefill_chunk",
        grid={"block": blocks},
        inputs={
            "q_ref": q,
            "k_ref": k,
            "g_ref": copyable(g),
            "beta_ref": copyable(beta),
            "chunks_ref": chunks,
        },
        outputs={
            "x_ref": matrix if forward else None,
            "m_ref": matrix if backward else None,
            "p_ref": matrix,
            "vectors_ref": vectors,
            "zero_ref": jax.ShapeDtypeStruct((1,), jnp.int32),
        },
        scratch=scratch_types(share, rows, dtype, interpret=interpret),
        warpgroups=WARPGROUPS,
        compiler_params=compiler_params(),
        interpret=interpret,
        detect_races=detect_races,
    )
    x, m, p = out.get("x_ref"), out.get("m_ref"), out["p_ref"]
    return ChunkMatrices(x, m, p, out["vectors_ref"], out["zero_ref"])


def whole_chunk_matrices(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, *, scale: float, **options: Any
) -> ChunkMatrices:
    """Returns the matrices of tokens [N * 64, ...] in whole chunks. If the scale has no logarithm,
    P lacks the scale, which must multiply the results of P."""
    count = q.shape[0] // CHUNK
    if scale <= 0:
        scale = 1.0
    return chunk_matrices(q, k, g, beta, whole_chunks(count), count, scale=scale, **options)


def whole_chunks(count: int) -> jax.Array:
    """Returns the plan of `count` chunks that are all full."""
    first = np.arange(count, dtype=np.int32) * CHUNK
    return jnp.asarray(np.array([[*first, count], [*(0 * first + CHUNK), 0]], np.int32))
