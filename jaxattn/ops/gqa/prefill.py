"""Grouped-query attention of many new tokens per row. `jaxattn.gqa` is the public module.

The plain-JAX path processes `QUERY_BLOCK` queries at a time, first against their rows' cached
prefix and then against the new tokens, one block of keys at a time. Of the T x context scores, this
path therefore holds only two blocks. The kernel (gqa/prefill/launch.py) holds none. The gradient of
`gqa_attention` has a kernel too (backward.py). That of `gqa_prefill` uses the plain JAX path, which
recomputes everything from the inputs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.cache.formats import KVFormat
from jaxattn.core.cache.paged_cache import attend_pages
from jaxattn.core.dispatch import Implementation, dispatch_kernel, with_gradient_of
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.kernels.gqa.prefill.launch import refuse
from jaxattn.ops.attention.backward import (
    CausalOperands,
    CausalScoring,
    with_backward_kernel,
)
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.gqa.cache_write import check_cache, check_kv_scale
from jaxattn.ops.gqa.prefill_mosaic import prefill_mosaic
from jaxattn.ops.gqa.scores import (
    AttentionScoring,
    check_heads,
    check_sinks,
    finish,
    grouped,
    weigh,
    window_begins,
)

# Tokens per row processed at a time: new tokens (as queries and as keys), and cached tokens.
QUERY_BLOCK = 512
PREFIX_BLOCK = 1024


@jax.named_scope("gqa_attention")
def gqa_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T Hk D"],
    v: Float[Array, "B T Hk D"],
    *,
    scale: float | None = None,
    lengths: Int[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, "n_and_1"] | None = None,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    gate: Float[Array, "B T H D"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Computes causal attention of tokens to themselves, without a cache: for training.

    The op is differentiable. Where the kernel runs, only reverse mode works, and `jax.jvp` raises
    TypeError. The kernel's gradient is a kernel too: its bits are reproducible, it saves `out` and
    `lse`, and it keeps dq in float32.

    Args:
        q, k, v: Arrays of one floating dtype; products accumulate in float32.
        lengths: int32 number of valid tokens of each row, at most T. None means T; a traced length
            above T means 0. The rest is padding: whatever it holds, its output is 0, its lse is
            -inf, and it receives and causes no gradient.
        segment_ids: int32 id of each token's sequence. Ids must not decrease along a row, and a
            token sees only tokens of its own sequence. At the end of a row that begins with a
            higher id, tokens with an id of 0 or below are padding, as in MaxText's packed rows. A
            traced row that is not sorted has no valid tokens.
        cu_seqlens: int32 offsets of n sequences packed in one row (B = 1), starting at 0, instead
            of lengths and segment_ids. Tokens from the last offset on are padding.
        scale, window, sinks, soft_cap, gate: As for `gqa_decode`.
        implementation: As for `gqa_prefill`.

    Returns:
        `out` in q's dtype and `lse` float32, natural logarithm, the sink included.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    arguments = OpArguments("gqa_attention")
    q, k, v = _check_new(arguments, q, k, v)
    scores = AttentionScoring.checked(arguments, q.shape[-1], scale, window, soft_cap)
    sinks = check_sinks(arguments, sinks)
    if gate is not None:
        gate = arguments.check("gate", gate, "B T H D")
    bounds = SegmentBounds.checked(arguments, q, lengths, segment_ids, cu_seqlens)
    operands = CausalOperands(q, k, v, None, sinks, gate, bounds.lengths, bounds.first)

    def run(attend: Any, operands: CausalOperands) -> tuple[jax.Array, jax.Array]:
        q, k, v, _, sinks, gate, lengths, first = operands
        return attend(q, k, v, None, None, lengths, lengths, None, sinks, gate, None, first)

    xla = functools.partial(run, functools.partial(_attend, scores=scores))

    def mosaic(interpret: bool) -> tuple[jax.Array, jax.Array]:
        refuse(arguments.op, q, k, v, interpret=interpret)
        kernel = functools.partial(prefill_mosaic, scores=scores, interpret=interpret)
        forward = functools.partial(run, kernel)
        scoring = CausalScoring(
            scale=scores.scale,
            window=scores.window,
            soft_cap=scores.soft_cap,
            all_valid=bounds.all_valid,
        )
        attend = with_backward_kernel(arguments.op, forward, scoring, interpret=interpret)
        return attend(operands)

    return dispatch_kernel(arguments.op, implementation, mosaic, lambda: xla(operands))


@jax.named_scope("gqa_prefill")
def gqa_prefill(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T Hk D"],
    v: Float[Array, "B T Hk D"],
    kv_cache: Float[Array, "L N 2 C Hk D"] | Float[Array, "N 2 C Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    query_lens: Int[Array, "B"],
    *,
    scale: float | None = None,
    kv_scale: Array | float | None = None,
    layer: Array | int | LayerIndex | None = None,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    gate: Float[Array, "B T H D"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Computes the attention of new tokens to themselves and to their row's cached prefix.

    The op is differentiable. Where the kernel runs, only reverse mode works, and `jax.jvp` raises
    TypeError.

    The op reads the prefix, positions below seq_lens - query_lens, from the cache one block of
    pages at a time. The new tokens' keys and values come from `k` and `v`, so the cache need not
    hold them yet. Pass the cache that `gqa_cache_write` returned, so that XLA need not keep the
    cache from before the write.

    Args:
        q, k, v: Arrays of the new tokens, of one dtype; queries and keys are normed and rotated.
        kv_cache: A stack of layers (with `layer`) or one layer's pages; read in q's dtype.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1; entries
            past it, or left of its window, are not read.
        seq_lens: int32 number of tokens of each row, the new ones included, at most M * C. 0 means
            a padding row.
        query_lens: int32 number of new tokens of each row, at most T.
        scale, kv_scale, layer, window, sinks, soft_cap, gate: As for `gqa_decode`.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires D 64, 128 or 256, and q, k and v of one dtype, bfloat16 or float16.
            For a cache of that dtype in pages of 16, 32, 64 or 128 tokens it needs no memory
            besides its results. With fewer than 256 new tokens per row and several query heads per
            key-value head, it copies queries and output. Other caches are unpacked one block of
            tokens at a time: 256 MiB or 1024 tokens of each row, whichever is more. The kernel then
            also holds one result in float32. "xla" supports any shape, and holds at most B * H *
            512 * 1024 * 4 bytes of scores.

    Returns:
        `out` in q's dtype and `lse` float32, natural logarithm, the sink included. Tokens t >=
        query_lens, and those whose position would be negative, are padding: exactly 0 and -inf. The
        same holds for a traced row whose seq_lens is negative or beyond M * C, or whose query_lens
        is beyond T.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    arguments = OpArguments("gqa_prefill")
    q, k, v = _check_new(arguments, q, k, v)
    kv_cache, block_tables, seq_lens = check_cache(
        arguments, kv_cache, block_tables, seq_lens, layer
    )
    query_lens = arguments.check_query_lens(query_lens, "q", q)
    scores = AttentionScoring.checked(arguments, q.shape[-1], scale, window, soft_cap)
    kv_scale = check_kv_scale(arguments.op, kv_cache, kv_scale)
    sinks = check_sinks(arguments, sinks)
    if gate is not None:
        gate = arguments.check("gate", gate, "B T H D")
    refuse_explicit_axes(
        arguments.op, q, k, v, kv_cache, block_tables, seq_lens, query_lens, sinks, gate, kv_scale
    )

    addressing = block_tables, seq_lens, query_lens, split_layer_index(layer)[2]
    operands = q, k, v, kv_cache, *addressing, sinks, gate, kv_scale
    xla = functools.partial(_attend, scores=scores)

    def mosaic(interpret: bool) -> tuple[jax.Array, jax.Array]:
        refuse(arguments.op, q, k, v, interpret=interpret)
        forward = functools.partial(prefill_mosaic, scores=scores, interpret=interpret)
        because = (
            f"{arguments.op}: the backward kernel does not read a cache; train with gqa_attention"
        )
        return with_gradient_of(xla, forward, because=because)(*operands)

    return dispatch_kernel(arguments.op, implementation, mosaic, lambda: xla(*operands))


def _check_new(arguments: OpArguments, q: Any, k: Any, v: Any) -> tuple[jax.Array, ...]:
    q = arguments.check("q", q, "B T H D")
    k = arguments.check("k", k, "B T Hk D")
    v = arguments.check("v", v, "B T Hk D")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{arguments.op}: q, k and v must have the same dtype, got "
            + ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in (("q", q), ("k", k), ("v", v)))
        )
    check_heads(arguments, q, k.shape[-2], "k", k.shape)
    return q, k, v


@functools.partial(jax.jit, static_argnames="scores")
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array | None,
    block_tables: jax.Array | None,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    sinks: jax.Array | None,
    gate: jax.Array | None,
    kv_scale: jax.Array | None = None,
    segments: jax.Array | None = None,
    *,
    scores: AttentionScoring,
) -> tuple[jax.Array, jax.Array]:
    """Attends block by block of queries.

    Without a cache no row has a prefix. With `segments`, a token sees only new tokens from
    segments[b, t] on.
    """
    q, k, v, kv_cache, sinks, gate, kv_scale = match_varying_axes(
        (q, k, v, kv_cache, sinks, gate, kv_scale), block_tables, seq_lens, query_lens, layer
    )
    tokens = q.shape[1]
    query_lens = jnp.where(seq_lens > 0, query_lens, 0)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    token = jnp.arange(tokens)
    valid = (token < query_lens[:, None]) & (token >= (query_lens - seq_lens)[:, None])
    # Mask all three: a NaN times a zero gradient would be NaN in the other operand's gradient.
    q, k, v = (jnp.where(valid[..., None, None], x, 0) for x in (q, k, v))
    block = min(tokens, QUERY_BLOCK)
    blocks = -(-tokens // block)

    def padded(x: jax.Array) -> jax.Array:
        more = blocks * block - tokens
        return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))

    def cut(x: jax.Array | None) -> jax.Array | None:
        """Splits tokens into blocks, [blocks, B, block, ...]."""
        if x is None:
            return None
        x = padded(x)
        return x.reshape(x.shape[0], blocks, block, *x.shape[2:]).swapaxes(0, 1)

    keys = (cut(k), cut(v), cut(valid), jnp.arange(blocks) * block)

    @jax.checkpoint
    def attend(xs: Any) -> tuple[jax.Array, jax.Array]:
        queries, sees, gates, begins, first = xs
        rows = grouped(queries, k.shape[2])
        state = OnlineSoftmax.empty(
            rows.shape[:3], q.shape[-1], jnp.promote_types(q.dtype, jnp.float32)
        )
        state = match_varying_axes(state, q)
        own = jnp.repeat(first + jnp.arange(block), q.shape[2] // k.shape[2])
        if kv_cache is not None:
            assert block_tables is not None
            with jax.named_scope("cached_prefix"):
                state = _add_prefix(
                    state,
                    rows,
                    own,
                    first,
                    kv_cache,
                    block_tables,
                    prefix,
                    layer,
                    kv_scale,
                    scores,
                )
        with jax.named_scope("new_tokens"):
            if begins is not None:
                begins = jnp.repeat(begins, q.shape[2] // k.shape[2], axis=1)
            state = _add_new(state, rows, own, begins, first, keys, scores)
        out, lse = finish(state, sees, sinks, gates)
        return out.astype(q.dtype), lse

    out, lse = lax.map(attend, (cut(q), cut(valid), cut(gate), cut(segments), keys[3]))

    def joined(x: jax.Array) -> jax.Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], blocks * block, *x.shape[3:])[:, :tokens]

    return joined(out), joined(lse)


def _add_prefix(
    state: OnlineSoftmax,
    rows: Float[Array, "B Hk R D"],
    own: Int[Array, "R"],
    first: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    prefix: Int[Array, "B"],
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    scores: AttentionScoring,
) -> OnlineSoftmax:
    """Adds the cached prefix to the state of queries, which are the `own`-th new tokens."""
    position = prefix[:, None] + own
    format = KVFormat.of(kv_cache.dtype, kv_cache.shape[-1])

    def add_block(state: OnlineSoftmax, kv: jax.Array, positions: jax.Array) -> OnlineSoftmax:
        keys, values = kv[:, :, 0].astype(rows.dtype), kv[:, :, 1].astype(rows.dtype)
        visible = scores.visible(position[..., None], positions)
        visible &= positions < prefix[:, None, None]
        return state.add(scores.of(rows, keys), visible[:, None], weigh(values))

    return attend_pages(
        state,
        add_block,
        kv_cache,
        block_tables,
        prefix,
        layer=layer,
        block=PREFIX_BLOCK,
        unpack=functools.partial(format.unpack, kv_scale=kv_scale),
        begins=window_begins(scores, prefix + first, prefix),
    )


def _add_new(
    state: OnlineSoftmax,
    rows: Float[Array, "B Hk R D"],
    own: Int[Array, "R"],
    begins: Int[Array, "B R"] | None,
    first: jax.Array,
    keys: tuple[Any, ...],
    scores: AttentionScoring,
) -> OnlineSoftmax:
    """Adds the new tokens, one block at a time, and skips blocks that no query sees.

    Args:
        begins: The first new token that each query sees. None means that only the window limits it.
    """
    size = keys[0].shape[2]

    @jax.checkpoint
    def add(state: OnlineSoftmax, block: tuple[jax.Array, ...]) -> OnlineSoftmax:
        k, v, valid, start = block
        key = start + jnp.arange(size)
        visible: Bool[Array, "B R K"] = scores.visible(own[:, None], key)
        visible = visible & valid[:, None]
        if begins is not None:
            visible &= key >= begins[..., None]
        return state.add(scores.of(rows, k), visible[:, None], weigh(v))

    def step(state: OnlineSoftmax, block: tuple[jax.Array, ...]) -> tuple[OnlineSoftmax, None]:
        start = block[-1]
        seen = (start <= first) & (start + size > scores.first_visible(first))
        return lax.cond(seen, add, lambda state, _: state, state, block), None

    return lax.scan(step, state, keys)[0]
