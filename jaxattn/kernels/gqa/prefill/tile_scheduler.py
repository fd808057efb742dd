"""The tile scheduler of `gqa_prefill`: query tiles of CTAs, and the keys of each tile.

Keys are counted in steps, those of the cached prefix first and then the new tokens'. A key's
position is its place in the whole sequence; a query's is that of its own token.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

FIRST, QUERIES, PREFIX, KEYS, OFFSET, BASE = range(6)  # columns of the rows' bounds


class GqaQueryTile(NamedTuple):
    """A tile of packed rows of a head, and the range of keys that they attend to.

    Attributes:
        row, head, start: The row of the batch, the head of the queries, and the first packed row.
        prefix: Cached tokens of the row.
        low, high: Positions from `low` up to `high`, exclusive, contain all keys that any query
            sees; all keys between them exist.
        unmasked_from: The position from which on all queries see every key that is not after them.
        prefix_low, new_low: The first step of the prefix, and of the new tokens.
        prefix_steps, steps: Steps of the prefix, and of both together.
        bounds: The row's bounds.
    """

    row: jax.Array
    head: jax.Array
    start: jax.Array
    prefix: jax.Array
    low: jax.Array
    high: jax.Array
    unmasked_from: jax.Array
    prefix_low: jax.Array
    new_low: jax.Array
    prefix_steps: jax.Array
    steps: jax.Array
    bounds: tuple[jax.Array, ...]


class GqaKeyTile(NamedTuple):
    """The keys of one step.

    Attributes:
        cached: Whether the keys are of the prefix.
        first: The first key's index in the prefix, or among the new tokens.
        position: The first key's position.
        high: The position from which on the step has no keys.
    """

    cached: jax.Array
    first: jax.Array
    position: jax.Array
    high: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillTileScheduler:
    """The order of all tiles: a row's heads `group` at a time, and of these the tiles with the most
    keys first. Concurrently used keys and values then stay in L2.

    Attributes:
        rows: Packed rows of a tile.
        keys: Keys of a step.
        packed: Packed rows of a token.
        count: Tiles of a head.
        heads: Heads with queries of their own, a multiple of `group`.
        window: The keys that a query sees, its own included; None means all.
        lined: Whether each tile has its own bounds, with the position of its first new key.
    """

    rows: int
    keys: int
    packed: int
    count: int
    heads: int
    group: int
    window: int | None
    lined: bool = False

    def token_of(self, row: Any) -> Any:
        """Returns the token of a packed row."""
        return row if self.packed == 1 else lax.div(row, jnp.int32(self.packed))

    def at(self, item: jax.Array, bounds_ref: Any, firsts_ref: Any = None) -> GqaQueryTile:
        """Returns the tile at position `item` of the order. `bounds_ref` has the rows' bounds,
        int32 [B, 5] or [tiles, 6]; `firsts_ref`, int32 [B, whole tiles] or None, has the first key
        that each packed row sees."""
        outer, inner = (f(item, self.count * self.group) for f in (lax.div, lax.rem))
        groups = self.heads // self.group
        row = lax.div(outer, groups)
        head = lax.rem(outer, groups) * self.group + lax.rem(inner, self.group)
        start = (self.count - 1 - lax.div(inner, self.group)) * self.rows
        place = lax.div(start, self.rows) if self.lined else row
        bounds = tuple(bounds_ref[place, i] for i in range(5 + self.lined))
        first, queries, prefix, keys, offset = bounds[:5]
        token = self.token_of(start)
        last = jnp.minimum(self.token_of(start + (self.rows - 1)), queries - 1)
        # Among new tokens: the first key that any of the queries sees, and the end of these keys.
        unmasked_from = first
        if firsts_ref is not None:
            unmasked_from = jnp.maximum(first, firsts_ref[row, start + (self.rows - 1)])
            first = jnp.maximum(first, firsts_ref[row, start])
        begin = first
        if self.window is not None:
            begin = jnp.maximum(first, token + offset - (self.window - 1))
        end = jnp.minimum(keys, last + offset + 1)
        works = last >= jnp.maximum(token, bounds[FIRST])
        low = first
        if self.window is not None:
            low = jnp.maximum(first, prefix + token + offset - (self.window - 1))
        new_low = lax.div(begin, self.keys)
        new_steps = jnp.maximum(lax.div(end + (self.keys - 1), self.keys) - new_low, 0)
        prefix_low = lax.div(low, self.keys)
        prefix_steps = lax.div(prefix + (self.keys - 1), self.keys) - prefix_low
        prefix_steps = jnp.where(works & (low < prefix), prefix_steps, 0)
        steps = jnp.where(works, prefix_steps + new_steps, 0)
        return GqaQueryTile(
            row, head, start, prefix, low, prefix + keys, unmasked_from, prefix_low, new_low,
            prefix_steps, steps, bounds,
        )  # fmt: skip

    def step(self, tile: GqaQueryTile, i: jax.Array) -> GqaKeyTile:
        """Returns the tile's i-th step."""
        cached = i < tile.prefix_steps
        new = tile.new_low + i - tile.prefix_steps
        first = jnp.where(cached, tile.prefix_low + i, new) * self.keys
        position = first + jnp.where(cached, 0, tile.prefix)
        return GqaKeyTile(cached, first, position, jnp.where(cached, tile.prefix, tile.high))

    def all_keys_exist(self, tile: GqaQueryTile, step: GqaKeyTile) -> jax.Array:
        """Whether all of the step's keys exist, so that none is memory that nobody owns."""
        return (step.position >= tile.low) & (step.position + self.keys <= step.high)

    def all_visible(
        self, tile: GqaQueryTile, step: GqaKeyTile, first_row: jax.Array, rows: int
    ) -> jax.Array:
        """Whether each of `rows` packed rows sees all of the step's keys."""
        ahead = tile.prefix + tile.bounds[OFFSET]
        end = jnp.minimum(step.high, ahead + self.token_of(first_row) + 1)
        begin = tile.unmasked_from
        if self.window is not None:
            last = ahead + self.token_of(first_row + (rows - 1))
            begin = jnp.maximum(begin, last - (self.window - 1))
        return (step.position >= begin) & (step.position + self.keys <= end)

    def count_unmasked_steps(self, tile: GqaQueryTile, first_row: jax.Array) -> jax.Array:
        """Returns how many steps, from the first on, satisfy `all_visible` for all packed rows from
        `first_row` on; there is no window."""
        _, _, prefix, _, offset = tile.bounds[:5]
        end = jnp.minimum(tile.high, prefix + offset + self.token_of(first_row) + 1)
        cached = lax.div(jnp.minimum(prefix, end), self.keys) - tile.prefix_low
        cached = jnp.clip(cached, 0, tile.prefix_steps)
        new = lax.div(jnp.maximum(end - prefix, 0), self.keys) - tile.new_low
        seen = jnp.where(cached == tile.prefix_steps, cached + jnp.maximum(new, 0), cached)
        return jnp.where(self.step(tile, jnp.int32(0)).position >= tile.unmasked_from, seen, 0)
