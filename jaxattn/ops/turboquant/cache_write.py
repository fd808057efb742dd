"""The write into a TurboQuant cache: new tokens are quantized to codes, packed and stored.

kv_cache uint8 [L, N, Hk, C * slot_bytes]    pages of codes, in the order of
                                             turboquant/slot_layout.py
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.core.cache.paged_cache import slot_mapping
from jaxattn.core.dispatch import Implementation, dispatch_xla
from jaxattn.core.layer_index import LayerIndex, checkable_layer, split_layer_index
from jaxattn.core.turboquant.codec import TurboFormat, quantize
from jaxattn.core.turboquant.slot_layout import GROUP, pack, places
from jaxattn.core.validation.arguments import OpArguments
from jaxattn.core.validation.varying_axes import refuse_explicit_axes


def check_turbo_cache(
    arguments: OpArguments,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    layer: Array | int | LayerIndex | None,
    form: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks a cache with its block tables and lengths, by value if they are concrete.

    A traced row with more tokens than its table has places gets length 0, which marks padding.
    """
    if not isinstance(form, TurboFormat):
        raise TypeError(f"{arguments.op}: form must be a TurboFormat, got {type(form).__name__}")
    arguments.check_layer(kv_cache, checkable_layer(layer), "N Hk bytes")
    axes = "N Hk bytes" if layer is None else "L N Hk bytes"
    cache = arguments.check("kv_cache", kv_cache, axes, ("uint8",))
    num_pages, size = cache.shape[-3], cache.shape[-1]
    if size % (GROUP * form.slot_bytes):
        raise ValueError(
            f"{arguments.op}: kv_cache {cache.shape} must end in C * {form.slot_bytes} bytes, C a "
            f"multiple of {GROUP}, for {form.preset} at head_dim {form.head_dim}"
        )
    page = form.page_size(cache)
    return cache, *arguments.check_tables(block_tables, seq_lens, num_pages, page)


def check_head_dim(arguments: OpArguments, name: str, x: jax.Array, form: TurboFormat) -> None:
    if x.shape[-1] != form.head_dim:
        raise ValueError(
            f"{arguments.op}: {name} {x.shape} has head_dim {x.shape[-1]}, but the cache's format "
            f"has {form.head_dim}"
        )


@jax.named_scope("gqa_turbo_write")
def turbo_cache_write(
    kv_cache: UInt8[Array, "L N Hk bytes"] | UInt8[Array, "N Hk bytes"],
    k: Float[Array, "B S Hk D"],
    v: Float[Array, "B S Hk D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    *,
    form: TurboFormat,
    query_lens: Int[Array, "B"] | None = None,
    layer: Array | int | LayerIndex | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Quantizes the new tokens and writes them into the cache, in place if the cache is donated.

    Token t of row b goes to position seq_lens[b] - query_lens[b] + t. Nothing is written for a row
    with seq_lens 0, for t >= query_lens[b], or for a negative position. Other tokens' bytes do not
    change. No two rows may share a page that is written.

    Args:
        kv_cache: A stack of layers (with `layer`) or one layer's pages.
        k, v: Keys and values of the new tokens, the keys normed and rotated by position (RoPE).
        block_tables: int32 page ids. Those within a row's length must be from 0 to N - 1.
        seq_lens: int32 number of tokens of each row, the new ones included, at most M * C.
        form: Format of the cache.
        query_lens: int32 number of new tokens of each row, at most S. None means S.
        layer: Index into the stack, a Python int, a traced scalar or a `LayerIndex`.
        implementation: "xla", or None for the best available.

    Raises:
        TypeError, ValueError: An argument has a wrong dtype or shape, a concrete length or page is
            out of range, or two tokens are written to one place; the message names it.
    """
    arguments = OpArguments("turbo_cache_write")
    k = arguments.check("k", k, "B S Hk D")
    v = arguments.check("v", v, "B S Hk D")
    given = block_tables, seq_lens, query_lens
    kv_cache, block_tables, seq_lens = check_turbo_cache(
        arguments, kv_cache, block_tables, seq_lens, layer, form
    )
    check_head_dim(arguments, "k", k, form)
    query_lens = arguments.check_new(given, seq_lens, "k", k, form.page_size(kv_cache))
    refuse_explicit_axes(arguments.op, kv_cache, k, v, block_tables, seq_lens, query_lens)
    number = split_layer_index(layer)[2]

    def xla() -> jax.Array:
        return _write(kv_cache, k, v, block_tables, seq_lens, query_lens, number, form=form)

    return dispatch_xla(arguments.op, implementation, xla)


@functools.partial(jax.jit, static_argnames="form")
def _write(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    layer: jax.Array | int | None,
    *,
    form: TurboFormat,
) -> jax.Array:
    num_pages, kv_heads = kv_cache.shape[-3:-1]
    pages, inside = slot_mapping(
        block_tables, seq_lens, query_lens, tokens=k.shape[1], page=form.page_size(kv_cache),
        num_pages=num_pages,
    )  # fmt: skip
    bytes_at = jnp.asarray(places(form))[inside % GROUP]
    bytes_at += (inside // GROUP * (GROUP * form.slot_bytes))[..., None]
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    slots = pack(form, quantize(form, k, v))
    at = (*layers, pages[..., None, None], jnp.arange(kv_heads)[:, None], bytes_at[:, :, None])
    return kv_cache.at[at].set(slots, mode="drop", wrap_negative_indices=False)
