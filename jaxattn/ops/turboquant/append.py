"""The TurboQuant append op: norms, rotation by position, quantization and cache write."""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.core.dispatch import Implementation, dispatch_kernel
from jaxattn.core.layer_index import LayerIndex, split_layer_index
from jaxattn.core.numerics.rope import RopeConfig, Rotation
from jaxattn.core.turboquant.codec import TurboFormat
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import check_out_dtype
from jaxattn.core.validation.varying_axes import refuse_explicit_axes
from jaxattn.kernels.turboquant.cache.append import turbo_append_mosaic
from jaxattn.ops.gqa.append import check_new_heads, normed_and_rotated
from jaxattn.ops.turboquant.cache_write import check_head_dim, check_turbo_cache, turbo_cache_write


def turbo_append(
    q: Float[Array, "B S H E"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    weights: Float[Array, "*L W"] | None,
    kv_cache: UInt8[Array, "L N Hk bytes"] | UInt8[Array, "N Hk bytes"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    form: TurboFormat,
    rotation: Rotation,
    config: RopeConfig,
    eps: float = 1e-6,
    dtype: DTypeLike | None = None,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | LayerIndex | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S H D"], Array]:
    """Normalizes and rotates each row's new queries and keys, and caches codes of keys and values.

    The op is `gqa_append` for a cache of `turbo_cache_write`, for one token per row or a whole
    chunk.

    Args:
        q, k, v, weights, block_tables, seq_lens, rotation, config, eps, dtype, query_lens, layer:
            As for `gqa_append`.
        kv_cache: A stack of layers (with `layer`) or one layer's pages. Donate it to update it in
            place.
        form: Format of the cache.
        implementation: "mosaic_gpu", "mosaic_gpu_interpret", "xla", or None for the best available.
            The kernel requires D 64, 128 or 256, and even H and Hk if D is 64.

    Returns:
        (queries [B, S, H, D], rotated by position but not by the Hadamard matrix; the cache).

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
        Refusal: The requested implementation does not support this call; the message says why.
    """
    op = "turbo_append"
    arguments = OpArguments(op)
    q, k, v, weights, eps = check_new_heads(
        arguments, q, k, v, weights, rotation=rotation, config=config, eps=eps, layer=layer
    )
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = check_turbo_cache(
        arguments, kv_cache, block_tables, seq_lens, layer, form
    )
    check_head_dim(arguments, "k", k, form)
    query_lens = arguments.check_written(given, "k", k, form.page_size(kv_cache))
    refuse_explicit_axes(op, q, k, v, weights, kv_cache, block_tables, seq_lens, query_lens)
    out_dtype = check_out_dtype(arguments.op, dtype, q.dtype)
    number = split_layer_index(layer)[2]

    def xla() -> tuple[jax.Array, jax.Array]:
        queries, keys = normed_and_rotated(
            q, k, weights, layer=number, rotation=rotation, config=config, eps=eps
        )
        written = turbo_cache_write(
            kv_cache,
            keys,
            v,
            block_tables,
            seq_lens,
            form=form,
            query_lens=query_lens,
            layer=number,
        )
        return queries.astype(out_dtype), written

    def mosaic(interpret: bool) -> tuple[jax.Array, jax.Array]:
        return turbo_append_mosaic(
            q,
            k,
            v,
            weights,
            kv_cache,
            block_tables,
            seq_lens,
            form=form,
            angles=rotation.angles,
            interleaved=config.interleaved,
            eps=eps,
            dtype=out_dtype,
            query_lens=query_lens,
            layer=number,
            interpret=interpret,
        )

    with jax.named_scope(op):
        return dispatch_kernel(op, implementation, mosaic, xla)
