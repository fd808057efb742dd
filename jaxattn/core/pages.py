"""What attention over a paged cache shares, decode and prefill: the checks of its arguments, its
products, and a softmax that is built up block by block over a row's pages.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Num

from jaxattn.core.softmax import Softmax


def page_blocks(
    kv_cache: Num[Array, "*L N C Ds"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array],
) -> tuple[
    Int[Array, "blocks B pages"],
    Int[Array, "blocks"],
    Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
]:
    """Tokens [0, lengths) of every row in blocks of K, whole pages and about `block` tokens.

    `unpack` makes latents [..., D] of what the cache stores [..., Ds]; of zeros, zeros.

    Returns:
        The blocks' pages, their first positions, and a function that reads one block of these:
        (pages [B, n], first) -> (kv [B, K, D], 0 past a row's length, positions [K]).
    """
    batch, width = block_tables.shape
    page, stored = kv_cache.shape[-2:]
    # Bytes of 0xFF are NaN in e4m3, bfloat16 and float32 alike.
    missing = 0xFF if kv_cache.dtype == jnp.uint8 else jnp.nan
    lengths = jnp.minimum(lengths, width * page)  # a table of whole blocks ends in others' pages
    # Whatever a table holds past the row's length is replaced before anything is addressed by it.
    owned = jnp.arange(width) < -(-lengths // page)[:, None]
    per_block = min(width, max(1, block // page))
    steps = -(-width // per_block)
    tables = jnp.where(owned, block_tables, 0)
    tables = jnp.pad(tables, ((0, 0), (0, steps * per_block - width)))
    tables = tables.reshape(batch, steps, per_block).swapaxes(0, 1)

    @jax.named_scope("read_pages")
    def read(pages: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        # One gather from the whole stack: a layer taken out first would be a copy. A page
        # that does not exist reads as NaN, not as another row's page.
        index = pages if layer is None else (jnp.asarray(layer, jnp.int32), pages)
        kv = kv_cache.at[index].get(mode="fill", fill_value=missing, wrap_negative_indices=False)
        positions = first + jnp.arange(per_block * page)
        kv = kv.reshape(batch, per_block * page, stored)
        zero = jnp.zeros((), kv.dtype)
        # Before it is unpacked: a NaN would reach the gradient of the scale.
        kv = jnp.where((positions < lengths[:, None])[..., None], kv, zero)
        return unpack(kv), positions

    return tables, jnp.arange(steps, dtype=jnp.int32) * (per_block * page), read


def attend_pages(
    state: Softmax,
    add_block: Callable[[Softmax, jax.Array, jax.Array], Softmax],
    kv_cache: Num[Array, "*L N C Ds"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array],
) -> Softmax:
    """Feeds tokens [0, lengths) of every row to `add_block(state, kv [B, K, D], positions [K])`.

    K is about `block` tokens, whole pages, and kv what `unpack` makes of them. Blocks past every
    row's length are not read, and one past a row's own leaves that row's state as it was, bit by
    bit. `kv` is 0 past a row's length.
    """
    pages, firsts, read_block = page_blocks(
        kv_cache, block_tables, lengths, layer=layer, block=block, unpack=unpack
    )

    @jax.checkpoint
    def read(state: Softmax, pages: jax.Array, first: jax.Array) -> Softmax:
        reached = first < lengths
        new = add_block(state, *read_block(pages, first))
        return jax.tree.map(
            lambda n, o: jnp.where(reached.reshape(-1, *[1] * (n.ndim - 1)), n, o), new, state
        )

    def step(state: Softmax, xs: tuple[jax.Array, jax.Array]) -> tuple[Softmax, None]:
        pages, first = xs
        return lax.cond(
            jnp.any(first < lengths), read, lambda state, *_: state, state, pages, first
        ), None

    return lax.scan(step, state, (pages, firsts))[0]
