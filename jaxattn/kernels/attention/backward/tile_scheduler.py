"""The tile scheduler of `attention_backward`: key tiles of CTAs, and the queries of each tile.

The mainloop takes a tile's queries from the last to the first, and CTAs take a head's tiles from
the first keys to the last. So the longest tiles come first, and a head's concurrent tiles are at
about the same queries. Their loads meet in L2, and each tile adds to a query's gradient shortly
after the tile before it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels.attention.backward.tile_config import BackwardTileConfig


class KeyTile(NamedTuple):
    """A tile of keys of one key-value head, and the steps of queries that see them.

    Attributes:
        row, head, number: The row of the batch, the key-value head, and the index of the tile
            within the head.
        end: The end (exclusive) of the query tiles of its steps.
        full: The query tile from which on a query may not see the tile's first keys.
        per_head: Steps per query head.
    """

    row: jax.Array
    head: jax.Array
    number: jax.Array
    end: jax.Array
    full: jax.Array
    per_head: jax.Array


class BackwardRanges(NamedTuple):
    """The arrays that decide which queries see which keys.

    Attributes:
        tiles: int32 [B, N, 2], `KeyTile.end` and `full` of each tile.
        turns: int32 [B, M], the first key tile that each query tile sees.
        first: int32 [B, M * queries], the first key that each query sees; None: all see key 0.
    """

    tiles: jax.Array
    turns: jax.Array
    first: jax.Array | None


def ranges_of(
    lengths: jax.Array, first: jax.Array | None, tokens: int, config: BackwardTileConfig
) -> BackwardRanges:
    """Returns the ranges of rows of `tokens` tokens, whose token t sees keys from first[t] to t.

    Args:
        lengths: int32 [B].
        first: int32 [B, T], not decreasing, or None.
    """
    keys, queries = config.keys, config.queries
    count, steps = -(-tokens // keys), -(-tokens // queries)
    begins = jnp.arange(count, dtype=jnp.int32) * keys
    has_keys = begins < lengths[:, None]
    if first is None:
        num_queries = jnp.broadcast_to(lengths[:, None], has_keys.shape)
        full = jnp.full_like(num_queries, steps)
        turns = jnp.zeros((lengths.shape[0], steps), jnp.int32)
    else:
        first = jnp.where(jnp.arange(tokens) < lengths[:, None], first, jnp.int32(2**30))
        # The number of queries that may see each tile's last key, and its first one or one before
        # it.
        num_queries, full = (
            (first[:, :, None] <= key).sum(axis=1, dtype=jnp.int32)
            for key in (begins + keys - 1, begins)
        )
        full = full // queries
        first = jnp.pad(first, ((0, 0), (0, steps * queries - tokens)), constant_values=2**30)
        turns = first[:, ::queries] // keys
    end = jnp.where(has_keys, (num_queries + queries - 1) // queries, 0)
    return BackwardRanges(jnp.stack([end, full], axis=-1).astype(jnp.int32), turns, first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTileScheduler:
    """The order of all key tiles.

    Attributes:
        keys, queries: Keys of a tile and queries of a step.
        count: Tiles per key-value head.
        heads: Key-value heads.
        group: Query heads per key-value head.
        together: Key-value heads, of all rows, that are worked on at one time; a divisor of
            rows * heads.
    """

    keys: int
    queries: int
    count: int
    heads: int
    group: int
    together: int

    def at(self, item: jax.Array, tiles_ref: Any) -> KeyTile:
        """The tile at position `item` of the order."""
        outer, inner = (f(item, jnp.int32(self.count * self.together)) for f in (lax.div, lax.rem))
        number, place = (f(inner, jnp.int32(self.together)) for f in (lax.div, lax.rem))
        row, head = (
            f(outer * self.together + place, jnp.int32(self.heads)) for f in (lax.div, lax.rem)
        )
        end, full = tiles_ref[row, number, 0], tiles_ref[row, number, 1]
        begin = lax.div(number * self.keys, jnp.int32(self.queries))
        return KeyTile(row, head, number, end, full, jnp.maximum(end - begin, 0))

    def steps(self, tile: KeyTile) -> jax.Array:
        return tile.per_head * self.group

    def step(self, tile: KeyTile, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The (query head, query tile) of the tile's i-th step."""
        if self.group == 1:
            return tile.head, tile.end - 1 - i
        # The steps alternate between the group's heads: head by head, a short tile would wait for a
        # long one at each head.
        query_tile, group_head = (f(i, jnp.int32(self.group)) for f in (lax.div, lax.rem))
        return tile.head * self.group + group_head, tile.end - 1 - query_tile

    def masked(self, tile: KeyTile, m: jax.Array) -> jax.Array:
        """Whether some query of query tile m does not see some key of the tile."""
        is_below_diagonal = m * self.queries >= tile.number * self.keys + (self.keys - 1)
        return jnp.logical_not(is_below_diagonal & (m < tile.full))
