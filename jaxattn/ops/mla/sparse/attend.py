"""MLA over chosen tokens of a paged cache, for a few queries per row or for a chunk of a prompt.

Both ops compute the same function but try different kernels. The plain-JAX path gathers the latents
of some queries at a time, and is differentiable.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.cache.formats import BYTES
from jaxattn.core.cache.paged_cache import seen_lengths
from jaxattn.core.dispatch import Implementation, dispatch_kernel, without_gradient
from jaxattn.core.numerics.matmul import dot
from jaxattn.core.numerics.online_softmax import OnlineSoftmax
from jaxattn.core.validation.arguments import INT32, OpArguments
from jaxattn.core.validation.array_checks import check_sizes
from jaxattn.core.validation.varying_axes import match_varying_axes, refuse_explicit_axes
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.mla.decode.arguments import MlaDecodeCall
from jaxattn.kernels.mla.decode.workspace import scratch as dense_scratch
from jaxattn.kernels.mla.sparse.launch import mla_sparse_mosaic, refuse, scratch
from jaxattn.ops.mla.decode import checked_call, into_arena

# Bytes of latents and scores that the plain-JAX path holds at a time.
MOST_BYTES = 2**27


def mla_sparse_decode(
    q: Float[Array, "B S H D"] | tuple[Float[Array, "B S H R"], Float[Array, "B S H P"]],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    indices: Int[Array, "B S K"],
    *,
    scale: float,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
    kv_lora_rank: int = 512,
    kv_scale: Array | float | None = None,
    sinks: Float[Array, "H"] | None = None,
    batch_invariant: bool = False,
    arena: Arena | None = None,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Computes the attention of each row's last S tokens over chosen tokens of its cached latents.

    Token s attends to the positions in indices[b, s], except those beyond its own. Tokens have the
    same places as in `mla_decode`, and padding has the same results. Tables and caches may hold
    anything outside the rows' tokens, as in `mla_decode`.

    Args:
        q: Absorbed queries, or the pair of their R and P dims; see `mla_decode`.
        kv_cache: Pages of latents [R + P], in a format of `LatentFormat`.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the S new ones included, at most M * C.
        indices: int32 positions in the row (`mla_index`), in any order. Negative positions and
            those beyond the token's own are ignored. A position that occurs twice counts twice.
        scale: Factor of the scores, computed from the unabsorbed dims; see `mla_decode`.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int or a traced scalar.
        kv_lora_rank: R; the first R dims of a latent are the values.
        kv_scale: Factor of a float8_e4m3fn cache. Required for that dtype only.
        sinks: float32 logit of each head, which takes part in the softmax once and has no value.
            `scale` does not apply to it.
        batch_invariant: If True, the kernel splits all index lists in the same way, which depends
            only on B, S and K. A row's bits then do not depend on its place in the batch.
        arena: The arena whose region "out" of `sparse_scratch` receives the output, as in
            `mla_decode`.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            "xla" is the reference: any shape, float32 throughout (float64 for float64),
            differentiable.

    Returns:
        (out [B, S, H, R] in q's dtype, lse float32 [B, S, H], natural logarithm, the sink's logit
        included), and the arena if one was given. For a token that attends to nothing, `out` is
        exactly 0 and `lse` is -inf, also with sinks.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    call = _checked(
        "mla_sparse_decode", q, kv_cache, block_tables, seq_lens, indices, sinks,
        scale=scale, query_lens=query_lens, layer=layer, kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale, arena=arena, batch_invariant=batch_invariant,
    )  # fmt: skip
    return _attend("mla_sparse_decode", call, implementation)


def mla_sparse_prefill(
    q: Float[Array, "B S H D"] | tuple[Float[Array, "B S H R"], Float[Array, "B S H P"]],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    indices: Int[Array, "B S K"],
    *,
    scale: float,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
    kv_lora_rank: int = 512,
    kv_scale: Array | float | None = None,
    sinks: Float[Array, "H"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S H R"], Float[Array, "B S H"]]:
    """Computes the attention of each row's prompt chunk over chosen tokens of its cached latents.

    The chunk's own latents must be in the cache already. Arguments, results and padding are those
    of `mla_sparse_decode`, without an arena. Queries are absorbed too; S is the longest chunk.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    call = _checked(
        "mla_sparse_prefill", q, kv_cache, block_tables, seq_lens, indices, sinks,
        scale=scale, query_lens=query_lens, layer=layer, kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale, arena=None,
    )  # fmt: skip
    out, lse = _attend("mla_sparse_prefill", call, implementation)
    return out, lse


