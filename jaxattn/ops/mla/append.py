"""The MLA append op: norms, rotation and cache write of a decode step's new tokens.

Between an MLA layer's first projections and its cache lie the RMS norm of the latents, the rotation
of the key that all heads share, and the write. The compressed queries need a norm too. Each of
these takes a few microseconds for little work, so one kernel does all of them.
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
    """Packs a layer's norm weights for `mla_append`, as float32 [W = R + P + Q].

    The P dims, which are rotated but not normed, get ones. Pack a stack of layers once, at load
    time: the op indexes the stack, so a loop over layers copies nothing out of it.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape; the message names it.
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
    """Writes each row's new tokens to the cache, and normalizes the compressed queries.

    Args:
        kv: Output of kv_a_proj: R dims to norm, then P dims to rotate.
        q: Output of q_a_proj, or None for a layer without `q_lora_rank`.
        weights: `pack_mla_weights(...)` of this layer, or of a stack that `layer` indexes.
        kv_cache: A cache in any format that `jaxattn.mla.mla_cache_write` writes. Donate it to
            update it in place.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1, and no
            two rows may share a page that is written.
        seq_lens: int32 number of tokens of each row, the S new ones included, at most M * C.
            Nothing is written for a row with 0.
        rotation: `jaxattn.rotation` of the tokens' positions [B, S].
        config: Configuration of `rotation`; P is `config.dim`, and its layout defines which dims
            are a pair.
        eps: Epsilon of both norms.
        dtype: Dtype of the normed queries. None means kv's.
        query_lens: int32 number of new tokens of each row, which come first among its S. None means
            S.
        kv_scale: Factor of a float8_e4m3fn cache.
        layer: Index into the stacks, a Python int or a traced scalar.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.

    Returns:
        (normed queries [B, S, Q] or None, the cache). Rows that `mla_cache_write` does not write,
        such as those with seq_lens 0, write nothing here either; their queries are still normed.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
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
