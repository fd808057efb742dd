"""The kernel path of attention of many tokens of a row over a TurboQuant cache.

The op converts a block of cached tokens to float16 keys and values, with the keys rotated back. The
prefill kernel attends to the block, and the results of all blocks are merged by log-sum-exp. The
size of a block is bounded, so the memory does not grow with the context.

Norms, scales and minima are float16 in the cache too, and bfloat16 would be an eighth as exact. A
rotated key has few levels, which float16 would round alike in many dims: such errors add up in a
score, whereas those of the key itself do not. The mean of a row's keys is subtracted before
rounding. All scores of a query then lack one number, which is added back to log-sum-exps and before
soft caps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.core.cache.paged_cache import PageUnpacker, page_blocks
from jaxattn.core.dispatch import without_gradient
from jaxattn.core.turboquant.code_gather import page_codes
from jaxattn.core.turboquant.codec import LARGEST_F16, TurboFormat, dequantize, hadamard, plain_keys
from jaxattn.kernels.gqa.prefill.launch import gqa_prefill_mosaic, refuse
from jaxattn.kernels.turboquant.arguments import TurboDecodeCall
from jaxattn.kernels.turboquant.cache.dequantization import takes, turbo_unpack_mosaic
from jaxattn.kernels.turboquant.cache.key_mean import turbo_common_mosaic
from jaxattn.ops.gqa.prefill_mosaic import merged
from jaxattn.ops.gqa.scores import AttentionScoring, window_begins
from jaxattn.ops.turboquant.key_mean import MOST, SAMPLES, common_key

# Cached tokens per row that are unpacked at a time: as many as make UNPACKED_BYTES of keys and
# values over all rows, and at least LEAST_BLOCK.
LEAST_BLOCK = 1024
UNPACKED_BYTES = 2**26
HALF = jnp.dtype(jnp.float16)


@functools.partial(jax.jit, static_argnames="interpret")
def turbo_prefill_mosaic(call: TurboDecodeCall, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The path of `jaxattn.gqa.turbo_attention` for more tokens than its decode kernel supports."""
    op, form, layer, kv_cache = call.op, call.form, call.layer, call.kv_cache
    block_tables, seq_lens, query_lens = call.block_tables, call.seq_lens, call.query_lens
    scores = AttentionScoring.of_call(call)
    refuse(op, call.q, call.q, call.q, interpret=interpret)
    q, sinks, gate = without_gradient(op, (call.q, call.sinks, call.gate), "q sinks gate")
    if query_lens is None:
        query_lens = jnp.full_like(seq_lens, q.shape[1])
    batch, kv_heads = q.shape[0], kv_cache.shape[-2]
    query_lens = jnp.where(seq_lens > 0, jnp.clip(query_lens, 0, q.shape[1]), 0)
    lengths = jnp.where(query_lens > 0, seq_lens, 0)
    zero = jnp.zeros_like(lengths)
    begins = window_begins(scores, jnp.maximum(lengths - query_lens, 0), lengths)

    stack, at = (kv_cache[None], 0) if layer is None else (kv_cache, layer)
    at = jnp.asarray(at, jnp.int32).reshape(1)
    queries, common, lacks = _saturate_to_f16(q), None, None
    if form.rotated:  # keys of other formats are exact in float16
        common = _common(form, stack, block_tables, lengths, begins, at, interpret=interpret)
        each = jnp.repeat(common, q.shape[2] // kv_heads, axis=1)[:, None]  # [B, 1, H, D]
        lacks = jnp.sum(queries.astype(jnp.float32) * each, axis=-1) * scores.scale

    def tokens(pages: jax.Array) -> jax.Array:
        """Converts pages [B, n, Hk, bytes] to keys and values [B, n C, 2, Hk, D]."""
        codes = page_codes(form, pages)
        keys, values = plain_keys(form, codes, _apply_butterflies), dequantize(form, codes)[1]
        if common is not None:
            keys -= common[:, None, :, None]
        halves = [_saturate_to_f16(x) for x in (keys, values)]
        both = jnp.stack(halves, axis=3)  # [B, n, Hk, 2, C, D]
        return both.transpose(0, 1, 4, 3, 2, 5).reshape(batch, -1, 2, kv_heads, form.head_dim)

    page = form.page_size(kv_cache)
    of_token = batch * 2 * kv_heads * form.head_dim * HALF.itemsize
    pages, firsts, read = page_blocks(
        kv_cache, block_tables, lengths, layer=layer,
        block=max(LEAST_BLOCK, UNPACKED_BYTES // of_token), begins=begins,
        unfold=PageUnpacker(page, tokens),
    )  # fmt: skip
    size = pages.shape[-1] * page
    shift = None if scores.soft_cap is None else lacks

    def unpacked(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a block's keys and values."""
        if not takes(page):
            kv = read(pages[i], firsts[i])[0]
            return kv[:, :, 0], kv[:, :, 1]
        held = jnp.stack([zero if begins is None else begins, lengths]) - firsts[i]
        return turbo_unpack_mosaic(
            stack, pages[i], held, at, common, form=form, interpret=interpret
        )

    def add_block(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        there = jnp.clip(lengths - firsts[i], 0, size)
        bounds = zero, query_lens, zero, there, lengths - query_lens - firsts[i]
        found = gqa_prefill_mosaic(
            queries, *unpacked(i), jnp.stack(bounds, axis=1), scale=scores.scale,
            window=scores.window, soft_cap=scores.soft_cap, shift=shift, interpret=interpret,
        )  # fmt: skip
        return merged(*state, *found)

    start = jnp.int32(0)
    if begins is not None:
        start = jnp.min(jnp.where(lengths > 0, begins, jnp.iinfo(jnp.int32).max)) // size
    reached = jnp.sum(firsts < lengths.max(), dtype=jnp.int32)
    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    out, lse = lax.fori_loop(start, reached, add_block, nothing)
    if lacks is not None and shift is None:
        lse = jnp.where(jnp.isneginf(lse), lse, lse + lacks)  # padding may be NaN
    return _finished(out, lse, sinks, gate, q.dtype)


def _common(
    form: TurboFormat, stack: jax.Array, block_tables: jax.Array, lengths: jax.Array,
    begins: jax.Array | None, layer: jax.Array, *, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Returns the mean keys, float32 [B, Hk, D], by a kernel if it supports the page size."""
    page = form.page_size(stack)
    if not takes(page):
        return common_key(form, stack, block_tables, lengths, begins, layer)
    first = jnp.zeros_like(lengths) if begins is None else begins
    held = jnp.stack([first, jnp.minimum(lengths, block_tables.shape[1] * page)])
    return turbo_common_mosaic(
        stack, block_tables, held, layer, form=form, samples=SAMPLES, max_abs=MOST,
        interpret=interpret,
    )  # fmt: skip


def _apply_butterflies(x: jax.Array) -> jax.Array:
    """Computes the `butterfly` of levels exact in bfloat16 as one product, exact in float32."""
    signs = jnp.asarray(np.sign(hadamard(x.shape[-1])), jnp.bfloat16)
    return jnp.dot(x.astype(jnp.bfloat16), signs, preferred_element_type=jnp.float32)


def _saturate_to_f16(x: jax.Array) -> jax.Array:
    """Casts to float16; finite numbers beyond its range saturate."""
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -LARGEST_F16, LARGEST_F16)).astype(HALF)


def _finished(
    out: jax.Array, lse: jax.Array, sinks: jax.Array | None, gate: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Applies sinks and gates to the output, except to padding."""
    padding = jnp.isneginf(lse)
    if sinks is not None:
        joined = jnp.logaddexp(lse, sinks)
        out = jnp.where(padding[..., None], 0, out * jnp.exp(lse - joined)[..., None])
        lse = jnp.where(padding, lse, joined)
    if gate is not None:
        share = jax.nn.sigmoid(gate.astype(dtype).astype(jnp.float32))
        out = jnp.where(padding[..., None], 0, out * share)
    return out.astype(dtype), lse
