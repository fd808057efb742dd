"""Grouped-query decode over a paged cache; layouts and the ops around it: `jaxattn.gqa`."""

import dataclasses
import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena
from jaxattn.core.cache.formats import KVFormat
from jaxattn.core.cache.paged_cache import attend_pages
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_arena
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.kernels.gqa.decode.arguments import GqaDecodeCall
from jaxattn.kernels.gqa.decode.launch import gqa_decode_mosaic
from jaxattn.kernels.gqa.decode.split_kv.decode_schedule import PairSchedule
from jaxattn.ops.gqa.cache_write import check_cache, check_kv_scale
from jaxattn.ops.gqa.scores import (
    AttentionScoring,
    check_heads,
    check_sinks,
    finish,
    grouped,
    weigh,
    window_begins,
)

# Cached tokens per row that the plain-JAX decode reads at a time.
DECODE_BLOCK = 512


@overload
def gqa_decode(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float | None = ...,
    kv_scale: Array | float | None = ...,
    query_lens: Array | None = ...,
    layer: Array | int | LayerIndex | None = ...,
    window: int | None = ...,
    sinks: Array | None = ...,
    soft_cap: float | None = ...,
    gate: Array | None = ...,
    schedule: PairSchedule | None = ...,
    arena: None = None,
    implementation: Implementation | None = ...,
) -> tuple[Array, Array]: ...


@overload
def gqa_decode(
    q: Array,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float | None = ...,
    kv_scale: Array | float | None = ...,
    query_lens: Array | None = ...,
    layer: Array | int | LayerIndex | None = ...,
    window: int | None = ...,
    sinks: Array | None = ...,
    soft_cap: float | None = ...,
    gate: Array | None = ...,
    schedule: PairSchedule | None = ...,
    arena: Arena | None,
    implementation: Implementation | None = ...,
) -> tuple[Any, ...]: ...


