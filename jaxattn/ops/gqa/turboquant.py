"""Grouped-query attention over a TurboQuant cache: its write, decode and continuation prefill.

    kv_cache uint8 [L, N, Hk, C * slot_bytes]    pages of codes; core/turbo_slots.py has their order

New tokens are written first and read back like all others. So decode, prefill in chunks of any
size, and prefill at once see the same numbers. Queries are rotated, never the cached keys: both
rotations of a product cancel. Codes become numbers a block of pages at a time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.arena import Arena
from jaxattn.core.checks import Arguments, check_arena
from jaxattn.core.dispatch import Implementation, dispatch_kernel, dispatch_xla
from jaxattn.core.layers import LayerOf, number_to_check, taken_apart
from jaxattn.core.pages import Unfold, attend_pages
from jaxattn.core.softmax import Softmax
from jaxattn.core.turbo_slots import GROUP, pack, page_slots, places, unpack
from jaxattn.core.turboquant import TurboFormat, dequantize, quantize, rotate
from jaxattn.core.varying import refuse_explicit_axes, vary_alike
from jaxattn.kernels.gqa_decode.schedule import PairSchedule
from jaxattn.kernels.gqa_turbo.decode import turbo_decode_mosaic
from jaxattn.ops.gqa.scores import (
    Scores,
    check_heads,
    check_sinks,
    finish,
    grouped,
    weigh,
    window_begins,
)
from jaxattn.ops.gqa.turbo_prefill import turbo_prefill_mosaic

# Query tokens, and cached tokens, that plain JAX takes at a time, of every row.
QUERY_BLOCK = 512
CACHED_BLOCK = 512
# Tokens of a row that the decode kernel takes; of more the kernel that reads prompts takes blocks.
MOST_NEW = 8


def check_turbo_cache(
    arguments: Arguments,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    layer: Array | int | LayerOf | None,
    form: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A cache and its addressing: tables and lengths are checked where they are known.

    A traced row of more tokens than its table has places comes back as one of 0, padding.
    """
    if not isinstance(form, TurboFormat):
        raise TypeError(f"{arguments.op}: form must be a TurboFormat, got {type(form).__name__}")
    arguments.check_layer(kv_cache, number_to_check(layer), "N Hk bytes")
    axes = "N Hk bytes" if layer is None else "L N Hk bytes"
    cache = arguments.check("kv_cache", kv_cache, axes, ("uint8",))
    num_pages, size = cache.shape[-3], cache.shape[-1]
    if size % (GROUP * form.slot_bytes):
        raise ValueError(
            f"{arguments.op}: kv_cache {cache.shape} must end in C * {form.slot_bytes} bytes, C a "
            f"multiple of {GROUP}, for {form.preset} at head_dim {form.head_dim}"
        )
    page = form.page_size(cache)
    return cache, *arguments.check_tables(block_tables, seq_lens, num_pages, page)


def check_head_dim(arguments: Arguments, name: str, x: jax.Array, form: TurboFormat) -> None:
    if x.shape[-1] != form.head_dim:
        raise ValueError(
            f"{arguments.op}: {name} {x.shape} has head_dim {x.shape[-1]}, and the cache's format "
            f"{form.head_dim}"
        )


