"""The chunked gated delta rule on a Hopper GPU: the plan, and the kernels in order.

    intra_chunk/launch.py       every chunk of 64 tokens by itself: its inverse, its masked scores
    kda_intra_chunk/launch.py   the same where every channel of the key has its own decay
    inter_chunk/segment_scan.py if sequences are few and long: the states inside them, in parallel
    inter_chunk/launch.py       the pass over the chunks of each sequence, state in registers

Limits: Dk = Dv = 128, chunks of 64 tokens, q, k and v in bfloat16 or float16, states and gates in
float32. Reference: `jaxattn.ops.gdn.chunk_xla`; tests: tests/kernels/gdn/prefill/test_kernel.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.core.cache.state_pool import checkpoint_slots
from jaxattn.core.dispatch import Refusal
from jaxattn.core.numerics.rms_norm import gated_rms_norm
from jaxattn.kernels.gdn.prefill.inter_chunk.launch import (
    halves_in_a_block,
    norms_inside,
    output_pass,
)
from jaxattn.kernels.gdn.prefill.inter_chunk.norm_epilogue import NormEpilogueParams
from jaxattn.kernels.gdn.prefill.inter_chunk.segment_scan import segment_starts, transition_pass
from jaxattn.kernels.gdn.prefill.intra_chunk.launch import ChunkMatrices, chunk_matrices
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.launch import channel_chunks
from jaxattn.kernels.gdn.prefill.tiles import CHUNK, DIM
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper

# Up to this many sequences are divided number by number: the plan is then one XLA kernel.
WRITTEN_OUT = 16


class PrefillStatePool(NamedTuple):
    """A stack of state pools, and the slots in it of n sequences; -1 means none."""

    states: jax.Array  # float32 or bfloat16 [L, Z, Hv, 128, 128]
    layer: jax.Array  # int32 [1]
    live: jax.Array | np.ndarray  # bool [n]; others read nothing, and their output is 0
    reads: jax.Array | np.ndarray  # int32 [n]; -1 starts from zeros
    writes: jax.Array | np.ndarray  # int32 [n]
    checkpoints: jax.Array | None  # int32 [n, M]
    checkpoint_tokens: int


class ChunkPlan(NamedTuple):
    """The tokens of each chunk and of each run of chunks; a chunk belongs to one sequence."""

    # int32 [7, N + 1 + R + 1], one array so that one XLA kernel computes it. N columns have the
    # first token and the tokens of a chunk, and the next column has the number of those in use. R
    # columns have the runs, whose rows are in state_update.py, and the last one has the padding as
    # another run.
    table: jax.Array
    num_chunks: int  # N
    kept: jax.Array | None  # int32 [N], the slot that receives the state after the chunk, or -1
    sequences: jax.Array  # int32 [n, 3], first run, number of runs, slot of the initial state


def _cut(xp: Any, starts: Any, ends: Any, size: int, pieces: int) -> tuple[Any, ...]:
    """Divides ranges [n] into pieces of `size`, at least one per range. Returns for every piece its
    range, start and length, and for every range its first piece and its number of pieces."""
    count, piece = starts.shape[0], xp.arange(pieces, dtype=xp.int32)
    if xp is jnp and count <= WRITTEN_OUT:
        return _cut_written_out(starts, ends, size, piece)
    number = xp.maximum((ends - starts + (size - 1)) // size, 1)
    last = xp.cumsum(number, dtype=xp.int32)
    if xp is np:
        owner = np.searchsorted(last, piece, side="right").astype(np.int32)
    else:  # one kernel, where a search would be a loop
        owner = jnp.sum(piece[:, None] >= last, axis=1, dtype=jnp.int32)
    first = last - number
    used, owner = owner < count, xp.minimum(owner, count - 1)
    start = starts[owner] + (piece - first[owner]) * size
    length = xp.where(used, xp.clip(ends[owner] - start, 0, size), 0)
    return owner, xp.where(used, start, 0), length, first, number


def _cut_written_out(starts: Any, ends: Any, size: int, piece: Any) -> tuple[Any, ...]:
    """Divides few ranges, number by number, which takes no kernel of its own."""
    owner = begin = start = end = jnp.zeros_like(piece)
    firsts, numbers, first = [], [], jnp.int32(0)
    for i in range(starts.shape[0]):
        here = piece >= first
        owner, begin = (jnp.where(here, x, old) for x, old in ((i, owner), (first, begin)))
        start, end = (jnp.where(here, x[i], old) for x, old in ((starts, start), (ends, end)))
        firsts.append(first)
        numbers.append(jnp.maximum((ends[i] - starts[i] + (size - 1)) // size, 1))
        first = first + numbers[-1]
    start, used = start + (piece - begin) * size, piece < first
    length = jnp.where(used, jnp.clip(end - start, 0, size), 0)
    return owner, jnp.where(used, start, 0), length, jnp.stack(firsts), jnp.stack(numbers)


def plan(
    offsets: jax.Array | np.ndarray, length: int, segment: int, pool: PrefillStatePool
) -> ChunkPlan:
    """Returns the chunks and runs of sequences at int32 `offsets` [n + 1].

    Parts that depend only on NumPy offsets are computed immediately on the host, the others on the
    device.

    Args:
        length: T; the tokens past the last offset are padding.
        segment: Tokens of a run, a multiple of 64, or 0 for one run per sequence.
        pool: The slots; its states are not used.
    """
    count = offsets.shape[0] - 1
    xp: Any = np if isinstance(offsets, np.ndarray) else jnp
    starts, ends = offsets[:-1], offsets[1:]
    # sum(max(1, ceil(len / size))) is at most T // size + n.
    cut = _cut(xp, starts, ends, CHUNK, length // CHUNK + count)
    sequence, chunk_start, chunk_length, first_chunk, number = cut
    used = first_chunk[-1] + number[-1]
    if xp is np:
        sequence, chunk_start, chunk_length = (x[:used] for x in cut[:3])
    chunks = [xp.append(chunk_start, used), xp.append(chunk_length, 0)]
    num_chunks = sequence.shape[0]
    kept = None
    if pool.checkpoints is not None:
        index = xp.arange(num_chunks, dtype=xp.int32) - first_chunk[sequence]
        done = xp.where(chunk_length > 0, index * CHUNK + chunk_length, 0)
        kept = checkpoint_slots(pool.checkpoints, pool.checkpoint_tokens, sequence, done)
    if segment:
        cut = _cut(xp, starts, ends, segment, length // segment + count)
        first, number = cut[3:]
        owner, start, tokens = (x[: first[-1] + number[-1]] if xp is np else x for x in cut[:3])
        read = xp.arange(owner.shape[0], dtype=xp.int32)  # a row of `segment_starts`
        index = read - first[owner]
        is_last = index == number[owner] - 1
        chunk = first_chunk[owner] + index * (segment // CHUNK)
    else:
        owner = first = xp.arange(count, dtype=xp.int32)
        number = xp.ones_like(owner)
        start, tokens, chunk, is_last = starts, ends - starts, first_chunk, number > 0
    steps = (tokens + (CHUNK - 1)) // CHUNK
    # The tokens past the last offset: their output is 0.
    fill = (ends[-1], length - ends[-1], 0, 0, 1, -1, -1)
    # The rest depends on the slots, which may be known only on the device.
    slots: Any = (pool.live, pool.reads, pool.writes)
    if xp is jnp or not isinstance(pool.writes, np.ndarray):
        xp, slots = jnp, [jnp.asarray(x) for x in slots]
    live, reads, writes = slots
    steps = xp.where(live[owner], steps, 0)
    write = xp.where(is_last, writes[owner], -1) if segment else writes
    columns = (start, tokens, chunk, steps, is_last, read if segment else reads, write)
    runs = [xp.append(column, last) for column, last in zip(columns, fill, strict=True)]
    # The runs' numbers are side by side: a GPU serializes threads that diverge.
    zeros = np.zeros(num_chunks + 1, np.int32)
    table = zip([*chunks, *[zeros] * (len(runs) - 2)], runs, strict=True)
    rows = xp.stack([xp.concatenate(row) for row in table])
    sequences = xp.stack([first, number, reads], axis=1)
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (rows, kept, sequences))
    # Without the barrier XLA recomputes them where they are read.
    rows, kept, sequences = lax.optimization_barrier(arrays)
    return ChunkPlan(rows, num_chunks, kept, sequences)


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
            f"{op}: the kernel has Dk = Dv = 128, and got Dk={q.shape[-1]}, Dv={v.shape[-1]}"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Refusal(
            f"{op}: the kernel wants q, k and v in bfloat16 or float16, got {q.dtype.name}"
        )
    if chunk_size != CHUNK:
        raise Refusal(f"{op}: the kernel has chunk_size 64, got {chunk_size}")
    if v.size == 0:
        raise Refusal(f"{op}: the kernel cannot start without a token, got v {v.shape}")


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
    detect_races: bool = False,
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
    mode: dict[str, Any] = {"interpret": interpret, "detect_races": detect_races}
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
                q, k, g, beta, chunks, table.num_chunks, **of_chunks, **mode
            )
        else:
            if matrices is None:
                matrices = chunk_matrices(
                    q, k, g, beta, chunks, table.num_chunks, **of_chunks, **mode
                )
            assert matrices.x is not None
            x, p, vectors, drawn = matrices.x, matrices.p, matrices.vectors, matrices.zero
    if segment:
        ends, transitions = transition_pass(
            k, v, x, vectors, table.table, busy=busy - count, written=written, **mode
        )
        starts = segment_starts(
            ends, transitions, table.sequences, slots.states, slots.layer, **mode
        )
    o, states = output_pass(
        q, k, v, x, p, vectors, table.table, drawn, written=written, starts=starts,
        layer=slots.layer, finals=count if pool is None else pool.states, kept=table.kept,
        norm=norm if inside else None, busy=busy, **mode,
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
