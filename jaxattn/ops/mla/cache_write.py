"""The latent cache of MLA: how a token's R + P numbers are stored, and how they are written.

The cache's dtype says which of three formats it has (R kv_lora_rank, P qk_rope_head_dim):

    bfloat16, float16,   R + P numbers as they are
    float32, float64
    float8_e4m3fn        R + P e4m3 numbers; each times one `kv_scale` for the whole cache is the
                         value
    uint8                FlashMLA's block-scaled bytes, 656 for 512 + 64: R e4m3 numbers, R / 128
                         float32 scales (a power of two for each 128 dims), P bfloat16 numbers

`LatentFormat` gives the shape and the bytes of each, packs latents and unpacks what is stored.
Finite numbers beyond 448 times their scale are stored as that. NaN stays NaN, and Inf, which e4m3
does not have, becomes NaN: neither has a part in the scale of the numbers beside it. (The bfloat16
numbers of a uint8 cache keep Inf.)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxattn.core.cache.formats import BLOCK, BYTES, FP8, LatentFormat
from jaxattn.core.cache.paged_cache import write_tokens
from jaxattn.core.numerics.rope import RopeConfig, Rotation, check_config, check_rotation, rope
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_positive
from jaxattn.core.validation.varying_axes import refuse_explicit_axes


def check_format(
    arguments: OpArguments,
    kv_cache: jax.Array,
    kv_scale: Any,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
) -> tuple[LatentFormat, jax.Array | None]:
    """The cache's format and its scale as an array, if the two and the latents' dims fit."""
    op, shape, dtype = arguments.op, tuple(kv_cache.shape), kv_cache.dtype.name
    try:
        format = LatentFormat(kv_cache.dtype, kv_lora_rank, qk_rope_head_dim)
    except ValueError as error:
        raise ValueError(f"{op}: kv_cache {shape} {dtype}: {error}") from None
    if shape[-1] != format.width:
        raise ValueError(
            f"{op}: kv_cache {shape} {dtype} has {shape[-1]} as its last axis, but a token of "
            f"{kv_lora_rank=} and {qk_rope_head_dim=} needs {format.width}"
        )
    return format, _check_kv_scale(op, kv_cache, format, kv_scale)


def _check_kv_scale(
    op: str, kv_cache: jax.Array, format: LatentFormat, kv_scale: Any
) -> jax.Array | None:
    described = f"kv_cache {tuple(kv_cache.shape)} {format.dtype.name}"
    if not format.per_tensor:
        if kv_scale is not None:
            raise ValueError(
                f"{op}: kv_scale is only for a {FP8.name} cache, which {described} is not; drop "
                "kv_scale"
            )
        return None
    if kv_scale is None:
        raise ValueError(f"{op}: {described} needs kv_scale=, by which its numbers are multiplied")
    if isinstance(kv_scale, int | float | np.floating) and not isinstance(kv_scale, bool):
        return jnp.float32(check_positive(op, "kv_scale", kv_scale))
    found = str(getattr(kv_scale, "dtype", type(kv_scale).__name__))
    if found != "float32" or kv_scale.shape != ():
        raise TypeError(
            f"{op}: kv_scale must be a Python number or a float32 scalar, got {found} "
            f"{getattr(kv_scale, 'shape', '')}".rstrip()
        )
    if isinstance(kv_scale, np.ndarray | jax.Array) and not isinstance(kv_scale, jax.core.Tracer):
        check_positive(op, "kv_scale", float(kv_scale))
    return jnp.asarray(kv_scale)


def _written_format(
    arguments: OpArguments, kv_cache: jax.Array, latent: jax.Array, kv_scale: Any
) -> tuple[LatentFormat, jax.Array | None]:
    """The format of what is written: the two widths alone say a block-scaled cache's R."""
    dim, shape = latent.shape[-1], tuple(kv_cache.shape)
    if kv_cache.dtype != BYTES:
        return check_format(arguments, kv_cache, kv_scale, kv_lora_rank=dim, qk_rope_head_dim=0)
    for rank in range(BLOCK, dim + 1, BLOCK):
        format = LatentFormat(BYTES, rank, dim - rank)
        if format.width == shape[-1]:
            return format, _check_kv_scale(arguments.op, kv_cache, format, kv_scale)
    raise ValueError(
        f"{arguments.op}: kv_cache {shape} uint8 has {shape[-1]} bytes as its last axis, which "
        f"fits no latent of D = {dim} (latent {tuple(latent.shape)}): R e4m3 numbers, R / {BLOCK} "
        f"float32 scales and D - R bfloat16 numbers, R a multiple of {BLOCK}; 656 for 512 + 64"
    )


