"""MLA decode over a paged cache of latents; layouts and the ops around it: `jaxattn.mla`."""

import dataclasses
import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxattn.arena import Arena
from jaxattn.core.cache.paged_cache import attend_pages, seen_lengths
from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.numerics.matmul import dot
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_arena, is_integer
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.kernels.attention.split_kv_schedule import Schedule, num_steps
from jaxattn.kernels.mla.decode.arguments import ContextParallelMerge, MlaDecodeCall
from jaxattn.kernels.mla.decode.launch import mla_decode_mosaic, takes_split_queries
from jaxattn.kernels.mla.decode.workspace import scratch
from jaxattn.ops.mla.cache_write import check_format
from jaxattn.ops.mla.state_merge import merge_by_all_to_all

# Cached tokens per row that the plain-JAX decode reads at a time.
DECODE_BLOCK = 512


@overload
def mla_decode(
    q: Array | tuple[Array, Array],
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
    query_lens: Array | None = ...,
    layer: Array | int | None = ...,
    kv_lora_rank: int = ...,
    kv_scale: Array | float | None = ...,
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
    query_lens: Array | None = ...,
    layer: Array | int | None = ...,
    kv_lora_rank: int = ...,
    kv_scale: Array | float | None = ...,
    schedule: Schedule | None = ...,
    arena: Arena,
    implementation: Implementation | None = ...,
) -> tuple[Array, Array, Arena]: ...


