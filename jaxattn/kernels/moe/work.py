"""Which rows of weights meet which tokens: the list that the grouped products walk over.

Tokens are sorted by expert. An expert's begin at a multiple of 8 rows, so that whole groups of 8
are stored and none touches a neighbour's. Only experts that somebody chose are in the list.

Up to 8 tokens stay as they are (`shared`): an expert multiplies all of them, which costs as much as
one, and nothing has to be gathered.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels.moe.config import GROUP, most_tiles, padded_rows

EXPERT, FROM, TO, GROUPS = range(4)  # columns of `tiles`


class Work(NamedTuple):
    """What the products and the sum have to know. int32.

    Attributes:
        tiles: [most tiles, 4] expert, first row of the tokens, first row of the results, and how
            many groups of 8 rows there are.
        count: [1] tiles that there are.
        positions: [T, K] the row of each token's expert among the results, -1 for no expert.
        tokens: [R] the token of each row, any where there is none; None where they stay in place.
    """

    tiles: jax.Array
    count: jax.Array
    positions: jax.Array
    tokens: jax.Array | None


def stays(tokens: int) -> bool:
    """Whether the tokens are multiplied where they are."""
    return tokens <= GROUP


def work_list(ids: jax.Array, experts: int, columns: int) -> Work:
    """The list for `ids` [T, K]; an id that is no expert's has no work."""
    tokens, top_k = ids.shape
    pairs = tokens * top_k
    valid = (ids >= 0) & (ids < experts)
    flat = jnp.where(valid, ids, experts).reshape(-1)
    counts = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    counts = counts.at[experts].set(0)
    in_place = stays(tokens)
    if in_place:
        counts = jnp.where(counts > 0, GROUP, 0)
    padded = -(-counts // GROUP) * GROUP
    starts = jnp.cumsum(padded) - padded
    if in_place:
        ranks = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), top_k)
    else:
        order = jnp.argsort(flat, stable=True)
        before = jnp.cumsum(counts) - counts
        in_order = jnp.arange(pairs, dtype=jnp.int32) - before[flat[order]]
        ranks = jnp.zeros(pairs, jnp.int32).at[order].set(in_order)
    positions = jnp.where(valid, (starts[flat] + ranks).reshape(ids.shape), -1)

    each = -(-counts // columns)
    ends = jnp.cumsum(each)
    number = jnp.arange(most_tiles(tokens, top_k, experts, columns), dtype=jnp.int32)
    expert = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    first = (number - (ends - each)[expert]) * columns
    row = starts[expert] + first
    groups = jnp.minimum(padded[expert] - first, columns) // GROUP
    tiles = jnp.stack([expert, jnp.zeros_like(row) if in_place else row, row, groups], axis=1)
    of_rows = None
    if not in_place:
        rows = padded_rows(tokens, top_k, experts, columns)
        token = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), top_k)
        place = jnp.where(positions < 0, rows, positions).reshape(-1)
        of_rows = jnp.zeros(rows, jnp.int32).at[place].set(token, mode="drop")
    return Work(tiles.astype(jnp.int32), ends[-1:].astype(jnp.int32), positions, of_rows)
