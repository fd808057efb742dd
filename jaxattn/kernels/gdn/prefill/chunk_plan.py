"""The plan of chunks and runs of chunks, which the prefill's passes read as a table."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.core.cache.state_pool import checkpoint_slots
from jaxattn.kernels.gdn.chunk.tiles import CHUNK

# Rows of a run: first token, tokens, first chunk, chunks that are computed (0: the tokens' output
# is 0), whether it ends a sequence, and the slots of the states before and after, or -1.
START, TOKENS, FIRST_CHUNK, STEPS, LAST, BEFORE, AFTER = range(7)

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
    # columns have the runs, whose rows are START to AFTER, and the last one has the padding as
    # another run.
    table: jax.Array
    num_chunks: int  # N
    # int32 [N], the slot that receives the state after the chunk, or -1
    checkpoint_slots: jax.Array | None
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


def first_run(x: Any) -> int:
    """Returns the column of the plan where the runs begin, given an array with one entry per
    chunk."""
    return x.shape[0] + 1