@jax.named_scope("mla_cache_write")
def mla_cache_write(
    kv_cache: Num[Array, "L N C Ds"] | Num[Array, "N C Ds"],
    latent: Float[Array, "B S D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
    kv_scale: Array | float | None = None,
    rotation: Rotation | None = None,
    config: RopeConfig | None = None,
) -> Array:
    """The cache with the new tokens' latents written, in place if the cache is donated.

    On a CPU the write of a float8_e4m3fn cache is not in place, because jax 0.11.2 converts the
    whole cache around the write.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], or for a negative position. No two rows may share a
    page that is written.

    The op checks concrete tables and lengths, and cannot check traced ones. With traced ones,
    nothing is written for a row whose seq_lens is negative or beyond M * C, or whose query_lens is
    beyond S. Nothing is written to pages outside of 0 to N - 1. If two tokens have one position,
    either may win.

    On a GPU, rotation, quantization and write are one kernel. For a block-scaled cache, a kernel
    before it computes the scales.

    Args:
        kv_cache: a stack with `layer`, or one layer's pages, in a format of `LatentFormat`: Ds is
            D, or 656 bytes for 512 + 64 where it is block-scaled (uint8). In FP8, finite numbers
            saturate, and Inf becomes NaN.
        latent: the new tokens' latents: R dims, followed by P dims that are rotated, or that the op
            rotates if `rotation` is given.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 tokens of each row, the new ones included, at most M * C.
        query_lens: int32 new tokens of each row, at most S; S, if None.
        layer: index into the stack, a Python int or a traced scalar.
        kv_scale: required for a float8_e4m3fn cache: a Python number or a float32 scalar. latent /
            kv_scale is stored.
        rotation: `jaxattn.rotation` of the tokens' positions [B, S], by which the op rotates the
            last P dims; None if these dims are already rotated.
        config: the configuration of this rotation; P is `config.dim`.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens have one position; the message names the argument.
    """
    arguments = OpArguments("mla_cache_write")
    latent = arguments.check("latent", latent, "B S D")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    format, kv_scale = _written_format(arguments, kv_cache, latent, kv_scale)
    if rotation is not None or config is not None:
        latent = _rotated(arguments.op, latent, rotation, config, format)
    query_lens = arguments.check_new(given, seq_lens, "latent", latent, kv_cache.shape[-2])
    refuse_explicit_axes(arguments.op, kv_cache, latent, block_tables, seq_lens, query_lens)
    return _write(
        kv_cache, latent, block_tables, seq_lens, query_lens, layer, kv_scale, format=format
    )


def _rotated(
    op: str,
    latent: jax.Array,
    rotation: Rotation | None,
    config: RopeConfig | None,
    format: LatentFormat,
) -> jax.Array:
    """`latent` with its last dims rotated, if all that is given fits."""
    if rotation is None or config is None:
        given, missing = ("rotation=", "config=") if config is None else ("config=", "rotation=")
        raise ValueError(
            f"{op}: rotation= and config= must be given together, got {given} without {missing}"
        )
    check_config(op, config)
    batch, tokens, dim = latent.shape
    if config.dim > dim or format.block_scaled and config.dim != format.qk_rope_head_dim:
        raise ValueError(
            f"{op}: {config.dim=} does not fit latent {latent.shape}, which has "
            f"{format.qk_rope_head_dim if format.block_scaled else dim} dims to rotate"
        )
    check_rotation(op, rotation, config, (batch, tokens))
    compressed, rotated = jnp.split(latent, [dim - config.dim], axis=-1)
    return jnp.concatenate([compressed, rope(rotated, rotation, config)], axis=-1)


@functools.partial(jax.jit, static_argnames="format")
def _write(
    kv_cache: jax.Array,
    latent: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    *,
    format: LatentFormat,
) -> jax.Array:
    stored = format.pack(latent, kv_scale)
    return write_tokens(kv_cache, stored, block_tables, seq_lens, query_lens, layer=layer)