def mla_decode(
    q: Float[Array, "B S H D"] | tuple[Float[Array, "B S H R"], Float[Array, "B S H P"]],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    scale: float,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
    kv_lora_rank: int = 512,
    kv_scale: Array | float | None = None,
    schedule: Schedule | None = None,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Computes the attention of each row's last S tokens over its cached latents, in R dims.

    The S tokens must be in the cache already (`mla_cache_write`). Token s sees the positions up to
    its own, seq_lens - S + s: a causal mask aligned to the bottom right. A row with fewer new
    tokens puts them first and gives their number in `query_lens`, which then replaces S. If all S
    tokens see the whole row, pass them as S * H heads of one token: q.reshape(B, 1, S * H, D), with
    the scratch and schedule of that shape. Then reshape `out` and `lse` back.

    Padding: `out` is exactly 0 and `lse` is -inf for a row with seq_lens 0, for a token s >=
    query_lens, and for a token whose position would be negative. Under `jax.jit`, where the op
    cannot check lengths, the same holds for a row whose seq_lens is negative or beyond M * C, or
    whose query_lens is beyond S.

    Uninitialized memory: entries of `block_tables` past a row's length may hold anything, NaN
    included, and so may cache slots outside the rows' tokens. A NaN in a row's own tokens stays in
    that row (in any of its S tokens) and is not hidden. If all scores of a row are -inf, the
    kernels return 0 and XLA returns NaN.

    Args:
        q: Absorbed queries: `absorb_query` of the nope dims (R), then the rotated dims (P). If the
            two are a pair of arrays and H is a multiple of 64, the kernel reads them without
            joining them.
        kv_cache: The pages of latents [R + P], as a stack of layers (with `layer`) or as one
            layer's pages. The dtype determines the format (`LatentFormat`): bfloat16, float16,
            float32 or float64; float8_e4m3fn with `kv_scale`; uint8 for block-scaled bytes.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the S new ones included, at most M * C.
        scale: Factor of the scores, computed from the unabsorbed dims and never D**-0.5. For
            DeepSeek-V3 it is 192**-0.5 * mscale**2 (`jaxattn.core.numerics.rope.softmax_scale`).
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int or a traced scalar.
        kv_lora_rank: R; the first R dims of a latent are the values.
        kv_scale: Factor by which the numbers of a float8_e4m3fn cache are multiplied, a Python
            number or a float32 scalar. Required for that dtype only.
        schedule: `decode_schedule` of these `seq_lens` and shapes, which all layers of a step can
            share. Without it each call computes the schedule in one or two dozen small kernels. If
            a row's length differs from the schedule's, its output and LSE are NaN. XLA ignores the
            schedule.
        arena: The arena whose region "out" of `scratch` receives the output. The returned `out` is
            a view of it, valid until the next write to the arena.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            "xla" is the reference: any shape, float32 throughout (float64 for float64),
            differentiable.

    Returns:
        (out [B, S, H, R] in q's dtype, lse float32 [B, S, H], natural logarithm), and the arena if
        one was given.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    call = checked_call(
        q,
        kv_cache,
        block_tables,
        seq_lens,
        scale=scale,
        query_lens=query_lens,
        layer=layer,
        kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale,
        schedule=schedule,
        arena=arena,
    )
    return attend(call, implementation)


def checked_call(
    q: Any,
    kv_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
    query_lens: Array | None = None,
    layer: Array | int | None,
    kv_lora_rank: int,
    kv_scale: Array | float | None,
    schedule: Schedule | None,
    arena: Arena | None,
    merge: ContextParallelMerge | None = None,
    op: str = "mla_decode",
) -> MlaDecodeCall:
    """Returns the checked call of `mla_decode`, or of another `op` with the same arguments.

    `merge` is that of `mla_decode_context_parallel`.
    """
    arguments = OpArguments(op)
    parts = q if isinstance(q, tuple) else None
    q = _check_queries(arguments, q)
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    scale = arguments.check_scale(scale)
    if not is_integer(kv_lora_rank) or not 1 <= kv_lora_rank <= q.shape[-1]:
        raise ValueError(
            f"{op}: kv_lora_rank must be an integer from 1 to D = {q.shape[-1]} (q "
            f"{q.shape}), got {kv_lora_rank!r}"
        )
    kv_lora_rank = int(kv_lora_rank)
    _, kv_scale = check_format(
        arguments,
        kv_cache,
        kv_scale,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=q.shape[-1] - kv_lora_rank,
    )
    if query_lens is not None:
        query_lens = arguments.check_query_lens(query_lens, "q", q)
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"{op}: schedule must be a result of decode_schedule, got {type(schedule).__name__}"
            )
        max_pages = num_steps(block_tables.shape[1], kv_cache.shape[-2])
        schedule.check(op, q.shape, max_pages)
    check_arena(op, arena)
    refuse_explicit_axes(op, q, kv_cache, block_tables, seq_lens, query_lens)
    call = MlaDecodeCall(
        q=q,
        kv_cache=kv_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        scale=scale,
        query_lens=query_lens,
        layer=layer,
        kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale,
        schedule=schedule,
        arena=arena,
        merge=merge,
    )
    if merge is not None:
        heads, gpus = call.num_heads, lax.axis_size(merge.axes)
        if call.q_len > 1 or heads % gpus or heads > q.shape[2]:
            raise ValueError(
                f"{op}: with merge, q {q.shape} must have S = 1 and the merge's {heads} "
                f"heads, which divide over {gpus} GPUs"
            )
    if parts is not None and takes_split_queries(call.num_heads):
        return dataclasses.replace(call, q=parts)
    return call


def attend(call: MlaDecodeCall, implementation: Implementation | None) -> tuple[Any, ...]:
    """Runs the call and returns (out, lse), followed by the arena if there is one.

    With a merge the results are (out, the arena or None, the mailbox).
    """

    def mosaic(interpret: bool) -> tuple[Any, ...]:
        return mla_decode_mosaic(call, interpret=interpret)

    def xla() -> tuple[Any, ...]:
        arena, merge = call.arena, call.merge
        asked = dataclasses.replace(call.joined(), schedule=None, arena=None, merge=None)
        out, lse = _decode_xla(asked)
        if merge is not None:
            return merge_by_all_to_all(out, lse, merge.axes), arena, merge.mailbox
        return (out, lse) if arena is None else into_arena(out, lse, arena)

    with jax.named_scope("mla_decode"):
        return dispatch_kernel("mla_decode", implementation, mosaic, xla)


def _check_queries(arguments: OpArguments, q: Any) -> jax.Array:
    """Returns the queries as one array [B, S, H, D]; XLA drops an unused concatenation."""
    if not isinstance(q, tuple):
        return arguments.check("q", q, "B S H D")
    if len(q) != 2:
        shapes = [tuple(getattr(x, "shape", ())) for x in q]
        raise ValueError(
            f"{arguments.op}: q must be an array or a pair, got {len(q)} arrays, {shapes}"
        )
    latent = arguments.check("q[0]", q[0], "B S H R")
    rotated = arguments.check("q[1]", q[1], "B S H P", (str(latent.dtype),))
    return arguments.check("q", jnp.concatenate([latent, rotated], axis=-1), "B S H D")


@jax.jit
def _decode_xla(call: MlaDecodeCall) -> tuple[jax.Array, jax.Array]:
    block_tables, seq_lens, query_lens = call.block_tables, call.seq_lens, call.query_lens
    q, kv_cache, kv_scale = match_varying_axes(
        (call.q, call.kv_cache, call.kv_scale), block_tables, seq_lens, query_lens, call.layer
    )
    assert not isinstance(q, tuple)
    (batch, q_len, heads, dim), rank, format = q.shape, call.kv_lora_rank, call.format
    kv_dtype = jnp.float32 if format.quantized else kv_cache.dtype
    wide = jnp.promote_types(jnp.promote_types(q.dtype, kv_dtype), jnp.float32)
    # Queries are rows s * H + h.
    most = block_tables.shape[1] * kv_cache.shape[-2]
    limit = seen_lengths(seq_lens, query_lens, tokens=q_len, max_tokens=most)
    limit = jnp.repeat(limit, heads, axis=1)
    queries = q.reshape(batch, q_len * heads, dim).astype(wide)
    queries = jnp.where((limit > 0)[..., None], queries, 0)

    def add_block(state: OnlineSoftmax, kv: jax.Array, positions: jax.Array) -> OnlineSoftmax:
        kv = kv.astype(wide)
        scores = dot("bqd,bkd->bqk", queries, kv) * call.scale
        values = kv[..., :rank]
        return state.add(
            scores, positions < limit[..., None], lambda p: dot("bqk,bkr->bqr", p, values)
        )

    out, lse = attend_pages(
        match_varying_axes(OnlineSoftmax.empty((batch, q_len * heads), rank, wide), q),
        add_block,
        kv_cache,
        block_tables,
        seq_lens,
        layer=call.layer,
        block=DECODE_BLOCK,
        unpack=functools.partial(format.unpack, kv_scale=kv_scale),
    ).finish(limit > 0)
    out = out.reshape(batch, q_len, heads, rank).astype(q.dtype)
    return out, lse.reshape(batch, q_len, heads)


def into_arena(out: jax.Array, lse: jax.Array, arena: Arena) -> tuple[jax.Array, jax.Array, Arena]:
    """Writes the output where the kernel would write it, and returns a view of that place."""
    batch, q_len, heads, rank = out.shape
    spec = scratch(  # only the output: nothing is split here
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