def sparse_scratch(
    *,
    batch: int,
    q_len: int,
    num_heads: int,
    top_k: int,
    kv_lora_rank: int = 512,
    dtype: DTypeLike = jnp.bfloat16,
    batch_invariant: bool = False,
) -> ArenaSpec:
    """Returns the `ArenaSpec` of `mla_sparse_decode` for B rows of S tokens that attend to K each.

    Args:
        batch, q_len, num_heads, top_k: B, S, H and K.
        kv_lora_rank, dtype: R and the dtype of the output.
        batch_invariant: As in the call of the op.

    Raises:
        ValueError: A size is not a positive integer; the message names it.
    """
    size: Any = {"batch": batch, "q_len": q_len, "num_heads": num_heads}
    check_sizes("mla.sparse_scratch", **size, top_k=top_k, kv_lora_rank=kv_lora_rank)
    size["dtype"] = jnp.dtype(dtype)
    of_kernel = scratch(**size, top_k=top_k, batch_invariant=batch_invariant)
    of_xla = dense_scratch(**size, max_pages=1, kv_lora_rank=kv_lora_rank)
    return max(of_kernel, of_xla, key=lambda spec: spec.nbytes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MlaSparseCall:
    """A checked call of a sparse op; `mla_sparse_decode` documents its arguments.

    Attributes:
        dense: The same call without `indices`, with its queries in one array.
        indices: int32 [B, S, K].
        batch_invariant: How the kernel splits index lists; see `mla_sparse_decode`.
    """

    dense: MlaDecodeCall
    indices: jax.Array
    sinks: jax.Array | None
    batch_invariant: bool = dataclasses.field(metadata={"static": True})


def _checked(
    op: str,
    q: Any,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    indices: Any,
    sinks: Any,
    batch_invariant: bool = False,
    **given: Any,
) -> MlaSparseCall:
    call = checked_call(q, kv_cache, block_tables, seq_lens, schedule=None, op=op, **given).joined()
    batch, tokens, heads = call.shape
    sizes = {"B": (batch, "q"), "S": (tokens, "q"), "H": (heads, "q")}
    arguments = OpArguments(op, sizes)
    indices = arguments.check("indices", indices, "B S K", INT32)
    if sinks is not None:
        sinks = arguments.check("sinks", sinks, "H", ("float32",))
    refuse_explicit_axes(op, indices, sinks)
    return MlaSparseCall(dense=call, indices=indices, sinks=sinks, batch_invariant=batch_invariant)


def _attend(op: str, call: MlaSparseCall, implementation: Implementation | None) -> tuple[Any, ...]:
    def mosaic(interpret: bool) -> tuple[Any, ...]:
        dense = call.dense
        require_hopper(op, interpret=interpret)
        refuse(dense)
        q, kv_cache, kv_scale, sinks = without_gradient(
            op,
            (dense.q, dense.kv_cache, dense.kv_scale, call.sinks),
            "q kv_cache kv_scale sinks",
        )
        dense = dataclasses.replace(dense, q=q, kv_cache=kv_cache, kv_scale=kv_scale)
        return mla_sparse_mosaic(
            dense, call.indices, sinks,
            batch_invariant=call.batch_invariant, interpret=interpret,
        )  # fmt: skip

    def xla() -> tuple[Any, ...]:
        arena, dense = call.dense.arena, dataclasses.replace(call.dense, arena=None)
        out, lse = attend_xla(dataclasses.replace(call, dense=dense))
        return (out, lse) if arena is None else into_arena(out, lse, arena)

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)


