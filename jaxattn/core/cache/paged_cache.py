"""Paged caches in plain JAX: slot mapping, writes of tokens, and attention block by block."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Num

from jaxattn.core.cache.formats import BYTES, FP8_BITS
from jaxattn.core.numerics.online_softmax import OnlineSoftmax


class PageUnpacker(NamedTuple):
    """How bytes become tokens, where a page is of another order.

    Attributes:
        page_size: C.
        tokens: of pages [B, n, ...] their tokens [B, n * C, ...].
    """

    page_size: int
    tokens: Callable[[jax.Array], jax.Array]


def _page_size(kv_cache: jax.Array, unfold: PageUnpacker | None) -> int:
    if unfold is not None:
        return unfold.page_size
    return int(kv_cache.shape[-2 if kv_cache.ndim < 5 else -3])


def slot_mapping(
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    query_lens: Int[Array, "B"],
    *,
    tokens: int,
    page: int,
    num_pages: int,
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """(page, place in it) of each row's last tokens: token t is at seq_lens - query_lens + t.

    The page is `num_pages`, which a write drops, where nothing is to be written: in padding, behind
    `query_lens`, before the row's first position, beyond its table, and where that names no page
    from 0 on.

    Args:
        tokens: S.
        page: tokens of a page.
    """
    number = jnp.arange(tokens)
    position = (seq_lens - query_lens)[:, None] + number
    column = position // page
    written = (seq_lens > 0)[:, None] & (number < query_lens[:, None]) & (position >= 0)
    written &= column < block_tables.shape[1]
    pages = jnp.take_along_axis(block_tables, jnp.where(written, column, 0), axis=1)
    # An index past the end is dropped; a negative one would count from the end.
    return jnp.where(written & (pages >= 0), pages, num_pages), position % page


def write_tokens(
    cache: Num[Array, "..."],
    stored: Num[Array, "B S *D"],
    block_tables: Int[Array, "B M"],
    seq_lens: Int[Array, "B"],
    query_lens: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
) -> jax.Array:
    """The cache [L, N, C, ...], or of one layer, with each row's last tokens, as it stores them, at
    the places of `slot_mapping`."""
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    num_pages, page = cache.shape[len(layers) : len(layers) + 2]
    pages, inside = slot_mapping(
        block_tables, seq_lens, query_lens, tokens=stored.shape[1], page=page, num_pages=num_pages
    )
    return cache.at[(*layers, pages, inside)].set(stored, mode="drop", wrap_negative_indices=False)


def seen_lengths(
    seq_lens: Int[Array, "B"], query_lens: Int[Array, "B"] | None, *, tokens: int, most: int
) -> Int[Array, "B S"]:
    """How many of its row's positions each of the last tokens sees, its own included; 0 or fewer
    for a token without any: of padding, or whose own position would be negative.

    Args:
        query_lens: new tokens of each row, the first of S; S, if None.
        tokens: S.
        most: tokens that a row's block table has places for.
    """
    token = jnp.arange(tokens)
    new = jnp.full_like(seq_lens, tokens) if query_lens is None else query_lens
    limit = jnp.minimum((seq_lens - new)[:, None] + 1 + token, most)
    # A padding row's length may be so negative that the subtraction above wraps around.
    return jnp.where((token < new[:, None]) & (seq_lens > 0)[:, None], limit, 0)


def page_blocks(
    kv_cache: Num[Array, "*L N C Ds"] | Num[Array, "*L N two C Hk D"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array] = lambda kv: kv,
    begins: Int[Array, "B"] | None = None,
    unfold: PageUnpacker | None = None,
) -> tuple[
    Int[Array, "blocks B pages"],
    Int[Array, "blocks"],
    Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
]:
    """Tokens [begins, lengths) of every row in blocks of K, whole pages and about `block` tokens.

    A page is of latents [C, Ds] or of keys and values [2, C, Hk, D]. `unpack` makes latents
    [..., D] of what the cache stores [..., Ds]; of zeros, zeros. `unfold` is for pages of bytes in
    which tokens do not lie side by side.

    Returns:
        The blocks' pages, their first positions, and a function that reads one block of these.
        It takes (pages [B, n], first) and returns (kv [B, K, D] or [B, K, 2, Hk, D], positions
        [K]). kv is 0 outside of a row's tokens.
    """
    batch, width = block_tables.shape
    of_page = kv_cache.shape[1 if layer is None else 2 :]
    before = of_page[: len(of_page) // 3]  # the axes before a page's tokens: none, or the 2
    page = _page_size(kv_cache, unfold)
    stored = before + of_page[len(before) + 1 :]
    # Bytes of 0xFF are NaN in e4m3, bfloat16 and float32 alike.
    missing = {BYTES: 0xFF, FP8_BITS: -1}.get(kv_cache.dtype, jnp.nan)
    lengths = jnp.minimum(lengths, width * page)  # a table of whole blocks ends in others' pages
    # Whatever a table holds past the row's length is replaced before anything is addressed by it.
    owned = jnp.arange(width) < -(-lengths // page)[:, None]
    if begins is not None:
        owned &= jnp.arange(width) >= (begins // page)[:, None]
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
        if unfold is not None:
            kv = unfold.tokens(kv)
        else:
            kv = jnp.moveaxis(kv, 2 + len(before), 2).reshape(batch, per_block * page, *stored)
        zero = jnp.zeros((), kv.dtype)
        held = positions < lengths[:, None]
        if begins is not None:
            held &= positions >= begins[:, None]
        # Before it is unpacked: a NaN would reach the gradient of the scale.
        kv = jnp.where(held.reshape(*held.shape, *[1] * (kv.ndim - 2)), kv, zero)
        return unpack(kv), positions

    return tables, jnp.arange(steps, dtype=jnp.int32) * (per_block * page), read


def packed_pages(
    kv_cache: Num[Array, "*L N C Ds"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array] = lambda kv: kv,
) -> tuple[Int[Array, ""], Int[Array, "B"], Callable[[jax.Array], jax.Array]]:
    """The first `lengths` tokens of every row, one row behind another: whole pages of latents.

    Returns:
        How many blocks of K tokens, K about `block`, have all of them; where each row begins; and a
        function that reads a block by its number, [K, D]. What belongs to no row is 0.
    """
    batch, width = block_tables.shape
    page = _page_size(kv_cache, None)
    lengths = jnp.clip(lengths, 0, width * page)
    number = -(-lengths // page)
    ends = jnp.cumsum(number, dtype=jnp.int32)
    per_block = min(batch * width, max(1, block // page))
    missing = 0xFF if kv_cache.dtype == jnp.uint8 else jnp.nan

    @jax.named_scope("read_pages")
    def read(i: jax.Array) -> jax.Array:
        place = i * per_block + jnp.arange(per_block, dtype=jnp.int32)
        owner = jnp.sum(place[:, None] >= ends, axis=1, dtype=jnp.int32)
        owned, row = owner < batch, jnp.minimum(owner, batch - 1)
        column = jnp.where(owned, place - (ends - number)[row], 0)
        pages = jnp.where(owned, block_tables[row, column], 0)
        index = pages if layer is None else (jnp.asarray(layer, jnp.int32), pages)
        kv = kv_cache.at[index].get(mode="fill", fill_value=missing, wrap_negative_indices=False)
        held = (column * page)[:, None] + jnp.arange(page) < lengths[row][:, None]
        kv = jnp.where((held & owned[:, None])[..., None], kv, jnp.zeros((), kv.dtype))
        return unpack(kv.reshape(per_block * page, -1))

    return -(-ends[-1] // per_block), (ends - number) * page, read


def attend_pages(
    state: OnlineSoftmax,
    add_block: Callable[[OnlineSoftmax, jax.Array, jax.Array], OnlineSoftmax],
    kv_cache: Num[Array, "*L N C Ds"] | Num[Array, "*L N two C Hk D"],
    block_tables: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    layer: jax.Array | int | None,
    block: int,
    unpack: Callable[[jax.Array], jax.Array] = lambda kv: kv,
    begins: Int[Array, "B"] | None = None,
    unfold: PageUnpacker | None = None,
) -> OnlineSoftmax:
    """Feeds tokens [begins, lengths) of every row to `add_block(state, kv, positions [K])`.

    K is about `block` tokens, whole pages, and kv what `page_blocks` reads of them. Blocks outside
    of every row's tokens are not read, and one outside of a row's own leaves that row's state as it
    was, bit by bit. `kv` is 0 outside of a row's tokens. Without `begins` a row begins at 0.
    """
    pages, firsts, read_block = page_blocks(
        kv_cache, block_tables, lengths, layer=layer, block=block, unpack=unpack, begins=begins,
        unfold=unfold,
    )  # fmt: skip
    size = pages.shape[-1] * _page_size(kv_cache, unfold)

    def reached(first: jax.Array) -> jax.Array:
        """Which rows have a token in the block."""
        before_end = first < lengths
        return before_end if begins is None else before_end & (first > begins - size)

    @jax.checkpoint
    def read(state: OnlineSoftmax, pages: jax.Array, first: jax.Array) -> OnlineSoftmax:
        rows = reached(first)
        new = add_block(state, *read_block(pages, first))
        return jax.tree.map(
            lambda n, o: jnp.where(rows.reshape(-1, *[1] * (n.ndim - 1)), n, o), new, state
        )

    def step(state: OnlineSoftmax, xs: tuple[jax.Array, jax.Array]) -> tuple[OnlineSoftmax, None]:
        pages, first = xs
        return lax.cond(
            jnp.any(reached(first)), read, lambda state, *_: state, state, pages, first
        ), None

    return lax.scan(step, state, (pages, firsts))[0]
