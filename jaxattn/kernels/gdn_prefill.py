"""Chunked gated delta rule on a Hopper GPU: the plan, and the kernels in order.

    gdn_prefill_chunk    of every chunk of 64 tokens alone: its inverse, its masked scores
    gdn_prefill_segments if sequences are few and long: the states inside them, in parallel
    gdn_prefill_state    the pass over the chunks of each sequence, state in registers

Limits: Dk = Dv = 128, chunks of 64 tokens, q, k and v in bfloat16 or float16, states and gates in
float32. Reference: `jaxattn.gdn_chunk`; tests: tests/test_gdn_prefill_kernel.py.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.gdn_chunk import checkpoint_slots
from jaxattn.kernels.gdn_prefill_chunk import CHUNK, DIM, NUM_SMS, chunk_matrices
from jaxattn.kernels.gdn_prefill_segments import segment_starts, transition_pass
from jaxattn.kernels.gdn_prefill_state import output_pass
from jaxattn.kernels.hopper import require_hopper

LOG2E = math.log2(math.e)
# exp2 of this is 0 in float32, and sums of 64 of them keep a small decay beside them to 1e-3.
LOWEST_LOG2_DECAY = -150.0


class Pool(NamedTuple):
    """A stack of state pools, and the slots in it of n sequences; -1 is none."""

    states: jax.Array  # float32 or bfloat16 [L, Z, Hv, 128, 128]
    layer: jax.Array  # int32 [1]
    live: jax.Array  # bool [n]; of other sequences nothing is read, and their output is 0
    reads: jax.Array  # int32 [n]; -1 starts from zeros
    writes: jax.Array  # int32 [n]
    checkpoints: jax.Array | None  # int32 [n, M]
    checkpoint_tokens: int


class Plan(NamedTuple):
    """Which tokens each chunk and each run of chunks has; a chunk belongs to one sequence."""

    chunk_start: jax.Array  # int32 [N], the chunk's first token
    chunk_length: jax.Array  # int32 [N], 0 for a chunk that is not used
    kept: jax.Array | None  # int32 [N], the slot that takes the state after the chunk, or -1
    runs: jax.Array  # int32 [R + 1, 7], columns in gdn_prefill_state; the last is the padding
    sequences: jax.Array  # int32 [n, 3], first run, number of runs, slot that it starts from


def _cut(starts: jax.Array, ends: jax.Array, size: int, pieces: int) -> tuple[jax.Array, ...]:
    """Ranges [n] cut in pieces of `size`, at least one each: of every piece its range, where it
    starts and how long it is; of every range its first piece and how many it has."""
    number = jnp.maximum((ends - starts + (size - 1)) // size, 1)
    last = jnp.cumsum(number, dtype=jnp.int32)
    first = last - number
    piece = lax.iota(jnp.int32, pieces)
    owner = jnp.searchsorted(last, piece, side="right", method="compare_all").astype(jnp.int32)
    used, owner = owner < starts.shape[0], jnp.minimum(owner, starts.shape[0] - 1)
    start = starts[owner] + (piece - first[owner]) * size
    length = jnp.where(used, jnp.clip(ends[owner] - start, 0, size), 0)
    return owner, jnp.where(used, start, 0), length, first, number


def plan(offsets: jax.Array, length: int, segment: int, pool: Pool) -> Plan:
    """The chunks and runs of sequences at int32 `offsets` [n + 1].

    Args:
        length: T, of which the tokens past the last offset are padding.
        segment: tokens of a run, a multiple of 64, or 0 for one run a sequence.
        pool: the slots; its states are not used.
    """
    count = offsets.shape[0] - 1
    starts, ends = offsets[:-1], offsets[1:]
    # sum(max(1, ceil(len / size))) is at most T // size + n.
    cut = _cut(starts, ends, CHUNK, length // CHUNK + count)
    sequence, chunk_start, chunk_length, first_chunk, _ = cut
    kept = None
    if pool.checkpoints is not None:
        index = lax.iota(jnp.int32, sequence.shape[0]) - first_chunk[sequence]
        done = jnp.where(chunk_length > 0, index * CHUNK + chunk_length, 0)
        kept = checkpoint_slots(pool.checkpoints, pool.checkpoint_tokens, sequence, done)
    if segment:
        owner, start, tokens, first, number = _cut(starts, ends, segment, length // segment + count)
        read = lax.iota(jnp.int32, owner.shape[0])  # a row of `segment_starts`
        index = read - first[owner]
        is_last = index == number[owner] - 1
        chunk = first_chunk[owner] + index * (segment // CHUNK)
        write = jnp.where(is_last, pool.writes[owner], -1)
    else:
        owner = first = lax.iota(jnp.int32, count)
        number = jnp.ones_like(owner)
        start, tokens, chunk, is_last = starts, ends - starts, first_chunk, number > 0
        read, write = pool.reads, pool.writes
    steps = jnp.where(pool.live[owner], (tokens + (CHUNK - 1)) // CHUNK, 0)
    runs = jnp.stack([start, tokens, chunk, steps, is_last, read, write], axis=1)
    # The tokens past the last offset: their output is 0.
    fill = jnp.asarray([0, 0, 0, 0, 1, -1, -1], jnp.int32)
    fill = fill.at[0].set(ends[-1]).at[1].set(length - ends[-1])
    runs = jnp.concatenate([runs, fill[None]]).astype(jnp.int32)
    sequences = jnp.stack([first, number, pool.reads], axis=1)
    return Plan(chunk_start, chunk_length, kept, runs, sequences)


def segment_tokens(length: int, count: int, value_heads: int) -> int:
    """Tokens of a segment for T, n and Hv, or 0 where splitting the sequences does not pay.

    The times, in us, are of a chunk in the output pass and in the transition pass, of a step over
    the segments, and what two more kernels add. The first two were measured on an H200, the others
    are guesses. Of static shapes only: the choice does not depend on lengths or gates.
    """
    output, transition, step, launches = 2.1, 1.6, 1.5, 7.0

    def waves(blocks: int) -> int:
        return -(-blocks // NUM_SMS)

    chunks = -(-length // (count * CHUNK))
    rows = count * value_heads
    whole = output * chunks * waves(rows)

    def split(segments: int) -> float:
        size = -(-chunks // segments)
        each = output * waves(rows * segments) + transition * waves(2 * rows * (segments - 1))
        return size * each + step * (segments - 1) * waves(2 * rows) + launches

    best = min(range(2, min(chunks, 129)), key=split, default=0)
    return -(-chunks // best) * CHUNK if best and split(best) < 0.85 * whole else 0


def chunk_gates(g: jax.Array, beta: jax.Array, chunks: Plan) -> jax.Array:
    """float32 [N, Hv, 2, 64]: log2 decay and beta of every chunk's tokens, 0 past its end."""
    g = jnp.maximum(g.astype(jnp.float32) * LOG2E, LOWEST_LOG2_DECAY)
    gates = jnp.stack([g, beta.astype(jnp.float32)], axis=-1)  # [T, Hv, 2]
    place = lax.iota(jnp.int32, CHUNK)
    token = chunks.chunk_start[:, None] + place
    token = jnp.where(place < chunks.chunk_length[:, None], token, g.shape[0])
    gates = gates.at[token].get(mode="fill", fill_value=0)  # [N, 64, Hv, 2]
    return jnp.transpose(gates, (0, 2, 3, 1))


