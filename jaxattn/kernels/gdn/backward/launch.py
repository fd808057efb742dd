"""Gradient of the chunked gated delta rule on a Hopper GPU: its kernels in order.

    prefill/intra_chunk/launch.py   every chunk of 64 tokens by itself: its inverse, masked scores
    state_pass.py                   states before the chunks, and gradients of those after them
    input_gradients.py              every chunk by itself: gradients of q, k, v, and the gates
    kda_input_gradients.py          the same where every channel of the key has its own decay

The forward pass saves its arguments and, if the chunks are the same, the inverses and scores.
States are saved for each chunk, in bfloat16.

Limits: those of gdn/prefill/launch.py; float16 is taken as bfloat16. Reference: the gradient of
`jaxattn.ops.gdn.chunk_xla`; tests: tests/kernels/gdn/backward/test_kernel.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.kernels.gdn.backward.gate_gradients import gate_gradients, split_bf16
from jaxattn.kernels.gdn.backward.input_gradients import input_gradients
from jaxattn.kernels.gdn.backward.kda_input_gradients import channel_gradients
from jaxattn.kernels.gdn.backward.state_pass import state_pass
from jaxattn.kernels.gdn.chunk.tiles import CHUNK, DIM
from jaxattn.kernels.gdn.prefill.intra_chunk.launch import (
    ChunkMatrices,
    whole_chunk_matrices,
    whole_chunks,
)
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.launch import channel_chunks


class ChunkedTokens(NamedTuple):
    """Tokens in whole chunks of 64, each of one sequence; places without a token are 0."""

    q: jax.Array  # [N * 64, Hk, 128]
    k: jax.Array
    v: jax.Array  # [N * 64, Hv, 128]
    g: jax.Array  # [N * 64, Hv]
    beta: jax.Array


class DeltaRuleBackwardCall(NamedTuple):
    """The arguments of the gradient.

    Attributes:
        do: The gradient of the output, [N * 64, Hv, 128].
        runs: int32 [2, n], the first chunk of each sequence, and its number of chunks.
        initial_state, dfinal: float32 [n, Hv, 128, 128], the latter the gradient of the final
            states; None: zeros.
        matrices: The chunks' matrices if the forward pass has saved them, not for KDA.
    """

    tokens: ChunkedTokens
    do: jax.Array
    runs: jax.Array | np.ndarray
    initial_state: jax.Array | None
    dfinal: jax.Array | None
    scale: float
    use_qk_l2norm: bool
    matrices: ChunkMatrices | None = None


def gdn_backward_mosaic(
    call: DeltaRuleBackwardCall, *, interpret: bool = False
) -> tuple[ChunkedTokens, jax.Array]:
    """Returns the gradients of the tokens and, float32 [n, Hv, 128, 128], of the initial states."""
    tokens, do, scale = call.tokens, call.do, call.scale
    dtypes = [x.dtype for x in tokens]
    if scale <= 0:  # whose logarithm the kernels need
        do, scale = do.astype(jnp.float32) * scale, 1.0
    q, k, v, do = (x.astype(jnp.bfloat16) for x in (*tokens[:3], do))
    g, beta = (x.astype(jnp.float32) for x in tokens[3:])
    count, matrices = q.shape[0] // CHUNK, call.matrices
    if matrices is None:
        matrices = whole_chunk_matrices(
            q, k, g, beta, scale=scale, use_qk_l2norm=call.use_qk_l2norm,
            forward=False, backward=True, interpret=interpret,
        )  # fmt: skip
    m, p, vectors = matrices.m, matrices.p, matrices.vectors
    assert m is not None
    q, k, v, do = (x.reshape(count, CHUNK, *x.shape[1:]) for x in (q, k, v, do))
    start, dend = (None if x is None else x[None] for x in (call.initial_state, call.dfinal))
    states, dstates, y, dstart = state_pass(
        q, k, v, do, m, p, vectors, jnp.asarray(call.runs), start=start, dend=dend,
        interpret=interpret,
    )  # fmt: skip
    dq, dk, dv, parts = input_gradients(
        q, k, v, do, m, vectors, states, dstates, y, scale=scale, l2norm=call.use_qk_l2norm,
        interpret=interpret,
    )  # fmt: skip
    of_gates = gate_gradients(parts, vectors, g)
    of_tokens = (*(x.reshape(-1, *x.shape[2:]) for x in (dq, dk, dv)), *of_gates)
    cast = (x.astype(dtype) for x, dtype in zip(of_tokens, dtypes, strict=True))
    return ChunkedTokens(*cast), dstart[0]


def kda_backward_mosaic(
    call: DeltaRuleBackwardCall, *, interpret: bool = False
) -> tuple[ChunkedTokens, jax.Array]:
    """Returns the same where g is [N * 64, Hv, 128], decays per channel."""
    dtypes = [x.dtype for x in call.tokens]
    q, k, v, do = (x.astype(jnp.bfloat16) for x in (*call.tokens[:3], call.do))
    g, beta = (x.astype(jnp.float32) for x in call.tokens[3:])
    count, heads = q.shape[0] // CHUNK, v.shape[1]
    of_chunks = channel_chunks(
        q, k, g, beta, whole_chunks(count), count,
        scale=call.scale, use_qk_l2norm=call.use_qk_l2norm, backward=True, interpret=interpret,
    )  # fmt: skip
    q, k, v, do = (x.reshape(count, CHUNK, *x.shape[1:]) for x in (q, k, v, do))
    by_head = beta.reshape(count, CHUNK, heads).swapaxes(1, 2)[:, :, None]
    vectors = jnp.concatenate([of_chunks.ends, by_head], axis=2)
    start, dend = (None if x is None else x[None] for x in (call.initial_state, call.dfinal))
    states, dstates, y, dstart = state_pass(
        of_chunks.q, of_chunks.k, v, do, of_chunks.x, of_chunks.p, vectors,
        jnp.asarray(call.runs), written=of_chunks.written, start=start, dend=dend,
        interpret=interpret,
    )  # fmt: skip
    assert states.others is not None
    rounded, rest = (x.reshape(v.shape) for x in split_bf16(g))
    dq, dk, dv, of_g, of_beta = channel_gradients(
        q, k, of_chunks.k, (rounded, rest), v, do, of_chunks.x, vectors,
        states.others, dstates, y, scale=call.scale, l2norm=call.use_qk_l2norm, interpret=interpret,
    )  # fmt: skip
    of_beta = of_beta.sum(axis=2).swapaxes(1, 2).reshape(beta.shape)
    group = heads // k.shape[2]
    dq, dk = (
        x.reshape(-1, k.shape[2], group, DIM).sum(axis=2) if group > 1
        else x.reshape(-1, heads, DIM)
        for x in (dq, dk)
    )  # fmt: skip
    of_tokens = dq, dk, dv.reshape(-1, heads, DIM), of_g.reshape(g.shape), of_beta
    cast = (x.astype(dtype) for x, dtype in zip(of_tokens, dtypes, strict=True))
    return ChunkedTokens(*cast), dstart[0]
