"""MLA prefill, for many new tokens per row. `jaxattn.mla` is the public module.

Prefill does not absorb, but expands each head's keys and values from the latent, which for many
tokens at once costs less than attending in the latent's R dims.

The gradient of `causal_attention` has a kernel (`jaxattn.ops.attention.backward`). The gradient of
`mla_prefill` uses the plain JAX path, which recomputes everything from the inputs: the forward pass
saves nothing of the attention. The backward pass holds the scores of an eighth of the queries at a
time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from jaxattn.core.cache.formats import LatentFormat
from jaxattn.core.cache.paged_cache import attend_pages, packed_pages
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation, dispatch_kernel, with_gradient_of
from jaxattn.core.numerics.matmul import dot
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import is_integer
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.ops.attention.backward import (
    CausalOperands,
    CausalScoring,
    with_backward_kernel,
)
from jaxattn.ops.attention.segments import SegmentBounds
from jaxattn.ops.mla.cache_write import check_format
from jaxattn.ops.mla.prefill_mosaic import (
    PREFIX_BLOCK,
    attend,
    prefill_lines_mosaic,
    prefill_mosaic,
    refuse,
    refuse_lines,
)
from jaxattn.ops.mla.state_merge import merge_attention_states


@functools.partial(jax.jit, static_argnames="scale")
def _causal(
    q: jax.Array,
    k: jax.Array,
    k_pe: jax.Array | None,
    v: jax.Array,
    valid: Bool[Array, "B T"],
    owner: Int[Array, "T"] | None = None,
    begins: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Computes causal attention among valid tokens: (out [B, T, H, V], lse [B, T, H]), not rounded.

    With `owner`, a token sees only tokens of the same owner; with `begins`, those from begins[b, t]
    on.
    """
    if k_pe is not None:
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k.shape[:3], k_pe.shape[-1]))
        k = jnp.concatenate([k, k_pe], axis=-1)
    batch, tokens, heads, _ = q.shape
    # Zero all three: a NaN times a zero gradient would be NaN in the other operand's gradient.
    q, k, v = (jnp.where(valid[..., None, None], x, 0) for x in (q, k, v))
    # At most 8 blocks of queries, each against the keys up to its own end. This computes about half
    # of the scores and holds an eighth of them at a time.
    block = max(512, -(-tokens // 8))

    @functools.partial(jax.checkpoint, static_argnums=3)
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, first: int) -> tuple[jax.Array, jax.Array]:
        stop = min(first + block, tokens)
        keys, values = k[:, :stop], v[:, :stop]
        scores = dot("bqhd,bkhd->bhqk", q[:, first:stop], keys) * scale
        causal = jnp.arange(stop) <= jnp.arange(first, stop)[:, None]
        if owner is not None:
            causal &= owner[:stop] == owner[first:stop, None]
        if begins is not None:
            causal = causal & (jnp.arange(stop) >= begins[:, None, first:stop, None])
        state = OnlineSoftmax.empty((batch, heads, stop - first), v.shape[-1], scores.dtype)
        return state.add(
            scores,
            causal & valid[:, None, None, :stop],
            lambda p: dot("bhqk,bkhv->bhqv", p.astype(v.dtype), values),
        ).finish(valid[:, None, first:stop])

    parts = [attend(q, k, v, first) for first in range(0, tokens, block)]
    out = jnp.concatenate([out for out, _ in parts], axis=2)
    lse = jnp.concatenate([lse for _, lse in parts], axis=2)
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


@jax.named_scope("causal_attention")
def causal_attention(
    q: Float[Array, "B T H Dqk"],
    k: Float[Array, "B T H Dqk"],
    v: Float[Array, "B T H Dv"],
    *,
    scale: float,
    lengths: Int[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, "n_and_1"] | None = None,
    k_pe: Float[Array, "B T P"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Computes causal attention of tokens to themselves; the values may have any width.

    The op is differentiable. Where the kernel runs, only reverse mode works, and `jax.jvp` raises
    TypeError. The kernel's gradient is a kernel too: its bits are reproducible, it saves `out` and
    `lse`, and it keeps dq in float32.

    Args:
        q, k, v: Arrays of one floating dtype; products accumulate in float32.
        scale: Factor of the scores, a Python number.
        lengths: int32 number of valid tokens of each row, at most T. None means T; a traced length
            above T means 0. The rest is padding: whatever it holds, its output is 0, its lse is
            -inf, and it receives and causes no gradient.
        segment_ids, cu_seqlens: Sequences packed in a row, as for `jaxattn.gqa.gqa_attention`.
        k_pe: The last P of the keys' Dqk dims if all heads share them; k then has Dqk - P dims.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernels support Dqk 128 + 64 with Dv 128, or 192 + 64 with 256, in bfloat16 or
            float16.

    Returns:
        `out` in q's dtype and `lse` float32, natural logarithm.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    arguments = OpArguments("causal_attention")
    q = arguments.check("q", q, "B T H Dqk")
    k = arguments.check("k", k, "B T H Dqk" if k_pe is None else "B T H nope")
    v = arguments.check("v", v, "B T H Dv")
    if k_pe is not None:
        k_pe = arguments.check("k_pe", k_pe, "B T P")
        if k.shape[-1] + k_pe.shape[-1] != q.shape[-1]:
            raise ValueError(
                "causal_attention: k's and k_pe's last axes must add up to q's, got "
                f"k {k.shape}, k_pe {k_pe.shape}, q {q.shape}"
            )
    if not q.dtype == k.dtype == v.dtype == (q if k_pe is None else k_pe).dtype:
        arrays = dict(q=q, k=k, v=v) if k_pe is None else dict(q=q, k=k, v=v, k_pe=k_pe)
        raise TypeError(
            "causal_attention: q, k and v must have the same dtype, got "
            + ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in arrays.items())
        )
    scale = arguments.check_scale(scale)
    bounds = SegmentBounds.checked(arguments, q, lengths, segment_ids, cu_seqlens)
    operands = CausalOperands(q, k, v, k_pe, None, None, bounds.lengths, bounds.first)

    def xla() -> tuple[jax.Array, jax.Array]:
        valid = jnp.arange(q.shape[1]) < bounds.lengths[:, None]
        out, lse = _causal(q, k, k_pe, v, valid, begins=bounds.first, scale=scale)
        return out.astype(q.dtype), lse

    def mosaic(interpret: bool) -> tuple[jax.Array, jax.Array]:
        rope = 64 if k_pe is None else k_pe.shape[-1]
        dims = dict(nope=q.shape[-1] - rope, rope=rope, values=v.shape[-1])
        refuse("causal_attention", q, **dims, interpret=interpret)

        def forward(operands: CausalOperands) -> tuple[jax.Array, jax.Array]:
            q, k, v, k_pe, _, _, lengths, first = operands
            count = jnp.clip(lengths, 0, q.shape[1])
            rows = jnp.stack([0 * count, count, count, 0 * count], axis=1)
            return attend(
                q, k, k_pe, v, rows, scale=scale, firsts=first, all_valid=bounds.all_valid,
                interpret=interpret,
            )  # fmt: skip

        scoring = CausalScoring(scale=scale, all_valid=bounds.all_valid)
        run = with_backward_kernel("causal_attention", forward, scoring, interpret=interpret)
        return run(operands)

    return dispatch_kernel("causal_attention", implementation, mosaic, xla)


@jax.named_scope("mla_prefill")
def mla_prefill(
    q: Float[Array, "B T H nope_and_P"],
    latent: Float[Array, "B T D"],
    w_uk: Float[Array, "H nope R"],
    w_uv: Float[Array, "H R Dv"],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    query_lens: Int[Array, "B"],
    *,
    scale: float,
    lines: Int[Array, "lines"] | None = None,
    layer: jax.Array | int | None = None,
    kv_scale: Array | float | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Computes the attention of new tokens to themselves and to their row's cached prefix.

    The op is differentiable. Where the kernel runs, only reverse mode works, and `jax.jvp` raises
    TypeError.

    The op merges, by log-sum-exp, the new tokens' causal attention with their attention to the
    prefix, positions below seq_lens - query_lens. The prefix is read from the cache `block` tokens
    at a time. The new tokens come from `latent`, so the cache need not hold them yet, and an FP8
    cache does not round them. Pass the cache that `mla_cache_write` returned, so that XLA need not
    keep the cache from before the write.

    Args:
        q: Queries, nope dims first, then the P rotated dims.
        latent: Latents of the new tokens: normed c_kv (R) and rotated k_pe (P), as in the cache.
        w_uk, w_uv: Up-projections of each head's keys and values.
        kv_cache: A stack of layers (with `layer`) or one layer's pages, in a format of
            `LatentFormat`. FP8 formats are unpacked `block` tokens at a time.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1; entries
            past it are not read.
        seq_lens: int32 number of tokens of each row, the new ones included, at most M * C. 0 means
            a padding row.
        query_lens: int32 number of new tokens of each row, at most T.
        scale: Factor of the scores; see `jaxattn.core.numerics.rope.softmax_scale`.
        lines: int32 row of each line of q and latent [lines, T, ...], ascending; B for a line
            without a row. A row's new tokens fill its lines one after another, so only the row's
            last line has padding; `query_lens` may be up to lines * T. None means that row b has
            line b. The kernel needs lines of a multiple of 128 tokens, and pages of a multiple of
            8. Calls with lines are not differentiable.
        layer: Index into the stack, a Python int or a traced scalar.
        kv_scale: Factor of a float8_e4m3fn cache, a Python number or a float32 scalar. Required for
            that dtype only.
        block: Number of cached tokens read at a time. "xla" (default 1024) holds
            B * H * T * block * 4 bytes of scores. The kernel holds
            B * H * block * (nope + Dv) * 2 bytes of expanded keys and values; its default is
            512 MiB or 1024 tokens, whichever is more.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel supports nope 128, P 64 and Dv 128, or 192, 64 and 256, in bfloat16 or
            float16, with any R. It is forward only: "xla" recomputes its gradient.

    Returns:
        `out` in q's dtype and `lse` float32, natural logarithm. Tokens t >= query_lens, and those
        whose position would be negative, are padding: exactly 0 and -inf. The same holds for a
        traced row whose seq_lens is negative or beyond M * C, or whose query_lens is beyond T.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    arguments = OpArguments("mla_prefill")
    axis = "B" if lines is None else "lines"
    q = arguments.check("q", q, f"{axis} T H Dqk")
    latent = arguments.check("latent", latent, f"{axis} T D")
    w_uk = arguments.check("w_uk", w_uk, "H nope R")
    w_uv = arguments.check("w_uv", w_uv, "H R Dv")
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    flat: Any = q if lines is None else jax.ShapeDtypeStruct((1, q.shape[0] * q.shape[1]), q.dtype)
    query_lens = arguments.check_query_lens(query_lens, "q", flat)
    if lines is not None:
        lines = arguments.integers("lines", lines, "lines")[1]
    scale = arguments.check_scale(scale)
    nope, rank = w_uk.shape[1:]
    if not 0 <= latent.shape[-1] - rank == q.shape[-1] - nope:
        raise ValueError(
            "mla_prefill: q's last axis must be nope + P and latent's R + P, got q "
            f"{q.shape}, latent {latent.shape}, w_uk [H, nope, R] {w_uk.shape}"
        )
    if block is not None:
        if not is_integer(block):
            raise TypeError(
                f"mla_prefill: block must be a Python integer, got {type(block).__name__}"
            )
        if block < 1:
            raise ValueError(f"mla_prefill: block must be at least 1, got {block}")
        block = int(block)
    format, kv_scale = check_format(
        arguments, kv_cache, kv_scale, kv_lora_rank=rank, qk_rope_head_dim=q.shape[-1] - nope
    )
    args = (q, latent, w_uk, w_uv, kv_cache, block_tables, seq_lens, query_lens, layer, kv_scale)
    refuse_explicit_axes("mla_prefill", args)
    if lines is not None:
        return _of_lines(args, lines, scale, block, format, implementation)
    xla = functools.partial(_prefill, scale=scale, block=block or PREFIX_BLOCK, format=format)

    def mosaic(interpret: bool) -> tuple[jax.Array, jax.Array]:
        dims = dict(nope=nope, rope=q.shape[-1] - nope, values=w_uv.shape[-1])
        refuse("mla_prefill", q, **dims, interpret=interpret)
        forward = functools.partial(
            prefill_mosaic, scale=scale, block=block, format=format, interpret=interpret
        )
        because = (
            "mla_prefill: the backward kernel does not read a cache; train with causal_attention"
        )
        return with_gradient_of(xla, forward, because=because)(*args)

    return dispatch_kernel("mla_prefill", implementation, mosaic, lambda: xla(*args))


def _of_lines(
    args: tuple[Any, ...],
    lines: jax.Array,
    scale: float,
    block: int | None,
    format: LatentFormat,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array]:
    """`mla_prefill` with `lines`, which is forward only."""
    q, _, w_uk, w_uv, kv_cache, *_ = args
    xla = functools.partial(_prefill_lines, scale=scale, block=block or PREFIX_BLOCK, format=format)

    def mosaic(interpret: bool) -> tuple[jax.Array, jax.Array]:
        nope = w_uk.shape[1]
        dims = dict(nope=nope, rope=q.shape[-1] - nope, values=w_uv.shape[-1])
        refuse_lines("mla_prefill", q, page=kv_cache.shape[-2], **dims, interpret=interpret)
        return prefill_lines_mosaic(
            *args, lines, scale=scale, block=block, format=format, interpret=interpret
        )

    return dispatch_kernel("mla_prefill", implementation, mosaic, lambda: xla(*args, lines))


@functools.partial(jax.jit, static_argnames=("scale", "block", "format"))
def _prefill_lines(
    q: jax.Array,
    latent: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    lines: jax.Array,
    *,
    scale: float,
    block: int,
    format: LatentFormat,
) -> tuple[jax.Array, jax.Array]:
    """Treats all lines as one row, in which a token sees only tokens of its own row."""
    count, tokens, heads, _ = q.shape
    most = count * tokens
    query_lens = jnp.where(seq_lens > 0, jnp.clip(query_lens, 0, most), 0)
    layout = PromptLines.of(lines, query_lens, seq_lens, tokens)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    valid = layout.valid.reshape(1, most)
    q, latent = (x.reshape(1, most, *x.shape[2:]) for x in (q, latent))
    expand = functools.partial(_expand, w_uk=w_uk, w_uv=w_uv, dtype=q.dtype)
    with jax.named_scope("new_tokens"):
        k, v = expand(jnp.where(valid[..., None], latent, 0))
        owner = jnp.repeat(lines, tokens)
        new = _causal(q, k, None, v, valid, owner, scale=scale)

    queries = jnp.where(valid[..., None, None], q, 0)
    blocks, begins, read = packed_pages(
        kv_cache,
        block_tables,
        prefix,
        layer=layer,
        block=block,
        unpack=functools.partial(format.unpack, kv_scale=kv_scale),
    )
    of_line = [jnp.repeat(layout.of_row(x, 0), tokens)[:, None] for x in (begins, prefix)]
    first, seen = of_line

    def add_block(i: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
        latents = read(i)
        k, v = expand(latents[None])
        scores = dot("bqhd,bkhd->bhqk", queries, k) * scale
        place = i * latents.shape[0] + jnp.arange(latents.shape[0])
        visible = (place >= first) & (place < first + seen)
        return state.add(
            scores, visible[None, None], lambda p: dot("bhqk,bkhv->bhqv", p.astype(v.dtype), v)
        )

    with jax.named_scope("cached_prefix"):
        state = OnlineSoftmax.empty((1, heads, most), w_uv.shape[-1], new[1].dtype)
        state = lax.fori_loop(0, blocks, add_block, state)
        out, lse = state.finish((valid & (seen[:, 0] > 0))[:, None])
    out, lse = merge_attention_states([new[0], out.swapaxes(1, 2)], [new[1], lse.swapaxes(1, 2)])
    return out.astype(q.dtype).reshape(count, tokens, *out.shape[2:]), lse.reshape(
        count, tokens, heads
    )


def _expand(
    latent: jax.Array, w_uk: jax.Array, w_uv: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns each head's keys [B, K, H, nope + P] and values [B, K, H, Dv]."""
    rank = w_uk.shape[2]
    latent = latent.astype(dtype)
    compressed, k_pe = latent[..., :rank], latent[..., None, rank:]
    k_nope = dot("bkr,hnr->bkhn", compressed, w_uk).astype(dtype)
    k_pe = jnp.broadcast_to(k_pe, (*k_nope.shape[:-1], k_pe.shape[-1]))
    v = dot("bkr,hrv->bkhv", compressed, w_uv).astype(dtype)
    return jnp.concatenate([k_nope, k_pe], axis=-1), v


@functools.partial(jax.jit, static_argnames=("scale", "block", "format"))
def _prefill(
    q: jax.Array,
    latent: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    *,
    scale: float,
    block: int,
    format: LatentFormat,
) -> tuple[jax.Array, jax.Array]:
    q, latent, w_uk, w_uv, kv_cache, kv_scale = match_varying_axes(
        (q, latent, w_uk, w_uv, kv_cache, kv_scale), block_tables, seq_lens, query_lens, layer
    )
    batch, tokens, heads, _ = q.shape
    query_lens = jnp.where(seq_lens > 0, query_lens, 0)
    prefix = jnp.where(query_lens > 0, jnp.maximum(seq_lens - query_lens, 0), 0)
    token = jnp.arange(tokens)
    valid = (token < query_lens[:, None]) & (token >= (query_lens - seq_lens)[:, None])

    expand = functools.partial(_expand, w_uk=w_uk, w_uv=w_uv, dtype=q.dtype)
    with jax.named_scope("new_tokens"):
        k, v = expand(jnp.where(valid[..., None], latent, 0))
        new = _causal(q, k, None, v, valid, scale=scale)

    queries = jnp.where(valid[..., None, None], q, 0)

    def add_block(state: OnlineSoftmax, kv: jax.Array, positions: jax.Array) -> OnlineSoftmax:
        k, v = expand(kv)
        scores = dot("bqhd,bkhd->bhqk", queries, k) * scale
        visible = (positions < prefix[:, None])[:, None, None, :]
        return state.add(scores, visible, lambda p: dot("bhqk,bkhv->bhqv", p.astype(v.dtype), v))

    with jax.named_scope("cached_prefix"):
        state = OnlineSoftmax.empty((batch, heads, tokens), w_uv.shape[-1], new[1].dtype)
        state = attend_pages(
            match_varying_axes(state, q),
            add_block,
            kv_cache,
            block_tables,
            prefix,
            layer=layer,
            block=block,
            unpack=functools.partial(format.unpack, kv_scale=kv_scale),
        )
        out, lse = state.finish((valid & (prefix > 0)[:, None])[:, None])
    out, lse = merge_attention_states([new[0], out.swapaxes(1, 2)], [new[1], lse.swapaxes(1, 2)])
    return out.astype(q.dtype), lse