def refuse_prefill(
    op: str,
    q: jax.Array,
    v: jax.Array,
    chunk_size: int,
    *,
    interpret: bool,
) -> None:
    """Raises `NotImplementedError`, with the reason, where the kernels cannot run."""
    require_hopper(op, interpret=interpret)
    if q.shape[-1] != DIM or v.shape[-1] != DIM:
        raise NotImplementedError(
            f"{op}: the kernel has Dk = Dv = 128, and got Dk={q.shape[-1]}, Dv={v.shape[-1]}; "
            "use implementation='xla'"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"{op}: the kernel wants q, k and v in bfloat16 or float16, got {q.dtype.name}"
        )
    if chunk_size != CHUNK:
        raise NotImplementedError(f"{op}: the kernel has chunk_size 64, got {chunk_size}")
    if v.size == 0:
        raise NotImplementedError(f"{op}: the kernel cannot start without a token, got v {v.shape}")


def gdn_prefill_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
    initial_state: jax.Array | None = None,
    pool: Pool | None = None,
    cu_seqlens: jax.Array | None = None,
    use_qk_l2norm: bool = False,
    segment: int | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`jaxattn.gdn.chunk_gated_delta_rule` on a Hopper GPU: output and final states.

    With a pool it is `jaxattn.gdn_prefill.gated_delta_rule_prefill`: output and the pool's states.
    For arguments that `refuse_prefill` accepts. `segment` is the number of tokens, a multiple of
    64, that a block takes of a long sequence, 0 for all; None chooses by `segment_tokens`.
    """
    batch, length = v.shape[:2]
    if cu_seqlens is None:
        count = batch
        offsets = length * lax.iota(jnp.int32, batch + 1)
    else:
        count = cu_seqlens.shape[0] - 1
        offsets = cu_seqlens.astype(jnp.int32)

    tokens = batch * length
    # A copy takes 64 rows, and no array may be shorter than that.
    q, k, v, g, beta = (
        jnp.pad(flat, ((0, max(0, CHUNK - tokens)),) + ((0, 0),) * (flat.ndim - 1))
        for flat in (x.reshape(tokens, *x.shape[2:]) for x in (q, k, v, g, beta))
    )
    slots = _arrays_as_pool(initial_state, count, v.shape[1]) if pool is None else pool
    with jax.named_scope("plan"):
        if segment is None:
            segment = segment_tokens(tokens, count, v.shape[1])
        table = plan(offsets, tokens, segment, slots)
        gates = chunk_gates(g, beta, table)
    mode = {"interpret": interpret, "detect_races": detect_races}
    x, p, vectors = chunk_matrices(
        q,
        k,
        gates,
        table.chunk_start,
        table.chunk_length,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        **mode,
    )
    starts = None if pool is not None else slots.states
    if segment:
        ends, transitions = transition_pass(k, v, x, vectors, table.runs[:-1], **mode)
        starts = segment_starts(
            ends, transitions, table.sequences, slots.states, slots.layer, **mode
        )
    o, states = output_pass(
        q,
        k,
        v,
        x,
        p,
        vectors,
        table.runs,
        starts=starts,
        layer=slots.layer,
        finals=count if pool is None else pool.states,
        kept=table.kept,
        **mode,
    )
    o = o[:tokens].reshape(batch, length, *o.shape[1:])
    return o, states if pool is not None else states[0]


def _arrays_as_pool(initial: jax.Array | None, count: int, value_heads: int) -> Pool:
    """Of states in arrays: a pool whose slots are the sequences; without them nothing is read."""
    each = lax.iota(jnp.int32, count)
    if initial is None:
        states, reads = jnp.zeros((1, 1, 1, DIM, DIM), jnp.float32), jnp.full_like(each, -1)
    else:
        states, reads = initial[None], each
    return Pool(states, jnp.zeros(1, jnp.int32), each >= 0, reads, each, None, 0)
