"""A decode step's new tokens on their way into the cache: norms, rotation and write in one op.

Between an MLA layer's first projections and its cache lie a RMS norm of the latents, the rotation
of the key that all heads share, and the write; beside them the norm of the compressed queries. Each
is a few microseconds of little work, and one kernel does them all.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.core.numerics.rope import RopeConfig, Rotation, check_config, check_rotation, rope
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import FLOATS, check_out_dtype, finite, is_integer
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.mla.append import mla_append_mosaic, norms_queries
from jaxattn.ops.mla.cache_write import check_format, mla_cache_write


def pack_mla_weights(
    kv_norm: Float[Array, "*L R"], q_norm: Float[Array, "*L Q"] | None = None, *, rope_dim: int
) -> Float[Array, "*L W"]:
    """A layer's norm weights as `mla_append` reads them, float32: [W = R + P + Q].

    The P dims that are rotated and not normed have ones. Pack a stack of layers once, when you load
    the model. The op indexes the stack, so a loop over layers copies nothing.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype or shape; the message names the
            argument.
    """
    arguments = OpArguments("pack_mla_weights")
    stack = " ".join("LMNK"[: max(getattr(kv_norm, "ndim", 1) - 1, 0)])
    kv_norm = arguments.check("kv_norm", kv_norm, f"{stack} R")
    if q_norm is not None:
        q_norm = arguments.check("q_norm", q_norm, f"{stack} Q")
    if not is_integer(rope_dim):
        raise TypeError(
            f"pack_mla_weights: rope_dim must be an integer, got {type(rope_dim).__name__}"
        )
    if rope_dim < 0:
        raise ValueError(f"pack_mla_weights: rope_dim must be at least 0, got {rope_dim}")
    pieces = [kv_norm, jnp.ones((*kv_norm.shape[:-1], rope_dim))]
    pieces += [] if q_norm is None else [q_norm]
    return jnp.concatenate([x.astype(jnp.float32) for x in pieces], axis=-1)


def mla_append(
    kv: Float[Array, "B S D"],
    q: Float[Array, "B S Q"] | None,
    weights: Float[Array, "*L W"],
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    rotation: Rotation,
    config: RopeConfig,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    query_lens: Int[Array, "B"] | None = None,
    kv_scale: Array | float | None = None,
    layer: int | Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array | None, Array]:
    """Caches each row's new tokens, and norms the compressed queries.

    Args:
        kv: kv_a_proj's output: R dims to norm, then P dims to rotate.
        q: q_a_proj's output, or None for a layer without `q_lora_rank`.
        weights: `pack_mla_weights(...)` of this layer, or of a stack that `layer` indexes.
        kv_cache: a cache in any format that `jaxattn.mla.mla_cache_write` supports; donate it to
            update it in place.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1, and no
            two rows may share a page that is written.
        seq_lens: int32 tokens of each row, the S new ones included, at most M * C; a row with 0
            writes nothing.
        rotation: `jaxattn.rotation` of the tokens' positions [B, S].
        config: P is `config.dim`; `config.interleaved` determines the pairs of dims.
        eps: epsilon of both norms.
        dtype: dtype of the normed queries; kv's dtype, if None.
        query_lens: int32 new tokens of each row, the first of its S; S, if None.
        kv_scale: required for a float8_e4m3fn cache.
        layer: index into the stacks, a Python int or a traced scalar.
        implementation: None, "mosaic_gpu", "mosaic_gpu_interpret" or "xla".

    Returns:
        (normed queries [B, S, Q] or None, the cache). A row with seq_lens 0 writes nothing. The
        same holds for a traced row that `mla_cache_write` would not write. The op norms the queries
        of these rows too.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens have one position; the message names the argument.
        Refusal: the requested implementation does not support the call; the message says why.
    """
    op = "mla_append"
    arguments = OpArguments(op)
    kv = arguments.check("kv", kv, "B S D")
    if q is not None:
        q = arguments.check("q", q, "B S Q")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    query_lens = arguments.check_written(given, "kv", kv, kv_cache.shape[-2])
    axes = "L W" if getattr(weights, "ndim", 1) == 2 else "W"
    weights = arguments.check("weights", weights, axes, FLOATS)
    if weights.ndim == 2 and layer is None:
        raise ValueError(f"{op}: weights {weights.shape} are a stack of layers; give layer=")
    check_config(op, config)
    eps = finite(op, "eps", eps)
    batch, q_len, dim = kv.shape
    rank, query_rank = dim - config.dim, 0 if q is None else q.shape[-1]
    if rank < 1 or weights.shape[-1] != dim + query_rank:
        raise ValueError(
            f"{op}: weights {weights.shape} must be float32 with W = R + P + Q = "
            f"{dim + query_rank}, as pack_mla_weights returns them; kv is {kv.shape}, P "
            f"{config.dim}, Q {query_rank}"
        )
    check_format(arguments, kv_cache, kv_scale, kv_lora_rank=rank, qk_rope_head_dim=config.dim)
    check_rotation(op, rotation, config, (batch, q_len))
    refuse_explicit_axes(op, kv, q, weights, kv_cache, block_tables, seq_lens, query_lens)
    out_dtype = check_out_dtype(arguments.op, dtype, kv.dtype)

    def mosaic(interpret: bool) -> tuple[Array | None, Array]:
        mine = q if norms_queries(query_rank) else None
        normed, written = mla_append_mosaic(
            kv,
            mine,
            weights,
            kv_cache,
            block_tables,
            seq_lens,
            angles=rotation.angles,
            interleaved=config.interleaved,
            eps=eps,
            dtype=out_dtype,
            query_lens=query_lens,
            layer=layer,
            interpret=interpret,
        )
        return normed if mine is q else queries(), written

    def queries() -> Array | None:
        return None if q is None else rms_norm(q, own()[dim:], eps).astype(out_dtype)

    def own() -> jax.Array:
        return weights if weights.ndim == 1 else weights[layer]

    def xla() -> tuple[Array | None, Array]:
        rotated = rope(kv[..., rank:], rotation, config)
        latent = jnp.concatenate([rms_norm(kv[..., :rank], own()[:rank], eps), rotated], axis=-1)
        written = mla_cache_write(
            kv_cache,
            latent,
            block_tables,
            seq_lens,
            query_lens=query_lens,
            layer=layer,
            kv_scale=kv_scale,
        )
        return queries(), written

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)
