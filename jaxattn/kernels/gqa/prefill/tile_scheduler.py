"""The tiles of queries that blocks of `gqa_prefill` take, and which keys each of them walks over.

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
    """Packed rows of a head and what they attend to.

    Attributes:
        row, head, start: of the batch; of the queries; the first packed row.
        prefix: cached tokens of the row.
        low, high: positions from which and up to which, without, any query sees keys; between them
            all keys are there.
        seen_from: the position from which on all queries see what is not after them.
        prefix_low, new_low: the first step of the prefix, and of the new tokens.
        prefix_steps, steps: of the prefix, and of both together.
        bounds: the row's.
    """

    row: jax.Array
    head: jax.Array
    start: jax.Array
    prefix: jax.Array
    low: jax.Array
    high: jax.Array
    seen_from: jax.Array
    prefix_low: jax.Array
    new_low: jax.Array
    prefix_steps: jax.Array
    steps: jax.Array
    bounds: tuple[jax.Array, ...]


class GqaKeyTile(NamedTuple):
    """Keys that are worked on at a time.

    Attributes:
        cached: whether they are of the prefix.
        first: the first one's place in the prefix, or among the new tokens.
        position: its position.
        high: the position from which on the step has no keys.
    """

    cached: jax.Array
    first: jax.Array
    position: jax.Array
    high: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaPrefillTileScheduler:
    """The line of tiles: a row's heads `group` at a time, of these the tiles with the most keys
    first, so that keys and values that are worked on at one time stay in L2.

    Attributes:
        rows: packed rows of a tile.
        keys: of a step.
        packed: packed rows of a token.
        count: tiles of a head.
        heads: that have queries of their own, a multiple of `group`.
        window: keys that a query sees, its own included; None is all.
        lined: whether each tile has bounds of its own, with the place of its first new key.
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
        """The token of a packed row."""
        return row if self.packed == 1 else lax.div(row, jnp.int32(self.packed))

    def at(self, item: jax.Array, bounds_ref: Any, firsts_ref: Any = None) -> GqaQueryTile:
        """The line's tile at a place, with the bounds int32 [B, 5] of the rows, or [tiles, 6], and
        int32 [B, whole tiles] the first key that each packed row sees, or None."""
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
        # Of new tokens: the first that any of the queries sees, and the end of those.
        seen_from = first
        if firsts_ref is not None:
            seen_from = jnp.maximum(first, firsts_ref[row, start + (self.rows - 1)])
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
            row, head, start, prefix, low, prefix + keys, seen_from, prefix_low, new_low,
            prefix_steps, steps, bounds,
        )  # fmt: skip

    def step(self, tile: GqaQueryTile, i: jax.Array) -> GqaKeyTile:
        """The tile's i-th step."""
        cached = i < tile.prefix_steps
        new = tile.new_low + i - tile.prefix_steps
        first = jnp.where(cached, tile.prefix_low + i, new) * self.keys
        position = first + jnp.where(cached, 0, tile.prefix)
        return GqaKeyTile(cached, first, position, jnp.where(cached, tile.prefix, tile.high))

    def all_there(self, tile: GqaQueryTile, step: GqaKeyTile) -> jax.Array:
        """Whether none of the step's keys may be memory that nobody owns."""
        return (step.position >= tile.low) & (step.position + self.keys <= step.high)

    def all_seen(
        self, tile: GqaQueryTile, step: GqaKeyTile, first_row: jax.Array, rows: int
    ) -> jax.Array:
        """Whether each of so many packed rows sees all of the step's keys."""
        ahead = tile.prefix + tile.bounds[OFFSET]
        end = jnp.minimum(step.high, ahead + self.token_of(first_row) + 1)
        begin = tile.seen_from
        if self.window is not None:
            last = ahead + self.token_of(first_row + (rows - 1))
            begin = jnp.maximum(begin, last - (self.window - 1))
        return (step.position >= begin) & (step.position + self.keys <= end)

    def seen_first(self, tile: GqaQueryTile, first_row: jax.Array) -> jax.Array:
        """How many steps, from the first on, have keys that all packed rows from `first_row` on
        see, each as `all_seen` says; there is no window."""
        _, _, prefix, _, offset = tile.bounds[:5]
        end = jnp.minimum(tile.high, prefix + offset + self.token_of(first_row) + 1)
        cached = lax.div(jnp.minimum(prefix, end), self.keys) - tile.prefix_low
        cached = jnp.clip(cached, 0, tile.prefix_steps)
        new = lax.div(jnp.maximum(end - prefix, 0), self.keys) - tile.new_low
        seen = jnp.where(cached == tile.prefix_steps, cached + jnp.maximum(new, 0), cached)
        return jnp.where(self.step(tile, jnp.int32(0)).position >= tile.seen_from, seen, 0)
