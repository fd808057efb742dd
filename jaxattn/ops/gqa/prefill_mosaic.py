"""The kernel path of grouped-query prefill: rows' bounds, and prefixes in formats other than q's.

The kernel itself reads only pages of q's dtype. For other formats, XLA unpacks keys and values to
that dtype block by block. The kernel attends to each block, and the results are merged by
log-sum-exp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.core.cache.formats import KVFormat
from jaxattn.core.cache.paged_cache import page_blocks
from jaxattn.kernels.gqa.prefill.launch import PagedPrefix, gqa_prefill_mosaic, reads_pages
from jaxattn.ops.gqa.scores import AttentionScoring, window_begins

# Cached tokens per row that are unpacked at a time: as many as make UNPACKED_BYTES of keys and
# values over all rows, and at least PREFIX_BLOCK.
PREFIX_BLOCK = 1024
UNPACKED_BYTES = 2**28


def merged(
    out: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merges two results over disjoint keys in float32; 0 with -inf is one that saw no key."""
    both = jnp.logaddexp(lse, other_lse)
    shift = jnp.where(jnp.isneginf(both), 0, both)
    mine, others = (jnp.exp(x - shift)[..., None] for x in (lse, other_lse))
    return mine * out + others * other, both


@functools.partial(jax.jit, static_argnames=("scores", "interpret"))
def prefill_mosaic(
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
    kv_scale: jax.Array | None,
    segments: jax.Array | None = None,
    *,
    scores: AttentionScoring,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The kernel path of `jaxattn.gqa.gqa_prefill`, or of `gqa_attention` without a cache.

    With `segments`, a token sees only new tokens from segments[b, t] on.
    """
    query_lens = jnp.where(seq_lens > 0, jnp.clip(query_lens, 0, q.shape[1]), 0)
    first = jnp.maximum(query_lens - seq_lens, 0)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    zero = jnp.zeros_like(first)

    def attend(k: Any, v: Any, bounds: Any, paged: Any, sinks: Any, gate: Any) -> Any:
        return gqa_prefill_mosaic(
            q, k, v, jnp.stack(bounds, axis=1),
            scale=scores.scale, paged=paged, window=scores.window, sinks=sinks,
            soft_cap=scores.soft_cap, firsts=segments, gate=gate, interpret=interpret,
        )  # fmt: skip

    own = first, query_lens, zero, query_lens, zero
    if kv_cache is None:
        return attend(k, v, own, None, sinks, gate)
    assert block_tables is not None
    if reads_pages(q, kv_cache):
        cache = kv_cache if layer is not None else kv_cache[None]
        number = jnp.asarray(0 if layer is None else layer, jnp.int32)
        paged = PagedPrefix(cache=cache, table=block_tables, layer=number)
        bounds = first, query_lens, prefix, query_lens, zero
        return attend(k, v, bounds, paged, sinks, gate)

    unpack = KVFormat.of(kv_cache.dtype, kv_cache.shape[-1]).unpack
    token_bytes = q.shape[0] * 2 * k.shape[2] * k.shape[3] * q.dtype.itemsize
    begins = window_begins(scores, prefix, prefix)
    pages, firsts, read = page_blocks(
        kv_cache,
        block_tables,
        prefix,
        layer=layer,
        block=max(PREFIX_BLOCK, UNPACKED_BYTES // token_bytes),
        unpack=functools.partial(unpack, kv_scale=kv_scale),
        begins=begins,
    )

    def add_block(i: jax.Array, state: Any) -> Any:
        kv, positions = read(pages[i], firsts[i])
        keys, values = (kv[:, :, which].astype(q.dtype) for which in (0, 1))
        visible = jnp.clip(prefix - firsts[i], 0, positions.shape[0])
        bounds = zero, query_lens, zero, visible, prefix - firsts[i]
        out, lse = attend(keys, values, bounds, None, None, None)
        return merged(state[0], state[1], out, lse)

    def all_tokens() -> tuple[jax.Array, jax.Array]:
        # The sink counts once, so only the new tokens' part includes it.
        out, lse = attend(k, v, own, None, sinks, None)
        size = pages.shape[-1] * kv_cache.shape[-3]
        start = jnp.int32(0)
        if begins is not None:
            start = jnp.min(jnp.where(prefix > 0, begins, jnp.iinfo(jnp.int32).max)) // size
        reached = jnp.sum(firsts < prefix.max(), dtype=jnp.int32)
        state = out.astype(jnp.float32), lse
        out, lse = lax.fori_loop(start, reached, add_block, state)
        return out.astype(q.dtype), lse

    def new_tokens() -> tuple[jax.Array, jax.Array]:
        return attend(k, v, own, None, sinks, None)

    out, lse = lax.cond(jnp.any(prefix > 0), all_tokens, new_tokens)
    if gate is None:
        return out, lse
    # The gate is applied after both branches, so that a row's bits do not depend on which branch
    # other rows need.
    shut = jnp.isneginf(lse)[..., None]  # padding, whose gate may be NaN
    out = jnp.where(shut, 0, out * jax.nn.sigmoid(gate.astype(q.dtype).astype(jnp.float32)))
    return out.astype(q.dtype), lse
