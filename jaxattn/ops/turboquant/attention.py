"""Grouped-query attention over a TurboQuant cache: decode and continuation prefill.

New tokens are written first (cache_write.py) and read back like all others, so decode, chunked
prefill and prefill at once see the same numbers. Here and in decode, queries are rotated and cached
keys are not rotated back, because the two rotations of a product cancel. The kernels for longer
prompts rotate keys back (prefill_mosaic.py). Codes are dequantized one block of pages at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.arena import Arena
from jaxattn.core.cache.paged_cache import PageUnpacker, attend_pages
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.turboquant.codec import TurboFormat, dequantize, rotate
from jaxattn.core.turboquant.slot_layout import page_slots, unpack
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_arena
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import PairSchedule
from jaxattn.kernels.turboquant.arguments import TurboDecodeCall
from jaxattn.kernels.turboquant.launch import turbo_decode_mosaic
from jaxattn.ops.gqa.scores import (
    AttentionScoring,
    check_heads,
    check_sinks,
    finish,
    grouped,
    weigh,
    window_begins,
)
from jaxattn.ops.turboquant.cache_write import check_head_dim, check_turbo_cache
from jaxattn.ops.turboquant.prefill_mosaic import turbo_prefill_mosaic

# Query tokens and cached tokens per row that plain JAX processes at a time.
QUERY_BLOCK = 512
CACHED_BLOCK = 512
# Tokens per row that the decode kernel supports; the prefill kernel processes more, in blocks.
MOST_NEW = 8


@jax.named_scope("gqa_turbo_attention")
def turbo_attention(
    q: Float[Array, "B S H D"],
    kv_cache: UInt8[Array, "L N Hk bytes"] | UInt8[Array, "N Hk bytes"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    form: TurboFormat,
    scale: float | None = None,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | LayerIndex | None = None,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    gate: Float[Array, "B S H D"] | None = None,
    schedule: PairSchedule | None = None,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Computes the attention of each row's last S tokens, one or a chunk, over its cached tokens.

    The op is `gqa_decode` for TurboQuant caches, and also runs continuation prefill. The S tokens
    must be in the cache already (`turbo_cache_write`), and token s sees the positions up to its
    own. Padding and uninitialized memory are treated as in `gqa_decode`. XLA differentiates the op
    in q, sinks and gate. The kernel has no gradient, so pass implementation="xla" if you need one
    on a GPU.

    Args:
        q: Queries, normed and rotated by position, but not by the Hadamard matrix.
        kv_cache: Pages of codes: a stack of layers (with `layer`) or one layer's pages.
        form: Format of the cache.
        block_tables, seq_lens, scale, query_lens, layer, window, sinks, soft_cap, gate, schedule,
            arena: As for `gqa_decode`.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            "xla" is the reference, which holds a block of 512 cached tokens of every row in
            float32, and scores of 512 queries against them. The kernels require q of bfloat16 or
            float16, and decode requires pages of 16, 32, 64 or 128 tokens. For more than 8 tokens,
            the op unpacks one block of keys and values at a time into float16: 64 MiB or 1024
            tokens of each row, whichever is more. The kernel then also holds one result in float32.

    Returns:
        (out [B, S, H, D] in q's dtype, lse float32 [B, S, H], natural logarithm, the sink
        included), and the arena if one was given.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    arguments = OpArguments("turbo_attention")
    q = arguments.check("q", q, "B S H D")
    as_given = arguments.integers("seq_lens", seq_lens, "B")[1]
    kv_cache, block_tables, seq_lens = check_turbo_cache(
        arguments, kv_cache, block_tables, seq_lens, layer, form
    )
    check_head_dim(arguments, "q", q, form)
    check_heads(arguments, q, kv_cache.shape[-2], "kv_cache", kv_cache.shape)
    scores = AttentionScoring.checked(arguments, q.shape[-1], scale, window, soft_cap)
    sinks = check_sinks(arguments, sinks)
    if query_lens is not None:
        query_lens = arguments.check_query_lens(query_lens, "q", q)
    if gate is not None:
        gate = arguments.check("gate", gate, "B S H D")
    call = TurboDecodeCall(
        q=q,
        kv_cache=kv_cache,
        form=form,
        block_tables=block_tables,
        seq_lens=seq_lens,
        scale=scores.scale,
        layer=split_layer_index(layer)[2],
        query_lens=query_lens,
        window=scores.window,
        sinks=sinks,
        soft_cap=scores.soft_cap,
        gate=gate,
        schedule=schedule,
        arena=arena,
    )
    call.check_schedule()
    refuse_explicit_axes(arguments.op, q, kv_cache, block_tables, seq_lens, query_lens, sinks, gate)
    check_arena(arguments.op, arena)
    plain = dataclasses.replace(call, schedule=None, arena=None)

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        if q.shape[1] > MOST_NEW:
            out, lse = turbo_prefill_mosaic(plain, interpret=interpret)
            return (out, lse) if arena is None else (out, lse, arena)
        # The kernel itself detects rows with more tokens than their table has places.
        asked = dataclasses.replace(call, seq_lens=as_given)
        return turbo_decode_mosaic(asked, interpret=interpret)

    def xla() -> tuple[Any, ...]:
        out, lse = _attend(plain)
        return (out, lse) if arena is None else (out, lse, arena)

    return dispatch_kernel(arguments.op, implementation, mosaic, xla)


@jax.jit
def _attend(call: TurboDecodeCall) -> tuple[jax.Array, jax.Array]:
    """Attends block by block of query tokens."""
    seq_lens, block_tables, query_lens = call.seq_lens, call.block_tables, call.query_lens
    scores = AttentionScoring.of_call(call)
    q, kv_cache, sinks, gate = match_varying_axes(
        (call.q, call.kv_cache, call.sinks, call.gate),
        block_tables, seq_lens, query_lens, call.layer,
    )  # fmt: skip
    q_len = q.shape[1]
    new = jnp.full_like(seq_lens, q_len) if query_lens is None else query_lens
    token = jnp.arange(q_len)
    position = (seq_lens - new)[:, None] + token
    real = (token < new[:, None]) & (seq_lens > 0)[:, None] & (position >= 0)
    # A padding row's length may be so negative that the subtraction wraps around.
    position = jnp.where(real, position, -1)
    block = min(q_len, QUERY_BLOCK)
    more = -q_len % block

    def cut(x: jax.Array | None, fill: int = 0) -> jax.Array | None:
        """Splits tokens into blocks, [blocks, B, block, ...]."""
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
        return x.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def attend(xs: Any) -> tuple[jax.Array, jax.Array]:
        queries, positions, gates = xs
        state = _over_cache(
            queries, positions, kv_cache, block_tables, call.layer, scores=scores, form=call.form
        )
        out, lse = finish(state, positions >= 0, sinks, gates)
        return out.astype(q.dtype), lse

    out, lse = lax.map(attend, (cut(q), cut(position, -1), cut(gate)))

    def joined(x: jax.Array) -> jax.Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :q_len]

    return joined(out), joined(lse)


def _over_cache(
    q: Float[Array, "B Q H D"],
    position: Int[Array, "B Q"],
    kv_cache: jax.Array,
    block_tables: jax.Array,
    layer: jax.Array | int | None,
    *,
    scores: AttentionScoring,
    form: TurboFormat,
) -> OnlineSoftmax:
    """Returns the softmax state of tokens at these positions over their row's cache; -1 is none."""
    batch, _, heads, dim = q.shape
    kv_heads, page = kv_cache.shape[-2], form.page_size(kv_cache)
    real = position >= 0
    wide = jnp.where(real[..., None, None], q, 0).astype(jnp.float32)
    queries = grouped(rotate(wide) if form.rotated else wide, kv_heads)
    row_position = jnp.repeat(position, heads // kv_heads, axis=1)[:, None, :, None]

    def tokens(pages: jax.Array) -> jax.Array:
        """Converts pages [B, n, Hk, bytes] to keys and values [B, n C, 2, Hk, D]."""
        slots = page_slots(form, pages)  # [B, n, Hk, C, slot]
        both = jnp.stack(dequantize(form, unpack(form, slots)), axis=3)
        return both.transpose(0, 1, 4, 3, 2, 5).reshape(batch, -1, 2, kv_heads, dim)

    def add_block(state: OnlineSoftmax, kv: jax.Array, positions: jax.Array) -> OnlineSoftmax:
        visible = scores.visible(row_position, positions)
        return state.add(scores.of(queries, kv[:, :, 0]), visible, weigh(kv[:, :, 1]))

    lengths = jnp.max(position, axis=1) + 1
    first = jnp.min(jnp.where(real, position, lengths[:, None]), axis=1)
    return attend_pages(
        match_varying_axes(OnlineSoftmax.empty(queries.shape[:3], dim, jnp.dtype(jnp.float32)), q),
        add_block,
        kv_cache,
        block_tables,
        lengths,
        layer=layer,
        block=CACHED_BLOCK,
        begins=window_begins(scores, first, lengths),
        unfold=PageUnpacker(page, tokens),
    )
