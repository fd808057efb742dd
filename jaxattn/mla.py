"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache.

What is cached per token is one latent [D = R + P]: R dims that hold keys and values of all heads,
and P rotated dims that all heads share. Decode attends in the latent (weights absorbed), prefill
expands it. One layer of a model, after its projections, norms and rope:

    latent  [B, S, D]     concatenate([norm(c_kv), rope(k_pe)], -1)
    kv_cache = mla_cache_write(kv_cache, latent, block_tables, seq_lens, layer=layer)
    q       [B, S, H, D]  concatenate([absorb_query(q_nope, w_uk), rope(q_pe)], -1)
    out, lse = mla_decode(q, kv_cache, block_tables, seq_lens, scale=scale, layer=layer)
    values  [B, S, H, Dv] absorb_output(out, w_uv)

Row b's token at position t lies in page block_tables[b, t // C], slot t % C. A cache is one layer's
pages [N, C, D] or a stack [L, N, C, D] with `layer`, out of which nothing is ever sliced.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.dispatch import Implementation, dispatch
from jaxattn.kernels.mla_decode import decode_schedule as decode_schedule
from jaxattn.kernels.mla_decode import mla_decode_mosaic, reads_apart
from jaxattn.kernels.mla_decode import scratch as scratch
from jaxattn.kernels.mla_schedule import Schedule as Schedule
from jaxattn.paged import INT32, Arguments, Softmax, attend_pages, dot
from jaxattn.prefill import causal_attention as causal_attention
from jaxattn.prefill import merge_attention_states as merge_attention_states
from jaxattn.prefill import mla_prefill as mla_prefill

if TYPE_CHECKING:
    from jaxattn.arena import Arena

# Cached tokens that the plain-JAX decode holds at a time, of every row.
DECODE_BLOCK = 512


@overload
def mla_decode(
    q: Array | tuple[Array, Array],
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
    layer: Array | int | None = ...,
    kv_lora_rank: int = ...,
    schedule: Schedule | None = ...,
    arena: None = None,
    implementation: Implementation | None = ...,
) -> tuple[Array, Array]: ...


@overload
def mla_decode(
    q: Array | tuple[Array, Array],
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
    layer: Array | int | None = ...,
    kv_lora_rank: int = ...,
    schedule: Schedule | None = ...,
    arena: "Arena",
    implementation: Implementation | None = ...,
) -> "tuple[Array, Array, Arena]": ...


