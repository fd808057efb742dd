"""Alignment of tokens to expert tiles: the work list of the grouped products.

Tokens are sorted by expert. An expert's tokens begin at a multiple of 8 rows, so that whole groups
of 8 are stored and none touches a neighbor's. The list has only experts that some token chose.

Up to 8 tokens stay in place: an expert multiplies all of them, which costs as much as one, and no
gather is needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels.moe.tile_config import GROUP, compute_max_tiles, padded_rows

EXPERT, FROM, TO, GROUPS = range(4)  # rows of `tiles`
# Up to this many pairs each number is a count of comparisons, which XLA computes in one small
# kernel; sorts, scans and scatters take several.
COMPARED = 4096


class TokenAlignment(NamedTuple):
    """The work list of the products and the sum. All arrays are int32.

    Attributes:
        tiles: [4, M] for at least M tiles: expert, first row of the tokens, first row of the
            results, and the number of groups of 8 rows.
        total: [1], the number of tiles that exist, the first ones.
        positions: [T * K] or more: the row of each token's expert among the results, -1 for none.
        tokens: [R], the token of each row, any where there is none; None if tokens stay in place.
    """

    tiles: jax.Array
    total: jax.Array
    positions: jax.Array
    tokens: jax.Array | None


class GroupedGemmTile(NamedTuple):
    """The next item of a CTA."""

    expert: jax.Array
    source: jax.Array  # first row of its tokens
    target: jax.Array  # first row of its results
    groups: jax.Array  # of 8 tokens
    piece_index: jax.Array  # index among the expert's pieces of rows


def tokens_in_place(tokens: int) -> bool:
    """Whether the tokens are multiplied in place."""
    return tokens <= GROUP


def align_tokens(ids: jax.Array, experts: int, columns: int, group: int = GROUP) -> TokenAlignment:
    """Returns the list for `ids` [T, K]; an id that is not an expert's has no work. An expert's
    rows begin at a multiple of `group`; with a group larger than 8, few tokens are gathered too."""
    tokens, top_k = ids.shape
    in_place = group == GROUP and tokens_in_place(tokens)
    valid = (ids >= 0) & (ids < experts)
    flat = jnp.where(valid, ids, experts).reshape(-1)
    every = jnp.arange(experts, dtype=jnp.int32)
    compared = flat.size <= COMPARED
    if compared:
        counts = _count(flat[None, :] == every[:, None])
    else:
        counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    if in_place:
        counts = jnp.where(counts > 0, GROUP, 0)
        ranks = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), top_k)
    else:
        ranks = _ranks(flat) if compared else _ranks_by_sorting(flat, counts)
    padded = -(-counts // group) * group
    starts = _sums_before(padded)
    of_pairs = starts[jnp.minimum(flat, experts - 1)] + ranks
    positions = jnp.where(flat < experts, of_pairs, -1)

    each = -(-counts // columns)
    before = _sums_before(each)
    number = jnp.arange(compute_max_tiles(tokens, top_k, experts, columns), dtype=jnp.int32)
    # The expert of a tile is the number of experts that end before the tile.
    expert = _count((before + each)[None, :] <= number[:, None])
    expert = jnp.minimum(expert, experts - 1)
    first = (number - before[expert]) * columns
    row = starts[expert] + first
    groups = jnp.minimum(padded[expert] - first, columns) // GROUP
    tiles = jnp.stack([expert, jnp.zeros_like(row) if in_place else row, row, groups])
    of_rows = None
    if not in_place:
        rows = padded_rows(tokens, top_k, experts, columns, group)
        token = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), top_k)
        place = jnp.where(positions < 0, rows, positions)
        of_rows = jnp.zeros(rows, jnp.int32).at[place].set(token, mode="drop")
    return TokenAlignment(tiles, each.sum(dtype=jnp.int32)[None], positions, of_rows)


def _count(is_assigned: jax.Array) -> jax.Array:
    return is_assigned.sum(axis=1, dtype=jnp.int32)


def _sums_before(x: jax.Array) -> jax.Array:
    """Returns, for each number, the sum of those before it."""
    index = jnp.arange(x.size)
    return jnp.where(index[None, :] < index[:, None], x[None, :], 0).sum(axis=1, dtype=jnp.int32)


def _ranks(flat: jax.Array) -> jax.Array:
    """Returns, for each pair, how many pairs before it have its expert."""
    index = jnp.arange(flat.size)
    return _count((flat[None, :] == flat[:, None]) & (index[None, :] < index[:, None]))


def _ranks_by_sorting(flat: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the same for many pairs; those without an expert get any number."""
    order = jnp.argsort(flat, stable=True)
    before = _sums_before(counts)[jnp.minimum(flat, counts.size - 1)]
    in_order = jnp.arange(flat.size, dtype=jnp.int32) - before[order]
    return jnp.zeros(flat.size, jnp.int32).at[order].set(in_order)
