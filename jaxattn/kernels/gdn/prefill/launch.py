"""The chunked gated delta rule on a Hopper GPU: the kernels in order.

    chunk_plan.py               the tokens of each chunk and of each run of chunks
    intra_chunk/launch.py       every chunk of 64 tokens by itself: its inverse, its masked scores
    kda_intra_chunk/launch.py   the same where every channel of the key has its own decay
    inter_chunk/segment_scan.py if sequences are few and long: the states inside them, in parallel
    inter_chunk/launch.py       the pass over the chunks of each sequence, state in registers

Limits: Dk = Dv = 128, chunks of 64 tokens, q, k and v in bfloat16 or float16, states and gates in
float32. Reference: `jaxattn.ops.gdn.chunk_xla`; tests: tests/kernels/gdn/prefill/test_kernel.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.core.dispatch import Refusal
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.kernels.gdn.chunk.tiles import CHUNK, DIM
from jaxattn.kernels.gdn.prefill.chunk_plan import PrefillStatePool, plan
from jaxattn.kernels.gdn.prefill.inter_chunk.launch import (
    halves_in_a_block,
    norms_inside,
    output_pass,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.norm_epilogue import NormEpilogueParams
from jaxattn.kernels.gdn.prefill.inter_chunk.segment_scan import segment_starts, transition_pass
from jaxattn.kernels.gdn.prefill.intra_chunk.launch import ChunkMatrices, chunk_matrices
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.launch import channel_chunks
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper


def segment_tokens(length: int, count: int, value_heads: int) -> int:
    """Returns the tokens of a segment for T, n and Hv, or 0 if splitting the sequences does not pay
    off.

    The times below are in us. They are those of a chunk in the output pass and in the transition
    pass, with the two halves of a state in one CTA or in one each, of a step over the segments, and
    of two more kernels. Those of halves in one CTA were measured on an H200, the others are
    guesses. The choice depends only on static shapes, not on lengths or gates.
    """
    output, transition, step, launches = (2.1, 1.5), (1.6, 1.2), 1.5, 7.0

    def waves(blocks: int) -> int:
        return -(-blocks // NUM_SMS)

    def chunk_time(times: tuple[float, float], states: int) -> float:
        shared, alone = times
        return alone if halves_in_a_block(states) == 1 else shared * waves(states)

    chunks = -(-length // (count * CHUNK))
    rows = count * value_heads
    whole = chunks * chunk_time(output, rows)

    def split(segments: int) -> float:
        size = -(-chunks // segments)
        each = chunk_time(output, rows * segments)
        each += chunk_time(transition, 2 * rows * (segments - 1))
        return size * each + step * (segments - 1) * waves(2 * rows) + launches

    best = min(range(2, min(chunks, 129)), key=split, default=0)
    return -(-chunks // best) * CHUNK if best and split(best) < 0.9 * whole else 0


def refuse_prefill(
    op: str,
    q: jax.Array,
    v: jax.Array,
    chunk_size: int,
    *,
    interpret: bool,
) -> None:
    """Raises `Refusal`, with the reason, if the kernels cannot run."""
    require_hopper(op, interpret=interpret)
    if q.shape[-1] != DIM or v.shape[-1] != DIM:
        raise Refusal(
            f"{op}: the kernel needs Dk = Dv = 128, got Dk={q.shape[-1]}, Dv={v.shape[-1]}"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Refusal(
            f"{op}: the kernel needs q, k and v in bfloat16 or float16, got {q.dtype.name}"
        )
    if chunk_size != CHUNK:
        raise Refusal(f"{op}: the kernel needs chunk_size=64, got chunk_size={chunk_size}")
    if v.size == 0:
        raise Refusal(f"{op}: the kernel needs at least one token, got v {v.shape}")


def gdn_prefill_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    pool: PrefillStatePool | None = None,
    cu_seqlens: jax.Array | None = None,
    use_qk_l2norm: bool = False,
    segment: int | None = None,
    norm: NormEpilogueParams | None = None,
    matrices: ChunkMatrices | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`jaxattn.gdn.chunk_gated_delta_rule` on a Hopper GPU: returns the output and final states.

    With a pool it is `jaxattn.gdn.gated_delta_rule_prefill`, and returns the output and the pool's
    states. The arguments must pass `refuse_prefill`. `segment` is the number of tokens of a long
    sequence, a multiple of 64, that a CTA takes; 0 means all, and None chooses by `segment_tokens`.
    A g of [B, T, Hv, Dk] has a decay for every channel of the key. `matrices` are those of
    `whole_chunk_matrices`, if they exist already.
    """
    batch, length = v.shape[:2]
    tokens = batch * length
    if cu_seqlens is None:
        offsets: Any = length * np.arange(batch + 1, dtype=np.int32)
    elif isinstance(cu_seqlens, jax.core.Tracer):
        offsets = cu_seqlens.astype(jnp.int32)
    else:
        offsets = np.asarray(cu_seqlens, np.int32)
    count = offsets.shape[0] - 1
    q, k, v, g, beta = (x.reshape(tokens, *x.shape[2:]) for x in (q, k, v, g, beta))
    slots = _arrays_as_pool(initial_state, count, v.shape[1]) if pool is None else pool
    with jax.named_scope("plan"):
        if segment is None:
            segment = segment_tokens(tokens, count, v.shape[1])
        table = plan(offsets, tokens, segment, slots)
    # A copy takes 64 rows, and no array may be shorter than that.
    short = (0, max(0, CHUNK - tokens))
    q, k, v, g, beta = (jnp.pad(x, (short, *[(0, 0)] * (x.ndim - 1))) for x in (q, k, v, g, beta))
    g, beta, channels = g.astype(jnp.float32), beta.astype(jnp.float32), g.ndim == 3
    of_chunks: dict[str, Any] = {"scale": scale, "use_qk_l2norm": use_qk_l2norm}
    afterwards = 1.0
    if scale <= 0 and not channels:  # whose logarithm the kernel needs
        of_chunks["scale"], afterwards = 1.0, scale
    busy = count if not segment else max(count, -(-tokens // segment))
    inside = (
        norm is not None and afterwards == 1.0 and norms_inside(norm, v.dtype, busy * v.shape[1])
    )
    starts = None if pool is not None else slots.states
    with jax.named_scope("chunks"):
        chunks, drawn, written = table.table, jnp.zeros(1, jnp.int32), None
        if channels:
            q, k, written, x, p, vectors = channel_chunks(
                q, k, g, beta, chunks, table.num_chunks, **of_chunks, interpret=interpret
            )
        else:
            if matrices is None:
                matrices = chunk_matrices(
                    q, k, g, beta, chunks, table.num_chunks, **of_chunks, interpret=interpret
                )
            assert matrices.x is not None
            x, p, vectors, drawn = matrices.x, matrices.p, matrices.vectors, matrices.zero
    if segment:
        ends, transitions = transition_pass(
            k, v, x, vectors, table.table, busy=busy - count, written=written, interpret=interpret
        )
        starts = segment_starts(
            ends, transitions, table.sequences, slots.states, slots.layer, interpret=interpret
        )
    o, states = output_pass(
        q, k, v, x, p, vectors, table.table, drawn, written=written, starts=starts,
        layer=slots.layer, finals=count if pool is None else pool.states,
        checkpoint_slots=table.checkpoint_slots, norm=norm if inside else None, busy=busy,
        interpret=interpret,
    )  # fmt: skip
    o = o[:tokens]
    if afterwards != 1.0:
        o = o * jnp.asarray(afterwards, o.dtype)
    if norm is not None and not inside:
        # Padding is 0, and stays 0 whatever its gate contains.
        o = jnp.where(jnp.any(o != 0, axis=-1, keepdims=True), gated_rms_norm(o, *norm), 0)
    o = o.reshape(batch, length, *o.shape[1:])
    return o, states if pool is not None else states[0]


def _arrays_as_pool(initial: jax.Array | None, count: int, value_heads: int) -> PrefillStatePool:
    """Returns a pool whose slots are the sequences; without initial states nothing is read."""
    each = np.arange(count, dtype=np.int32)
    if initial is None:
        states, reads = jnp.zeros((1, 0, value_heads, DIM, DIM)), np.full_like(each, -1)
    else:
        states, reads = initial[None], each
    return PrefillStatePool(states, jnp.zeros(1, jnp.int32), each >= 0, reads, each, None, 0)