@jax.named_scope("gqa_turbo_write")
def turbo_cache_write(
    kv_cache: UInt8[Array, "L N Hk bytes"] | UInt8[Array, "N Hk bytes"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    form: TurboFormat,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | LayerOf | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """The cache with the new tokens quantized and written; in place, where it is donated.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], or for a negative position. Bytes of other tokens stay
    as they are. No two rows may share a page that is written.

    Args:
        kv_cache: a stack with `layer`, or one layer's pages.
        k, v: of the new tokens, keys normed and rotated by position (RoPE).
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 tokens of each row, the new ones included, at most M * C.
        form: the cache's format.
        query_lens: int32 new tokens of each row, at most S; S, if None.
        layer: index into the stack, a Python int, a traced scalar or a `LayerOf`.
        implementation: "xla", or None for the best.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit, or a concrete length or
            page, or two tokens are written to one place; it is named.
    """
    arguments = Arguments("turbo_cache_write")
    k = arguments.check("k", k, "B S Hk D")
    v = arguments.check("v", v, "B S Hk D")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = check_turbo_cache(
        arguments, kv_cache, block_tables, seq_lens, layer, form
    )
    check_head_dim(arguments, "k", k, form)
    if query_lens is None:
        query_lens = jnp.full_like(seq_lens, k.shape[1])
    else:
        query_lens = arguments.check_query_lens(query_lens, "k", k)
    arguments.check_written(*given, k.shape[1], form.page_size(kv_cache))
    refuse_explicit_axes(arguments.op, kv_cache, k, v, block_tables, seq_lens, query_lens)
    number = taken_apart(layer)[2]

    def xla() -> jax.Array:
        return _write(kv_cache, k, v, block_tables, seq_lens, query_lens, number, form=form)

    return dispatch_xla(arguments.op, implementation, xla)


@functools.partial(jax.jit, static_argnames="form")
def _write(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    *,
    form: TurboFormat,
) -> jax.Array:
    (num_pages, kv_heads), page = kv_cache.shape[-3:-1], form.page_size(kv_cache)
    tokens = jnp.arange(k.shape[1])
    position = (seq_lens - query_lens)[:, None] + tokens
    column = position // page
    written = (seq_lens > 0)[:, None] & (tokens < query_lens[:, None]) & (position >= 0)
    written &= column < block_tables.shape[1]
    pages = jnp.take_along_axis(block_tables, jnp.where(written, column, 0), axis=1)
    # An index past the end is dropped; a negative one would count from the end.
    pages = jnp.where(written & (pages >= 0), pages, num_pages)
    inside = position % page
    bytes_at = jnp.asarray(places(form))[inside % GROUP]
    bytes_at += (inside // GROUP * (GROUP * form.slot_bytes))[..., None]
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    slots = pack(form, quantize(form, k, v))
    at = (*layers, pages[..., None, None], jnp.arange(kv_heads)[:, None], bytes_at[:, :, None])
    return kv_cache.at[at].set(slots, mode="drop", wrap_negative_indices=False)


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
    layer: Array | int | LayerOf | None = None,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    gate: Float[Array, "B S H D"] | None = None,
    schedule: PairSchedule | None = None,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Attention of each row's last S tokens, one or a whole chunk, to its cached ones.

    As `gqa_decode`, and as continuation prefill: the S tokens are in the cache already
    (`turbo_cache_write`), and token s sees the positions up to its own. Padding and uninitialised
    memory are as there. XLA differentiates it in q, sinks and gate. The kernel has no gradient, so
    a caller that needs one on a GPU passes implementation="xla".

    Args:
        q: queries, normed and rotated by position; not by the Hadamard matrix.
        kv_cache: pages of codes; a stack of layers with `layer`, or one layer's.
        form: the cache's format.
        block_tables, seq_lens, scale, query_lens, layer, window, sinks, soft_cap, gate, schedule,
            arena: as for `gqa_decode`.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret" or "xla". None is the best for up to 8
            tokens, and "xla" for more: no GPU has run their kernels yet. "xla" is the reference.
            It holds a block of 512 cached tokens of every row in float32, and
            scores of 512 queries against them. The kernels take q of bfloat16 or float16, and
            decode takes pages of 16, 32, 64 and 128 tokens. For more than 8 tokens, a block of
            keys and values is unpacked at a time into float16: 64 MiB or 1024 tokens of each row,
            whichever is more. One result in float32 is beside it.

    Returns:
        (out [B, S, H, D] in q's dtype, lse float32 [B, S, H], natural logarithm, the sink
        included), and the arena if one was given.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit, or a length or a page
            that is concrete; it is named.
        Refusal: the named implementation refuses, and says why.
    """
    arguments = Arguments("turbo_attention")
    q = arguments.check("q", q, "B S H D")
    # The decode kernel itself knows rows of more tokens than their table has places.
    as_given = arguments.integers("seq_lens", seq_lens, "B")[1]
    kv_cache, block_tables, seq_lens = check_turbo_cache(
        arguments, kv_cache, block_tables, seq_lens, layer, form
    )
    check_head_dim(arguments, "q", q, form)
    check_heads(arguments, q, kv_cache.shape[-2], "kv_cache", kv_cache.shape)
    scores = Scores.checked(arguments, q.shape[-1], scale, window, soft_cap)
    sinks = check_sinks(arguments, sinks)
    if query_lens is not None:
        query_lens = arguments.check_query_lens(query_lens, "q", q)
    if gate is not None:
        gate = arguments.check("gate", gate, "B S H D")
    if not isinstance(schedule, PairSchedule | None):
        raise TypeError(
            "turbo_attention: schedule must be what gqa.decode_schedule returns, got "
            f"{type(schedule).__name__}"
        )
    refuse_explicit_axes(arguments.op, q, kv_cache, block_tables, seq_lens, query_lens, sinks, gate)
    check_arena(arguments.op, arena)
    number = taken_apart(layer)[2]

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        if q.shape[1] > MOST_NEW:
            addressing = (block_tables, seq_lens, query_lens, number)
            out, lse = turbo_prefill_mosaic(
                q, kv_cache, *addressing, sinks, gate, scores=scores, form=form,
                interpret=interpret,
            )  # fmt: skip
            return (out, lse) if arena is None else (out, lse, arena)
        return turbo_decode_mosaic(
            q,
            kv_cache,
            block_tables,
            as_given,
            form=form,
            scale=scores.scale,
            layer=number,
            query_lens=query_lens,
            window=scores.window,
            sinks=sinks,
            soft_cap=scores.soft_cap,
            gate=gate,
            arena=arena,
            schedule=schedule,
            interpret=interpret,
        )

    def xla() -> tuple[Any, ...]:
        addressing = (block_tables, seq_lens, query_lens, number)
        out, lse = _attend(q, kv_cache, *addressing, sinks, gate, scores=scores, form=form)
        return (out, lse) if arena is None else (out, lse, arena)

    return dispatch_kernel(
        arguments.op, implementation or (None if q.shape[1] <= MOST_NEW else "xla"), mosaic, xla
    )


@functools.partial(jax.jit, static_argnames=("scores", "form"))
def _attend(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array | None,
    layer: jax.Array | int | None,
    sinks: jax.Array | None,
    gate: jax.Array | None,
    *,
    scores: Scores,
    form: TurboFormat,
) -> tuple[jax.Array, jax.Array]:
    """Query tokens in blocks, one after another."""
    q, kv_cache, sinks, gate = vary_alike(
        (q, kv_cache, sinks, gate), block_tables, seq_lens, query_lens, layer
    )
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
        """[blocks, B, block, ...]"""
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
        return x.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def attend(xs: Any) -> tuple[jax.Array, jax.Array]:
        queries, positions, gates = xs
        state = _over_cache(
            queries, positions, kv_cache, block_tables, layer, scores=scores, form=form
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
    scores: Scores,
    form: TurboFormat,
) -> Softmax:
    """The softmax of tokens at these positions over their row's cache; at -1 there is none."""
    batch, _, heads, dim = q.shape
    kv_heads, page = kv_cache.shape[-2], form.page_size(kv_cache)
    real = position >= 0
    wide = jnp.where(real[..., None, None], q, 0).astype(jnp.float32)
    queries = grouped(rotate(wide) if form.rotated else wide, kv_heads)
    row_position = jnp.repeat(position, heads // kv_heads, axis=1)[:, None, :, None]

    def tokens(pages: jax.Array) -> jax.Array:
        """[B, n, Hk, bytes] as keys and values [B, n C, 2, Hk, D]."""
        slots = page_slots(form, pages)  # [B, n, Hk, C, slot]
        both = jnp.stack(dequantize(form, unpack(form, slots)), axis=3)
        return both.transpose(0, 1, 4, 3, 2, 5).reshape(batch, -1, 2, kv_heads, dim)

    def add_block(state: Softmax, kv: jax.Array, positions: jax.Array) -> Softmax:
        visible = scores.visible(row_position, positions)
        return state.add(scores.of(queries, kv[:, :, 0]), visible, weigh(kv[:, :, 1]))

    lengths = jnp.max(position, axis=1) + 1
    first = jnp.min(jnp.where(real, position, lengths[:, None]), axis=1)
    return attend_pages(
        vary_alike(Softmax.empty(queries.shape[:3], dim, jnp.dtype(jnp.float32)), q),
        add_block,
        kv_cache,
        block_tables,
        lengths,
        layer=layer,
        block=CACHED_BLOCK,
        begins=window_begins(scores, first, lengths),
        unfold=Unfold(page, tokens),
    )
