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
    """The conversion of pages of bytes to tokens, for pages with a layout of their own.

    Attributes:
        page_size: C.
        tokens: Converts pages [B, n, ...] to their tokens [B, n * C, ...].
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
    """Returns (page, place in it) of each row's last tokens; t is at seq_lens - query_lens + t.

    The page is `num_pages`, which a write drops, for padding, tokens from `query_lens` on,
    positions before the row's first or beyond its table, and table entries below 0.

    Args:
        tokens: S.
        page: Number of tokens per page.
    """
    number = jnp.arange(tokens)
    position = (seq_lens - query_lens)[:, None] + number
    column = position // page
    written = (seq_lens > 0)[:, None] & (number < query_lens[:, None]) & (position >= 0)
    written &= column < block_tables.shape[1]
    pages = jnp.take_along_axis(block_tables, jnp.where(written, column, 0), axis=1)
    # An out-of-range index is dropped, whereas a negative one would count from the end.
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
    """Writes each row's last tokens, in their stored form, to the places of `slot_mapping`.

    The cache is [L, N, C, ...], or that of one layer.
    """
    layers = () if layer is None else (jnp.asarray(layer, jnp.int32),)
    num_pages, page = cache.shape[len(layers) : len(layers) + 2]
    pages, inside = slot_mapping(
        block_tables, seq_lens, query_lens, tokens=stored.shape[1], page=page, num_pages=num_pages
    )
    return cache.at[(*layers, pages, inside)].set(stored, mode="drop", wrap_negative_indices=False)


def seen_lengths(
    seq_lens: Int[Array, "B"], query_lens: Int[Array, "B"] | None, *, tokens: int, max_tokens: int
) -> Int[Array, "B S"]:
    """Returns how many of its row's positions each of the last tokens sees, its own included.

    The number is 0 or negative for padding, and for a token whose own position would be negative.

    Args:
        query_lens: Number of new tokens of each row, which come first among S. None means S.
        tokens: S.
        max_tokens: Number of tokens that a row's block table can hold.
    """
    token = jnp.arange(tokens)
    num_new = jnp.full_like(seq_lens, tokens) if query_lens is None else query_lens
    limit = jnp.minimum((seq_lens - num_new)[:, None] + 1 + token, max_tokens)
    # A padding row's length may be so negative that the subtraction above wraps around.
    return jnp.where((token < num_new[:, None]) & (seq_lens > 0)[:, None], limit, 0)


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
    """Divides tokens [begins, lengths) of every row into blocks of K, about `block`, whole pages.

    A page holds latents [C, Ds], or keys and values [2, C, Hk, D]. `unpack` converts stored latents
    [..., Ds] to [..., D]; it must map zeros to zeros. `unfold` is for pages of bytes in which
    tokens are not contiguous.

    Returns:
        The blocks' pages, their first positions, and a function that reads one block: it takes
        (pages [B, n], first) and returns (kv [B, K, D] or [B, K, 2, Hk, D], positions [K]). kv is 0
        outside a row's tokens.
    """
    batch, width = block_tables.shape
    of_page = kv_cache.shape[1 if layer is None else 2 :]
    before = of_page[: len(of_page) // 3]  # the axes before a page's tokens: none, or the 2
    page = _page_size(kv_cache, unfold)
    stored = before + of_page[len(before) + 1 :]
    # Bytes of 0xFF are NaN in e4m3, bfloat16 and float32.
    missing = {BYTES: 0xFF, FP8_BITS: -1}.get(kv_cache.dtype, jnp.nan)
    lengths = jnp.minimum(lengths, width * page)  # a table of whole blocks ends in others' pages
    # Entries of a table past the row's length are replaced before they address anything.
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
        # One gather from the whole stack: taking a layer out first would copy it. A page that does
        # not exist reads as NaN, not as another row's page.
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
        # Masked before unpacking: a NaN would reach the gradient of the scale.
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
    """Packs the first `lengths` tokens of all rows one after another, as whole pages of latents.

    Returns:
        The number of blocks of K tokens, K about `block`, that hold all of them; where each row
        begins; and a function that reads a block by its index, [K, D]. Tokens of no row are 0.
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
    """Passes tokens [begins, lengths) of every row to `add_block(state, kv, positions [K])`.

    K is about `block` tokens, whole pages, and `kv` is what `page_blocks` reads, 0 outside a row's
    tokens. Blocks outside every row's tokens are not read. A block outside a row's own tokens
    leaves that row's state unchanged, bit for bit. Without `begins` a row begins at 0.
    """
    pages, firsts, read_block = page_blocks(
        kv_cache, block_tables, lengths, layer=layer, block=block, unpack=unpack, begins=begins,
        unfold=unfold,
    )  # fmt: skip
    size = pages.shape[-1] * _page_size(kv_cache, unfold)

    def reached(first: jax.Array) -> jax.Array:
        """Returns which rows have a token in the block."""
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