@jax.jit
def attend_xla(call: MlaSparseCall) -> tuple[jax.Array, jax.Array]:
    """Returns out and LSE of a call without an arena."""
    dense = call.dense
    block_tables, seq_lens, query_lens = dense.block_tables, dense.seq_lens, dense.query_lens
    (q, kv_cache, kv_scale, sinks), indices = match_varying_axes(
        ((dense.q, dense.kv_cache, dense.kv_scale, call.sinks), call.indices),
        block_tables, seq_lens, query_lens, dense.layer,
    )  # fmt: skip
    assert not isinstance(q, tuple)
    (batch, tokens, heads, dim), top_k = q.shape, indices.shape[-1]
    rank, format, page = dense.kv_lora_rank, dense.format, dense.page_size
    kv_dtype = jnp.float32 if format.quantized else kv_cache.dtype
    wide = jnp.promote_types(jnp.promote_types(q.dtype, kv_dtype), jnp.float32)
    missing = 0xFF if kv_cache.dtype == BYTES else jnp.nan
    most = dense.max_pages * page
    limits = seen_lengths(seq_lens, query_lens, tokens=tokens, max_tokens=most)
    attended = (indices >= 0) & (indices < limits[..., None])
    positions = jnp.where(attended, indices, 0)
    rows = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, tokens))

    @jax.checkpoint
    def of_queries(xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Returns out and LSE of some tokens, which may belong to any rows."""
        q, positions, attended, rows = xs
        q = jnp.where(attended.any(-1)[:, None, None], q, 0).astype(wide)
        pages = jnp.where(attended, block_tables[rows[:, None], positions // page], 0)
        index: Any = pages, positions % page
        if dense.layer is not None:
            index = jnp.asarray(dense.layer, jnp.int32), *index
        kv = kv_cache.at[index].get(mode="fill", fill_value=missing, wrap_negative_indices=False)
        # Mask before unpacking: a NaN would reach the gradient of the scale.
        kv = jnp.where(attended[..., None], kv, jnp.zeros((), kv.dtype))
        kv = format.unpack(kv, kv_scale).astype(wide)
        scores = dot("nhd,nkd->nhk", q, kv) * dense.scale
        state = OnlineSoftmax.empty((len(q), heads), rank, wide)
        values = kv[..., :rank]
        state = state.add(scores, attended[:, None], lambda p: dot("nhk,nkr->nhr", p, values))
        sees = jnp.broadcast_to(attended.any(-1)[:, None], (len(q), heads))
        if sinks is not None:  # a key without a value
            logits = jnp.broadcast_to(sinks.astype(wide)[:, None], (len(q), heads, 1))
            state = state.add(logits, sees[..., None], lambda p: jnp.zeros_like(state.acc))
        return state.finish(sees)

    of_token = wide.itemsize * top_k * (3 * dim + 3 * heads)
    together = max(1, min(batch * tokens, MOST_BYTES // of_token))
    steps = -(-batch * tokens // together)

    def cut(x: jax.Array) -> jax.Array:
        """Splits the tokens into steps, [steps, n, ...]; padding attends to nothing."""
        x = x.reshape(batch * tokens, *x.shape[2:])
        x = jnp.pad(x, ((0, steps * together - len(x)), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(steps, together, *x.shape[1:])

    out, lse = lax.map(of_queries, tuple(map(cut, (q, positions, attended, rows))))
    out = out.reshape(-1, heads, rank)[: batch * tokens].astype(q.dtype)
    lse = lse.reshape(-1, heads)[: batch * tokens].astype(jnp.promote_types(wide, jnp.float32))
    return out.reshape(batch, tokens, heads, rank), lse.reshape(batch, tokens, heads)