def mla_decode(
    q: Float[Array, "B S H D"] | tuple[Float[Array, "B S H R"], Float[Array, "B S H P"]],
    kv_cache: Float[Array, "L N C D"] | Float[Array, "N C D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    scale: float,
    layer: Array | int | None = None,
    kv_lora_rank: int = 512,
    schedule: Schedule | None = None,
    arena: "Arena | None" = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Attention of each row's last S tokens to its cached latents, in the latent's R dims.

    The S tokens are in the cache already (`mla_cache_write`). Token s sees the positions up to
    its own, seq_lens - S + s: causal from the bottom right.

    Padding and uninitialised memory: a row with seq_lens 0, and a token whose position would be
    negative, give exactly 0 and lse -inf. Entries of `block_tables` past a row's length may hold
    anything and so may the cache outside of the tokens that a row owns, NaN included. A NaN that a
    row does own stays in that row (in any of its S tokens) and is not hidden.

    Args:
        q: absorbed queries: `absorb_query` of the nope dims (R), then the rotated dims (P). Or the
            two as a pair, which need not be joined first where H is a multiple of 64.
        kv_cache: latents [R + P] by page; a stack of layers with `layer`, or one layer's.
        block_tables: int32 page ids. Those within a row's length must be below N.
        seq_lens: int32 tokens of each row, the S new ones included, at most M * C.
        scale: factor of the scores, of the unabsorbed dims: DeepSeek-V3's is
            192**-0.5 * mscale**2 (`jaxattn.rope.softmax_scale`), never D**-0.5.
        layer: index into the stack, a Python int or a traced scalar.
        kv_lora_rank: R; the latent's first R dims are the values.
        schedule: `decode_schedule` of these `seq_lens` and shapes. The layers of a step share it;
            without it each call works it out, in a dozen small kernels.
        arena: where the output goes, region "out" of `scratch`; the returned `out` is a view of
            it, good until the arena is written again.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best. "xla" is
            the reference: any shape, float32 throughout (float64 for float64), differentiable.

    Returns:
        (out [B, S, H, R] in q's dtype, lse float32 [B, S, H], natural logarithm), and the
        arena if one was given.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit; it is named.
        NotImplementedError: the named implementation refuses, and says why.
    """
    arguments = Arguments("mla_decode")
    parts = q if isinstance(q, tuple) else None
    q = _check_queries(arguments, q)
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    scale = arguments.check_scale(scale)
    if not 1 <= kv_lora_rank <= q.shape[-1]:
        raise ValueError(
            f"mla_decode: kv_lora_rank must be from 1 to D = {q.shape[-1]} (q {q.shape}), got "
            f"{kv_lora_rank}"
        )

    if schedule is not None and schedule.slots.shape[1] != q.shape[0]:
        raise ValueError(
            f"mla_decode: the schedule is of {schedule.slots.shape[1]} rows, q {q.shape} has "
            f"{q.shape[0]}; make it with decode_schedule from these seq_lens"
        )

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        # Apart only where the kernel was named: reading them so has not run on a GPU yet.
        apart = implementation is not None and reads_apart(q.shape[2])
        return mla_decode_mosaic(
            parts if parts is not None and apart else q,
            kv_cache,
            block_tables,
            seq_lens,
            layer=layer,
            scale=scale,
            kv_lora_rank=kv_lora_rank,
            schedule=schedule,
            arena=arena,
            interpret=interpret,
        )

    def xla() -> tuple[Any, ...]:
        out, lse = _decode_xla(
            q, kv_cache, block_tables, seq_lens, layer, scale=scale, kv_lora_rank=kv_lora_rank
        )
        return (out, lse) if arena is None else (*_into_arena(out, lse, arena),)

    with jax.named_scope("mla_decode"):
        return dispatch(
            "mla_decode",
            implementation,
            {
                "mosaic_gpu": lambda: mosaic(interpret=False),
                "mosaic_gpu_interpret": lambda: mosaic(interpret=True),
                "xla": xla,
            },
        )


def _check_queries(arguments: Arguments, q: Any) -> jax.Array:
    """The queries in one array [B, S, H, D]; what nobody reads is never computed."""
    if not isinstance(q, tuple):
        return arguments.check("q", q, "B S H D")
    if len(q) != 2:
        raise ValueError(f"{arguments.op}: q must be an array or a pair, got {len(q)} arrays")
    latent = arguments.check("q[0]", q[0], "B S H R")
    rotated = arguments.check("q[1]", q[1], "B S H P", (str(latent.dtype),))
    return arguments.check("q", jnp.concatenate([latent, rotated], axis=-1), "B S H D")


@functools.partial(jax.jit, static_argnames=("scale", "kv_lora_rank"))
def _decode_xla(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    layer: jax.Array | int | None,
    *,
    scale: float,
    kv_lora_rank: int,
) -> tuple[jax.Array, jax.Array]:
    batch, q_len, heads, dim = q.shape
    wide = jnp.promote_types(jnp.promote_types(q.dtype, kv_cache.dtype), jnp.float32)
    # Rows s * H + h. Keys that a token sees, its own included; 0 or fewer for a token without any.
    limit = seq_lens[:, None] - q_len + 1 + jnp.arange(q_len)
    limit = jnp.repeat(limit, heads, axis=1)
    queries = q.reshape(batch, q_len * heads, dim).astype(wide)
    queries = jnp.where((limit > 0)[..., None], queries, 0)

    def add_block(state: Softmax, kv: jax.Array, positions: jax.Array) -> Softmax:
        kv = kv.astype(wide)
        scores = dot("bqd,bkd->bqk", queries, kv) * scale
        values = kv[..., :kv_lora_rank]
        return state.add(
            scores, positions < limit[..., None], lambda p: dot("bqk,bkr->bqr", p, values)
        )

    state = Softmax.empty((batch, q_len * heads), kv_lora_rank, wide)
    out, lse = attend_pages(
        state, add_block, kv_cache, block_tables, seq_lens, layer=layer, block=DECODE_BLOCK
    ).finish(limit > 0)
    out = out.reshape(batch, q_len, heads, kv_lora_rank).astype(q.dtype)
    return out, lse.reshape(batch, q_len, heads)


def _into_arena(
    out: jax.Array, lse: jax.Array, arena: "Arena"
) -> "tuple[jax.Array, jax.Array, Arena]":
    """Writes the output where the kernel would, and returns the view of it."""
    batch, q_len, heads, rank = out.shape
    spec = scratch(  # the output alone: nothing is split here
        batch=batch,
        q_len=q_len,
        num_heads=heads,
        max_pages=1,
        kv_lora_rank=rank,
        dtype=out.dtype,
    )
    rows = q_len * heads
    packed = out.reshape(batch, rows, rank)
    packed = jnp.pad(packed, ((0, 0), (0, spec.region("out").shape[1] - rows), (0, 0)))
    arena = arena.write(spec, "out", packed)
    view = arena.read(spec, "out")[:, :rows]
    return view.reshape(batch, q_len, heads, rank), lse, arena


@jax.named_scope("mla_cache_write")
def mla_cache_write(
    kv_cache: Float[Array, "L N C D"] | Float[Array, "N C D"],
    latent: Float[Array, "B S D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
) -> Array:
    """The cache with the new tokens' latents written; in place, where the cache is donated.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], for a negative position, or where the table does
    not name a page from 0 to N - 1. No two rows may share a page that is written.

    Args:
        kv_cache: a stack with `layer`, or one layer's pages.
        latent: of the new tokens, cast to the cache's dtype.
        block_tables: int32 page ids.
        seq_lens: int32 tokens of each row, the new ones included.
        query_lens: int32 new tokens of each row; S, if None.
        layer: index into the stack, a Python int or a traced scalar.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit; it is named.
    """
    arguments = Arguments("mla_cache_write")
    latent = arguments.check("latent", latent, "B S D")
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    if query_lens is None:
        query_lens = jnp.full(seq_lens.shape, latent.shape[1], jnp.int32)
    new_lens = arguments.check("query_lens", query_lens, "B", INT32)
    return _write(kv_cache, latent, block_tables, seq_lens, new_lens, layer)


@jax.jit
def _write(
    kv_cache: jax.Array,
    latent: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
) -> jax.Array:
    num_pages, page = kv_cache.shape[-3:-1]
    tokens = jnp.arange(latent.shape[1])
    position = (seq_lens - query_lens)[:, None] + tokens
    column = position // page
    written = (seq_lens > 0)[:, None] & (tokens < query_lens[:, None]) & (position >= 0)
    written &= column < block_tables.shape[1]
    pages = jnp.take_along_axis(block_tables, jnp.where(written, column, 0), axis=1)
    # An index past the end is dropped; a negative one would count from the end.
    pages = jnp.where(written & (pages >= 0), pages, num_pages)
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    return kv_cache.at[(*layers, pages, position % page)].set(
        latent.astype(kv_cache.dtype), mode="drop", wrap_negative_indices=False
    )


@jax.named_scope("absorb_query")
def absorb_query(
    q_nope: Float[Array, "B S H nope"], w_uk: Float[Array, "H nope R"]
) -> Float[Array, "B S H R"]:
    """Queries of the latent: q_nope . (w_uk c) = (q_nope w_uk) . c. Returns q_nope's dtype."""
    arguments = Arguments("absorb_query")
    q_nope = arguments.check("q_nope", q_nope, "B S H nope")
    w_uk = arguments.check("w_uk", w_uk, "H nope R")

    def by_head(q_nope: jax.Array, w_uk: jax.Array) -> jax.Array:
        # [H, B, S, R], as the product comes: an einsum would have XLA make [H, R, B] and turn it.
        axes = (((3,), (1,)), ((2,), (0,)))
        out = lax.dot_general(q_nope, w_uk, axes, preferred_element_type=q_nope.dtype)
        return out.transpose(1, 2, 0, 3)

    return _per_head("bshn,hnr->bshr", q_nope, w_uk, by_head)


@jax.named_scope("absorb_output")
def absorb_output(
    out: Float[Array, "B S H R"], w_uv: Float[Array, "H R Dv"]
) -> Float[Array, "B S H Dv"]:
    """Each head's values from the latent that `mla_decode` returns, in its dtype."""
    arguments = Arguments("absorb_output")
    out = arguments.check("out", out, "B S H R")
    w_uv = arguments.check("w_uv", w_uv, "H R Dv")
    spec = "bshr,hrv->bshv"
    by_head = functools.partial(jnp.einsum, spec, preferred_element_type=out.dtype)
    return _per_head(spec, out, w_uv, by_head)


def _per_head(
    spec: str, x: jax.Array, weight: jax.Array, by_head: Callable[..., jax.Array]
) -> jax.Array:
    """A product for each head, summed in float32 and rounded by the product itself to x's dtype.

    Rounded after it, the product costs XLA on a GPU a pass of its own over twice the bytes.
    """

    def rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(spec, x, weight).astype(x.dtype)

    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return rounded(x, weight)
    return lax.platform_dependent(x, weight, cpu=rounded, default=by_head)
