"""The cache of an indexer's keys: argument checks, and the write of new keys."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int, Num

from jaxattn.core.cache.formats import INDEX_KEYS, IndexKeyFormat
from jaxattn.core.cache.paged_cache import write_tokens
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.varying_axes import refuse_explicit_axes


def check_index_cache(
    arguments: OpArguments,
    index_cache: Any,
    k_scale: Any,
    block_tables: Any,
    seq_lens: Any,
    layer: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Returns the checked cache, its scales, and the rows' block tables and lengths.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, or a concrete length or page
            is out of range; the message names it.
    """
    cache, block_tables, seq_lens = arguments.check_paged(
        index_cache, block_tables, seq_lens, layer, "index_cache", INDEX_KEYS
    )
    described = f"index_cache {tuple(cache.shape)} {cache.dtype.name}"
    if not IndexKeyFormat(cache.dtype, cache.shape[-1]).scaled:
        if k_scale is not None:
            raise ValueError(
                f"{arguments.op}: k_scale is only for a float8_e4m3fn cache, which {described} is "
                "not; drop k_scale"
            )
        return cache, None, block_tables, seq_lens
    if k_scale is None:
        raise ValueError(
            f"{arguments.op}: {described} needs k_scale=, float32 {tuple(cache.shape[:-1])}, by "
            "which each token's numbers are multiplied"
        )
    axes = "N C" if layer is None else "L N C"
    k_scale = arguments.check("k_scale", k_scale, axes, ("float32",))
    return cache, k_scale, block_tables, seq_lens


@jax.named_scope("mla_index_write")
def mla_index_write(
    index_cache: Num[Array, "L N C D"] | Num[Array, "N C D"],
    index_keys: Float[Array, "B S D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | None = None,
    k_scale: Float[Array, "L N C"] | Float[Array, "N C"] | None = None,
) -> Any:
    """Writes the new tokens' index keys into the cache, in place if the cache is donated.

    Positions, padding and traced lengths are as in `mla_cache_write`.

    Args:
        index_cache: A stack of layers (with `layer`) or one layer's pages. It shares
            `block_tables`, and thus the page size, with the cache of latents. A floating dtype, or
            float8_e4m3fn with `k_scale`.
        index_keys: Keys of the new tokens, normed and rotated.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the new ones included, at most M * C.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int or a traced scalar.
        k_scale: The scales of a float8_e4m3fn cache, one per token; donate them too. The op
            computes those of the new tokens, which are powers of two. FP8 numbers saturate, and Inf
            becomes NaN; the scale of a key with either is NaN.

    Returns:
        The cache, or with `k_scale` a pair of the cache and its scales.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
    """
    arguments = OpArguments("mla_index_write")
    keys = arguments.check("index_keys", index_keys, "B S D")
    given = block_tables, seq_lens, query_lens
    cache, k_scale, block_tables, seq_lens = check_index_cache(
        arguments, index_cache, k_scale, block_tables, seq_lens, layer
    )
    query_lens = arguments.check_new(given, seq_lens, "index_keys", keys, cache.shape[-2])
    refuse_explicit_axes(arguments.op, cache, keys, block_tables, seq_lens, query_lens)
    written, scales = _write(cache, k_scale, keys, block_tables, seq_lens, query_lens, layer)
    return written if scales is None else (written, scales)


@jax.jit
def _write(
    cache: jax.Array,
    k_scale: jax.Array | None,
    keys: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
) -> tuple[jax.Array, jax.Array | None]:
    stored, scales = IndexKeyFormat(cache.dtype, cache.shape[-1]).pack(keys)
    rows = block_tables, seq_lens, query_lens
    cache = write_tokens(cache, stored, *rows, layer=layer)
    if k_scale is None or scales is None:
        return cache, None
    return cache, write_tokens(k_scale, scales, *rows, layer=layer)