def gqa_decode(
    q: Float[Array, "B S H D"],
    kv_cache: Float[Array, "L N 2 C Hk D"] | Float[Array, "N 2 C Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    scale: float | None = None,
    kv_scale: Array | float | None = None,
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
    """Computes the attention of each row's last S tokens over its cached keys and values.

    Query head h reads key-value head h // (H // Hk). The S tokens must be in the cache already
    (`gqa_cache_write`). Token s sees the positions up to its own, seq_lens - S + s: a causal mask
    aligned to the bottom right. A row with fewer new tokens puts them first and gives their number
    in `query_lens`, which then replaces S.

    Padding: `out` is exactly 0 and `lse` is -inf, also with sinks, for a row with seq_lens 0, for a
    token s >= query_lens, and for a token whose position would be negative. Under `jax.jit`, where
    the op cannot check lengths, the same holds for a row whose seq_lens is negative or beyond M *
    C, or whose query_lens is beyond S.

    Uninitialized memory: entries of `block_tables` past a row's length, or left of its window, may
    hold anything, NaN included, and so may cache slots outside the tokens that a row sees. A NaN
    that a row does see stays in that row (in any of its S tokens) and is not hidden.

    Args:
        q: Queries, normed and rotated.
        kv_cache: Pages of keys and values: a stack of layers (with `layer`) or one layer's pages.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the S new ones included, at most M * C.
        scale: Factor of the scores. None means D**-0.5.
        kv_scale: Positive factors of the numbers of a float8_e4m3fn cache, a Python number, float32
            [2] (keys, values) or [2, Hk]. Required for that dtype only.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int, a traced scalar or a `LayerIndex`.
        window: Number of keys that a token sees, its own included, as Hugging Face counts them.
            None means all.
        sinks: float32 logit of each head, which takes part in the softmax once and has no value
            (gpt-oss). Neither `scale` nor `soft_cap` applies to it.
        soft_cap: The c of c * tanh(score / c), applied before the mask. None leaves the scores
            unchanged.
        gate: If given, the output is multiplied by sigmoid(gate), in float32. Kernels round the
            gate to q's dtype first.
        schedule: `decode_schedule` of these `seq_lens`, shapes and window. All layers of a step can
            share the schedule. Their calls must run one after another, because all of them use the
            schedule's counters, `arrived`. Without a schedule each call computes one in one or two
            dozen small kernels. If a row's length differs from the schedule's, its output and LSE
            are NaN. XLA only checks the argument.
        arena: The arena whose region "out" of `scratch` receives the kernel's output. `out` is then
            a view of it, valid until the next write to the arena. XLA returns the arena unchanged.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            "xla" is the reference: any shape, float32 throughout (float64 for float64),
            differentiable. The kernel requires D 64, 128 or 256, pages of 16, 32, 64 or 128 tokens,
            q of bfloat16 or float16, and a cache of q's dtype or FP8, whose numbers it widens in
            registers.

    Returns:
        (out [B, S, H, D] in q's dtype, lse float32 [B, S, H], natural logarithm, the sink
        included), and the arena if one was given.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    arguments = OpArguments("gqa_decode")
    q = arguments.check("q", q, "B S H D")
    as_given = arguments.integers("seq_lens", seq_lens, "B")[1]
    kv_cache, block_tables, seq_lens = check_cache(
        arguments, kv_cache, block_tables, seq_lens, layer
    )
    check_heads(arguments, q, kv_cache.shape[-2], "kv_cache", kv_cache.shape)
    scores = AttentionScoring.checked(arguments, q.shape[-1], scale, window, soft_cap)
    sinks = check_sinks(arguments, sinks)
    kv_scale = check_kv_scale(arguments.op, kv_cache, kv_scale)
    if query_lens is not None:
        query_lens = arguments.check_query_lens(query_lens, "q", q)
    if gate is not None:
        gate = arguments.check("gate", gate, "B S H D")
    call = GqaDecodeCall(
        q=q,
        kv_cache=kv_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        scale=scores.scale,
        kv_scale=kv_scale,
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
    check_arena("gqa_decode", arena)
    refuse_explicit_axes(
        "gqa_decode", q, kv_cache, block_tables, seq_lens, query_lens, sinks, gate, kv_scale
    )

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        # The kernel itself detects rows with more tokens than their table has places.
        return gqa_decode_mosaic(dataclasses.replace(call, seq_lens=as_given), interpret=interpret)

    def xla() -> tuple[Any, ...]:
        out, lse = _decode_xla(dataclasses.replace(call, schedule=None, arena=None))
        return (out, lse) if arena is None else (out, lse, arena)

    with jax.named_scope("gqa_decode"):
        return dispatch_kernel("gqa_decode", implementation, mosaic, xla)


@jax.jit
def _decode_xla(call: GqaDecodeCall) -> tuple[jax.Array, jax.Array]:
    seq_lens, block_tables, query_lens = call.seq_lens, call.block_tables, call.query_lens
    scores = AttentionScoring.of_call(call)
    q, kv_cache, sinks, gate, kv_scale = match_varying_axes(
        (call.q, call.kv_cache, call.sinks, call.gate, call.kv_scale),
        block_tables, seq_lens, query_lens, call.layer,
    )  # fmt: skip
    (_, q_len, heads, dim), kv_heads = q.shape, call.kv_heads
    format = KVFormat.of(kv_cache.dtype, dim)
    read = jnp.dtype(jnp.float32) if format.scaled else kv_cache.dtype
    wide = jnp.promote_types(jnp.promote_types(q.dtype, read), jnp.float32)
    token = jnp.arange(q_len)
    new = jnp.full_like(seq_lens, q_len) if query_lens is None else query_lens
    # A token without any key gets position -1. A padding row's length may be so negative that the
    # subtraction wraps around.
    position = (seq_lens - new)[:, None] + token
    real = (token < new[:, None]) & (seq_lens > 0)[:, None] & (position >= 0)
    position = jnp.where(real, position, -1)
    # The product of two narrow numbers is exact in float32, so keys need not be widened first.
    narrow = q.dtype if q.dtype == read else wide
    queries = grouped(jnp.where(real[..., None, None], q, 0).astype(narrow), kv_heads)
    row_position = jnp.repeat(position, heads // kv_heads, axis=1)[:, None, :, None]

    def add_block(state: OnlineSoftmax, kv: jax.Array, positions: jax.Array) -> OnlineSoftmax:
        keys, values = kv[:, :, 0].astype(narrow), kv[:, :, 1].astype(wide)
        return state.add(
            scores.of(queries, keys), scores.visible(row_position, positions), weigh(values)
        )

    lengths = jnp.where(jnp.any(real, axis=1), jnp.maximum(seq_lens, 0), 0)
    state = attend_pages(
        match_varying_axes(OnlineSoftmax.empty(queries.shape[:3], dim, wide), q),
        add_block,
        kv_cache,
        block_tables,
        lengths,
        layer=call.layer,
        block=DECODE_BLOCK,
        unpack=functools.partial(format.unpack, kv_scale=kv_scale),
        begins=window_begins(scores, seq_lens - new, lengths),
    )
    out, lse = finish(state, real, sinks, gate)
    return out.astype(q.dtype), lse
