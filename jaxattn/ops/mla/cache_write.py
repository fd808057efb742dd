"""The latent cache of MLA: the formats in which it stores a token's R + P numbers, and the write.

The cache's dtype determines its format (R is kv_lora_rank, P is qk_rope_head_dim):

    bfloat16, float16,   R + P numbers as they are
    float32, float64
    float8_e4m3fn        R + P e4m3 numbers; a value is its number times the cache's `kv_scale`
    uint8                FlashMLA's block-scaled bytes, 656 for 512 + 64: R e4m3 numbers, R / 128
                         float32 scales (a power of two for each 128 dims), P bfloat16 numbers

`LatentFormat` gives the shape and the bytes of each format, packs latents and unpacks stored ones.
Finite numbers beyond 448 times their scale saturate. NaN stays NaN. Inf, which e4m3 lacks, becomes
NaN, except in the bfloat16 numbers of a uint8 cache. NaN and Inf do not affect the scale of
neighboring numbers.
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
    """Returns the cache's format and its scale as an array, or raises if the dims do not fit."""
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
    """Returns the format to write; a block-scaled cache's R follows from the two widths."""
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
    """Writes the new tokens' latents into the cache and returns it.

    The write is in place if the cache is donated, except for float8_e4m3fn on a CPU: there jax
    0.11.2 widens the whole cache around the write.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], or for a negative position. No two rows may share a
    page that is written.

    The op checks concrete tables and lengths. With traced ones, it writes nothing for a row whose
    seq_lens is negative or beyond M * C, or whose query_lens is beyond S, nor through a table entry
    outside 0 to N - 1. If two tokens fall into one place, either may win.

    On a GPU one kernel rotates, quantizes and writes. For a block-scaled cache, another kernel
    finds the scales first.

    Args:
        kv_cache: A stack of layers (with `layer`) or one layer's pages, in a format of
            `LatentFormat`. Ds is D, or 656 bytes for 512 + 64 in a block-scaled cache (uint8). FP8
            numbers saturate, and Inf becomes NaN.
        latent: Latents of the new tokens: R dims, then P dims. With `rotation` the op rotates the
            P dims; without it, they must be rotated already.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the new ones included, at most M * C.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int or a traced scalar.
        kv_scale: Factor of a float8_e4m3fn cache, a Python number or a float32 scalar; the op
            stores latent / kv_scale. Required for that dtype only.
        rotation: `jaxattn.rotation` of the tokens' positions [B, S], by which the op rotates the
            last P dims. None if they are rotated already.
        config: Configuration of `rotation`; P is `config.dim`.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
    """
    arguments = OpArguments("mla_cache_write")
    latent = arguments.check("latent", latent, "B S D")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = arguments.check_paged(
        kv_cache, block_tables, seq_lens, layer
    )
    format, kv_scale = _written_format(arguments, kv_cache, latent, kv_scale)
    if rotation is not None or config is not None:
        latent = _apply_rope(arguments.op, latent, rotation, config, format)
    query_lens = arguments.check_new(given, seq_lens, "latent", latent, kv_cache.shape[-2])
    refuse_explicit_axes(arguments.op, kv_cache, latent, block_tables, seq_lens, query_lens)
    return _write(
        kv_cache, latent, block_tables, seq_lens, query_lens, layer, kv_scale, format=format
    )


def _apply_rope(
    op: str,
    latent: jax.Array,
    rotation: Rotation | None,
    config: RopeConfig | None,
    format: LatentFormat,
) -> jax.Array:
    """Returns `latent` with its last dims rotated, or raises if the arguments do not fit."""
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
