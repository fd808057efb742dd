"""The cache of grouped-query attention: pages of keys and values, argument checks and the write.

    kv_cache [L, N, 2, C, Hk, D]    keys at 0, values at 1 of a page's axis of two

Keys are stored normed and rotated, and floats as they are. In a float8_e4m3fn cache a value is the
stored number times its scale. `kv_scale` is a Python number for all, float32 [2] for keys and
values, or float32 [2, Hk] for each of their heads. An int8 cache holds the bits of such numbers,
which a CPU writes and reads much faster.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.core.cache.formats import FP8, FP8_BITS, KVFormat
from jaxattn.core.cache.paged_cache import slot_mapping
from jaxattn.core.layer_index import LayerIndex, checkable_layer, split_layer_index
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.array_checks import FLOATS, LEAST_FLOAT32, MOST_FLOAT32, check_positive
from jaxattn.core.validation.varying_axes import refuse_explicit_axes


def check_cache(
    arguments: OpArguments,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    layer: Array | int | LayerIndex | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks a cache with its block tables and lengths, by value if they are concrete.

    A traced row with more tokens than its table has places gets length 0, which marks padding.
    """
    arguments.check_layer(kv_cache, checkable_layer(layer), "N 2 C Hk D")
    axes = "N two C Hk D" if layer is None else "L N two C Hk D"
    cache = arguments.check("kv_cache", kv_cache, axes, (*FLOATS, FP8.name, FP8_BITS.name))
    num_pages, two, page = cache.shape[-5:-2]
    if two != 2:
        raise ValueError(
            f"{arguments.op}: kv_cache must be [L, N, 2, C, Hk, D], keys and values, got "
            f"{cache.shape}"
        )
    return cache, *arguments.check_tables(block_tables, seq_lens, num_pages, page)


def check_kv_scale(op: str, kv_cache: jax.Array, kv_scale: Any) -> jax.Array | None:
    """Returns the scales of an FP8 cache as float32 [2, Hk], or None for another cache.

    Raises:
        TypeError, ValueError: The scales are missing, superfluous, or have a wrong dtype or shape.
    """
    described = f"kv_cache {tuple(kv_cache.shape)} {kv_cache.dtype.name}"
    heads = kv_cache.shape[-2]
    if kv_cache.dtype not in (FP8, FP8_BITS):
        if kv_scale is not None:
            raise ValueError(
                f"{op}: kv_scale is only for a {FP8.name} cache, which {described} is not; drop "
                "kv_scale"
            )
        return None
    if kv_scale is None:
        raise ValueError(
            f"{op}: {described} needs kv_scale=, by which its numbers are multiplied: a Python "
            f"number, or float32 [2] or [2, Hk = {heads}] of keys and values"
        )
    if isinstance(kv_scale, int | float | np.floating) and not isinstance(kv_scale, bool):
        return jnp.full((2, heads), check_positive(op, "kv_scale", kv_scale), jnp.float32)
    found = str(getattr(kv_scale, "dtype", type(kv_scale).__name__))
    shape = getattr(kv_scale, "shape", None)
    if found != "float32" or shape not in ((2,), (2, heads)):
        raise TypeError(
            f"{op}: kv_scale must be a Python number, or float32 [2] or [2, Hk = {heads}], got "
            f"{found} {'' if shape is None else shape}".rstrip()
        )
    if isinstance(kv_scale, np.ndarray | jax.Array) and not isinstance(kv_scale, jax.core.Tracer):
        known = np.asarray(kv_scale)
        wrong = known[~((known >= LEAST_FLOAT32) & (known <= MOST_FLOAT32))]
        if wrong.size:
            raise ValueError(
                f"{op}: kv_scale {tuple(shape)} holds {wrong[0]}, but each number must be positive "
                "and finite"
            )
    return jnp.broadcast_to(jnp.asarray(kv_scale).reshape(2, -1), (2, heads))


@jax.named_scope("gqa_cache_write")
def gqa_cache_write(
    kv_cache: Float[Array, "L N 2 C Hk D"] | Float[Array, "N 2 C Hk D"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | LayerIndex | None = None,
    kv_scale: Array | float | None = None,
) -> Array:
    """Writes the new tokens' keys and values into the cache, in place if the cache is donated.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], or for a negative position. No two rows may share a
    page that is written.

    The op checks concrete tables and lengths. With traced ones, it writes nothing for a row whose
    seq_lens is negative or beyond M * C, or whose query_lens is beyond S, nor through a table entry
    outside 0 to N - 1. If two tokens fall into one place, either may win.

    Args:
        kv_cache: A stack of layers (with `layer`) or one layer's pages.
        k, v: Keys and values of the new tokens, the keys normed and rotated. They are cast to the
            cache's dtype. In FP8, finite numbers saturate and Inf becomes NaN.
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the new ones included, at most M * C.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int, a traced scalar or a `LayerIndex`.
        kv_scale: Positive scales of a float8_e4m3fn cache, a Python number, float32 [2] or [2, Hk];
            the op stores k / kv_scale[0] and v / kv_scale[1]. Required for that dtype only.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
    """
    arguments = OpArguments("gqa_cache_write")
    k = arguments.check("k", k, "B S Hk D")
    v = arguments.check("v", v, "B S Hk D")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = check_cache(
        arguments, kv_cache, block_tables, seq_lens, layer
    )
    query_lens = arguments.check_new(given, seq_lens, "k", k, kv_cache.shape[-3])
    kv_scale = check_kv_scale(arguments.op, kv_cache, kv_scale)
    refuse_explicit_axes(arguments.op, kv_cache, k, v, block_tables, seq_lens, query_lens, kv_scale)
    format = KVFormat.of(kv_cache.dtype, k.shape[-1])
    addressing = (block_tables, seq_lens, query_lens, split_layer_index(layer)[2])
    return _write(kv_cache, k, v, *addressing, kv_scale, format=format)


@functools.partial(jax.jit, static_argnames="format")
def _write(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    kv_scale: jax.Array | None,
    *,
    format: KVFormat,
) -> jax.Array:
    pages, inside = slot_mapping(
        block_tables, seq_lens, query_lens, tokens=k.shape[1], page=kv_cache.shape[-3],
        num_pages=kv_cache.shape[-5],
    )  # fmt: skip
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    both = format.pack(jnp.stack([k, v], axis=2), kv_scale)
    if both.dtype != kv_cache.dtype:
        both = lax.bitcast_convert_type(both, kv_cache.dtype)
    return kv_cache.at[(*layers, pages[..., None], jnp.arange(2), inside[..., None])].set(
        both, mode="drop", wrap_negative_indices=False
    )
