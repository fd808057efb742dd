"""The chunked form of the gated delta rule: matmuls over chunks of tokens, a scan over chunks.

With `G` the running sum of the log decay inside a chunk, `gamma = exp(G)`, `S` the state before the
chunk, and rows i, j of a chunk:

    A_ij  = beta_i (k_i . k_j) exp(G_i - G_j)   for i > j, else 0
    X     = (I + A)^-1 diag(beta)
    P_ij  = (q_i . k_j) exp(G_i - G_j)          for i >= j, else 0
    U     = X (V - gamma * (K S^T))             the chunk's addition to the state
    O     = scale * (gamma * (Q S^T) + P U)
    S'    = exp(G_last) S + (exp(G_last - G) * U)^T K

Only `K S^T`, `X (...)` and `(...)^T K` depend on the chunk before: they are the body of the scan,
and the rest is batched over all chunks. The method is that of Yang, Kautz, Hatamizadeh, "Gated
Delta Networks" (2024), in the arrangement of FlashQLA, which forms no product of X with the keys.

If every channel of the key has its own decay (KDA), G has an axis of Dk, and ops/kda/chunk_xla.py
computes A, P and the factors of the state. The scan is the same.

Arrays here are `[N, B, H, C, D]`: N chunks of C tokens, with the keys and queries repeated for the
Hv value heads. Splitting the head axis in two would cost more in transposes than the repeats do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.state_pool import checkpoint_slots, state_write
from jaxattn.core.numerics.matmul import ADDED_TO, STATE_TO, float16_scale, matmul, summed
from jaxattn.core.validation.varying_axes import match_varying_axes
from jaxattn.ops.gdn.triangular_inverse import unit_lower_inverse

# exp of this is 0 in float32. Sums of finite numbers stay finite, whereas -inf times 0 is NaN.
LOWEST_LOG_DECAY = -1e4
# exp of this is 0 as well, and sums with ordinary decays keep more digits.
CLEARING_LOG_DECAY = -128.0

# The scan is unrolled for up to this many chunks, and by UNROLL iterations beyond. On an H200 the
# loop's slices of stacked arrays take a quarter of a training step of 16 chunks, and of a prefill
# of 128.
UNROLLED_CHUNKS = 16
UNROLL = 4


class ChunkOperands(NamedTuple):
    """The operands of the scan over chunks, and the scores for the output after it.

    A state becomes `decay S + (to_end * U)^T k_written`, and contributes
    `from_start * (k_read S^T)` to U.

    Attributes:
        p: Computes the scores P in float32, which only the code after the scan needs.
    """

    q_read: Float[Array, "N B H C Dk"]
    k_read: Float[Array, "N B H C Dk"]
    k_written: Float[Array, "N B H C Dk"]
    x: Float[Array, "N B H C C"]  # (I + A)^-1 diag(beta)
    from_start: Float[Array, "N B H C 1"] | None  # None: k_read and q_read include it
    to_end: Float[Array, "N B H C 1"] | None  # None: k_written includes it
    decay: Float[Array, "N B H 1 Dk"] | Float[Array, "N B H 1 1"]
    p: Callable[[], Float[Array, "N B H C C"]]


type MakeOperands = Callable[[Array, Array, Array, Array, jnp.dtype], ChunkOperands]


def head_operands(q: Array, k: Array, g: Array, beta: Array, dtype: jnp.dtype) -> ChunkOperands:
    """Returns the operands if a value head has one decay, g [N, B, H, C]."""
    size = g.shape[-1]
    with jax.named_scope("decay"):
        lower = jnp.tril(jnp.ones((size, size), jnp.float32))
        strictly_lower = jnp.tril(lower, -1)
        # Sum of g over j < l <= i, term by term: a difference of running sums would lose a small
        # decay after a large one. The mask is applied before exp, because 0 * inf is NaN.
        between = summed("il,...lj->...ij", lower, g[..., :, None] * strictly_lower)
        decay = jnp.exp(jnp.where(lower > 0, between, -jnp.inf))
        from_start = jnp.exp(summed("il,...l->...i", lower, g))[..., None]  # gamma
        to_end = jnp.exp(summed("lj,...l->...j", strictly_lower, g))[..., None]  # exp(G_last - G)

    with jax.named_scope("invert"):
        a = matmul("nbhid,nbhjd->nbhij", k, k, dtype) * decay * beta[..., :, None]
        x = (unit_lower_inverse(jnp.tril(a, -1)) * beta[..., None, :]).astype(dtype)

    def p() -> Array:
        return matmul("nbhid,nbhjd->nbhij", q, k, dtype) * decay

    return ChunkOperands(q, k, k, x, from_start, to_end, from_start[..., -1:, :], p)


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """The difference between the two rules: a decay per value head (GDN) or per channel (KDA).

    Attributes:
        operands: Computes the operands of the scan over chunks from the rule's decays.
        channels: Whether g is [B, T, Hv, Dk] instead of [B, T, Hv].
        sigmoid: Whether the gated norm after the rule uses sigmoid(z) instead of silu(z).
    """

    operands: MakeOperands
    channels: bool = False
    sigmoid: bool = False


GATED = DeltaRule(head_operands)


class ChunkPacking(NamedTuple):
    """The mapping of packed sequences' tokens to chunks; a chunk belongs to one sequence."""

    token: Int[Array, " N*C"]  # token of each chunk row; out of range if it has none
    row: Int[Array, " T"]  # chunk row of each token; out of range for padding
    sequence: Int[Array, " N"]
    done: Int[Array, " N"]  # tokens of the sequence up to the chunk's end
    first: Array  # [N] bool: the sequence starts here
    last: Array  # [N] bool: the sequence ends here


