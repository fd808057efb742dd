"""The cache of grouped-query attention: pages of keys and values, checked and written.

    kv_cache [L, N, 2, C, Hk, D]    keys at 0, values at 1 of a page's axis of two

Keys are stored as queries meet them, normed and rotated. Numbers are stored as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxattn.core.checks import FLOATS, Arguments
from jaxattn.core.layers import LayerOf, number_to_check, taken_apart
from jaxattn.core.varying import refuse_explicit_axes


def check_cache(
    arguments: Arguments,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    layer: Array | int | LayerOf | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A cache and its addressing: tables and lengths are checked where they are known.

    A traced row of more tokens than its table has places comes back as one of 0, padding.
    """
    arguments.check_layer(kv_cache, number_to_check(layer), "N 2 C Hk D")
    axes = "N two C Hk D" if layer is None else "L N two C Hk D"
    cache = arguments.check("kv_cache", kv_cache, axes, FLOATS)
    num_pages, two, page = cache.shape[-5:-2]
    if two != 2:
        raise ValueError(
            f"{arguments.op}: kv_cache must be [L, N, 2, C, Hk, D], keys and values, got "
            f"{cache.shape}"
        )
    return cache, *arguments.check_tables(block_tables, seq_lens, num_pages, page)


@jax.named_scope("gqa_cache_write")
def gqa_cache_write(
    kv_cache: Float[Array, "L N 2 C Hk D"] | Float[Array, "N 2 C Hk D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | LayerOf | None = None,
) -> Array:
    """The cache with the new tokens' keys and values written; in place, where it is donated.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], or for a negative position. No two rows may share a
    page that is written.

    Concrete tables and lengths are checked. Traced ones cannot be: nothing is then written for a
    row whose seq_lens is negative or beyond M * C, or whose query_lens is beyond S, nor where the
    table names no page from 0 to N - 1. Where two tokens fall into one place, either may win.

    Args:
        kv_cache: a stack with `layer`, or one layer's pages.
        k, v: of the new tokens, keys normed and rotated; cast to the cache's dtype.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 tokens of each row, the new ones included, at most M * C.
        query_lens: int32 new tokens of each row, at most S; S, if None.
        layer: index into the stack, a Python int, a traced scalar or a `LayerOf`.

    Raises:
        TypeError, ValueError: an argument's dtype or shape does not fit, or a concrete length or
            page, or two tokens are written to one place; it is named.
    """
    arguments = Arguments("gqa_cache_write")
    k = arguments.check("k", k, "B S Hk D")
    v = arguments.check("v", v, "B S Hk D")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = check_cache(
        arguments, kv_cache, block_tables, seq_lens, layer
    )
    if query_lens is None:
        query_lens = jnp.full_like(seq_lens, k.shape[1])
    else:
        query_lens = arguments.check_query_lens(query_lens, "k", k)
    arguments.check_written(*given, k.shape[1], kv_cache.shape[-3])
    refuse_explicit_axes(arguments.op, kv_cache, k, v, block_tables, seq_lens, query_lens)
    return _write(kv_cache, k, v, block_tables, seq_lens, query_lens, taken_apart(layer)[2])


@jax.jit
def _write(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
) -> jax.Array:
    num_pages, page = kv_cache.shape[-5], kv_cache.shape[-3]
    tokens = jnp.arange(k.shape[1])
    position = (seq_lens - query_lens)[:, None] + tokens
    column = position // page
    written = (seq_lens > 0)[:, None] & (tokens < query_lens[:, None]) & (position >= 0)
    written &= column < block_tables.shape[1]
    pages = jnp.take_along_axis(block_tables, jnp.where(written, column, 0), axis=1)
    # An index past the end is dropped; a negative one would count from the end.
    pages = jnp.where(written & (pages >= 0), pages, num_pages)[..., None]
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    place = (position % page)[..., None]
    both = jnp.stack([k, v], axis=2).astype(kv_cache.dtype)
    return kv_cache.at[(*layers, pages, jnp.arange(2), place)].set(
        both, mode="drop", wrap_negative_indices=False
    )