def pack(cu_seqlens: Int[Array, " n+1"], length: int, chunk_size: int) -> ChunkPacking:
    """Builds the chunk table of static size: sum(ceil(len / C)) <= (T + n (C - 1)) / C."""
    count = cu_seqlens.shape[0] - 1
    chunks = (length + count * (chunk_size - 1)) // chunk_size
    offsets = cu_seqlens.astype(jnp.int32)
    starts, ends = offsets[:-1], offsets[1:]
    chunk_ends = jnp.cumsum((ends - starts + chunk_size - 1) // chunk_size)
    chunk_starts = chunk_ends - (ends - starts + chunk_size - 1) // chunk_size

    chunk = jnp.arange(chunks, dtype=jnp.int32)
    used = chunk < chunk_ends[-1]
    sequence = jnp.searchsorted(chunk_ends, chunk, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, count - 1)
    first = used & (chunk == chunk_starts[sequence])
    last = used & (chunk == chunk_ends[sequence] - 1)
    place = jnp.arange(chunk_size, dtype=jnp.int32)
    before = (chunk - chunk_starts[sequence]) * chunk_size
    done = jnp.minimum(before + chunk_size, (ends - starts)[sequence])
    start = starts[sequence] + before
    token = start[:, None] + place
    valid = used[:, None] & (token < ends[sequence][:, None])
    rows = chunks * chunk_size
    # Distinct out-of-range indices: gathers fill, and their gradients may assume uniqueness.
    nowhere = length + jnp.arange(rows, dtype=jnp.int32).reshape(chunks, chunk_size)
    token = jnp.where(valid, token, nowhere).reshape(rows)

    index = jnp.arange(length, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, count - 1)
    row = chunk_starts[owner] * chunk_size + index - starts[owner]
    row = jnp.where(index < ends[-1], row, rows + index)
    return ChunkPacking(token, row, sequence, jnp.where(used, done, 0), first, last)


class PoolCheckpoints(NamedTuple):
    """A pool with the slots that receive the states after every `tokens` tokens of n sequences."""

    pool: Float[Array, "*L Z Hv Dv Dk"]
    layer: int | Array | None
    slots: Int[Array, "n M"]  # -1 stores nothing
    tokens: int  # a multiple of the chunk


def gated_delta_rule_chunks(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    g: Float[Array, "B T Hv"] | Float[Array, "B T Hv Dk"],
    beta: Float[Array, "B T Hv"],
    scale: float,
    initial_state: Float[Array, "n Hv Dv Dk"] | None,
    cu_seqlens: Int[Array, " n+1"] | None,
    use_qk_l2norm: bool,
    chunk_size: int,
    checkpoints: PoolCheckpoints | None = None,
    *,
    operands: MakeOperands = head_operands,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "n Hv Dv Dk"], Array | None]:
    """Runs `gdn.chunk_gated_delta_rule` on checked arguments, T >= 1.

    Args:
        operands: Computes the scan's operands; its rule determines the shape of g.

    Returns: the output, the final state, and the pool with the checkpoints, if there are any.
    """
    batch, length, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    dtype = q.dtype
    q, k, v, g, beta, initial_state = match_varying_axes(
        (q, k, v, g, beta, initial_state), cu_seqlens, checkpoints
    )
    # A short sequence uses a smaller chunk.
    size = min(chunk_size, max(2, 1 << (length - 1).bit_length()))

    packing = None if cu_seqlens is None else pack(cu_seqlens, length, size)
    padded = -(-length // size) * size

    def chunked(x: Array) -> Array:
        """[B, T, H, ...] -> [N, B, C, H, ...]; padding of 0 leaves the state unchanged."""
        if packing is None:
            x = jnp.pad(x, ((0, 0), (0, padded - length)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(batch, padded // size, size, *x.shape[2:]), 1, 0)
        x = x[0].at[packing.token].get(mode="fill", fill_value=0, unique_indices=True)
        return x.reshape(-1, 1, size, *x.shape[1:])

    with jax.named_scope("gather_chunks"):
        q, k = chunked(q), chunked(k)
        if use_qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        q, k = (jnp.repeat(x, value_heads // key_heads, axis=3) for x in (q, k))
        g = jnp.maximum(g.astype(jnp.float32), LOWEST_LOG_DECAY)
        v_chunks, g, beta = chunked(v), chunked(g), chunked(beta.astype(jnp.float32))
        q, k, v_chunks, g, beta = (jnp.moveaxis(x, 3, 2) for x in (q, k, v_chunks, g, beta))

    made = operands(q, k, g, beta, dtype)

    def chunk_step(state: Array, chunk: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
        (q, k, written, x, from_start, to_end, decay), v = chunk
        narrow, wider = _for_float16(state, -1, STATE_TO, dtype)
        seen = matmul("bhcd,bhvd->bhcv", k, narrow, dtype)
        read = matmul("bhcd,bhvd->bhcv", q, narrow, dtype)
        if wider is not None:
            seen, read = (wider.swapaxes(-1, -2) * each for each in (seen, read))
        if from_start is not None:
            seen, read = from_start * seen, from_start * read
        w, wider = _for_float16(v.astype(jnp.float32) - seen, -2, ADDED_TO, dtype)
        u = matmul("bhij,bhjv->bhiv", x, w, dtype)
        weighted = u if to_end is None else u * to_end
        added = matmul("bhcv,bhcd->bhvd", weighted, written, dtype)
        if wider is not None:
            added = wider.swapaxes(-1, -2) * added
        return decay * state + added, (u.astype(dtype), wider, read)

    if initial_state is not None:
        start = initial_state
    else:
        start = match_varying_axes(
            jnp.zeros((batch, value_heads, value_dim, key_dim), jnp.float32), q
        )

    # The scan carries the pool and stores into it in place: states of all chunks at once would take
    # T / 64 x Dv x Dk per head.
    pool = targets = None
    if checkpoints is not None:
        pool = match_varying_axes(checkpoints.pool, q)
        if packing is None:
            sequence = jnp.arange(batch, dtype=jnp.int32)
            done = size * jnp.arange(1, len(q) + 1, dtype=jnp.int32)[:, None]
            sequence, done = jnp.broadcast_arrays(sequence, jnp.minimum(done, length))
        else:
            sequence, done = packing.sequence[:, None], packing.done[:, None]
        targets = checkpoint_slots(checkpoints.slots, checkpoints.tokens, sequence, done)

    def step(carry, xs):
        (state, pool), (chunk, slots) = carry, xs
        state, out = chunk_step(state, chunk)
        if checkpoints is not None:
            pool = state_write(pool, state, slots, layer=checkpoints.layer)
        return (state, pool), out

    chunks = ((made[:-1], v_chunks), targets)
    with jax.named_scope("scan_chunks"):
        if packing is None or cu_seqlens is None:
            unroll = len(q) if len(q) <= UNROLLED_CHUNKS else UNROLL
            (final, pool), (u, wider, read) = lax.scan(step, (start, pool), chunks, unroll=unroll)
        else:
            count = cu_seqlens.shape[0] - 1
            # A zero-length sequence has no chunk: its final state is the one it started with.
            start = jnp.broadcast_to(start, (count, *start.shape[1:]))
            (final, pool), (u, wider, read) = _scan_packed(step, start, pool, chunks, packing)

    with jax.named_scope("output"):
        inside = matmul("nbhij,nbhjv->nbhiv", made.p(), u, dtype)
        out = scale * (read + (inside if wider is None else wider * inside))
        out = jnp.moveaxis(out.astype(v.dtype), 3, 2)  # [N, B, C, Hv, Dv]
        if packing is None:
            out = jnp.moveaxis(out, 0, 1).reshape(batch, padded, value_heads, value_dim)
            return out[:, :length], final, pool
        out = out.reshape(-1, value_heads, value_dim)
        out = out.at[packing.row].get(mode="fill", fill_value=0, unique_indices=True)
        return out[None], final, pool


def _for_float16(x: Array, axis: int, to: int, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """Returns x scaled to be a float16 operand, and the factor that restores a product with it.

    The factor has size 1 along `axis`, and is None if x needs no scaling.
    """
    if dtype != jnp.float16:
        return x, None
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    by, back = float16_scale(largest, to)
    return x * by, back


def _scan_packed(
    step: Callable[[Any, Any], tuple[Any, Any]],
    start: Array,
    pool: Array | None,
    chunks: Any,
    packing: ChunkPacking,
) -> tuple[tuple[Array, Array | None], Any]:
    """Scans over chunks of packed sequences; the state restarts where a sequence begins."""

    def body(carry: tuple[Array, Array | None, Array], xs: Any) -> tuple[Any, Any]:
        state, pool, final = carry
        sequence, first, last, chunk = xs
        state = jnp.where(first, start[sequence][None], state)
        (state, pool), out = step((state, pool), chunk)
        target = jnp.where(last, sequence, start.shape[0])
        return (state, pool, final.at[target].set(state[0], mode="drop")), out

    xs = (packing.sequence, packing.first, packing.last, chunks)
    unroll = UNROLL if len(packing.sequence) > UNROLLED_CHUNKS else 1
    begin = (jnp.zeros_like(start[:1]), pool, start)
    (_, pool, final), out = lax.scan(body, begin, xs, unroll=unroll)
    return (final, pool), out


def l2norm(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns `x * rsqrt(sum(x^2) + 1e-6)`, in x's dtype; FLA and transformers use this epsilon."""
    wide = x.astype(jnp.float32)
    norm = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * norm).astype(x.dtype)
