"""The indexer's work tiles: items of a few query tokens of one row, each with its tiles of 64 keys.

A token's scores are a row of scratch memory as wide as the block tables. `SCRATCH_BYTES` bounds
this memory: a call with more tokens processes groups of items, one group after another.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels.attention.split_kv_schedule import PAGE

# Bytes of scores, as float32's bits, at a time. A single item may take more: 8 tokens of 2**22 keys
# do.
SCRATCH_BYTES = 2**27
# The most columns of a product, packed pairs (query token, head) of an item, and the most tokens of
# an item.
MOST_COLUMNS, MOST_TOKENS = 256, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTiling:
    """The tiling of a call, which depends only on shapes.

    Attributes:
        tokens: Tokens of an item; the last item of a row may have fewer.
        most_keys: The most keys that a block table has room for.
    """

    batch: int
    q_len: int
    heads: int
    tokens: int
    most_keys: int

    @classmethod
    def of(cls, batch: int, q_len: int, heads: int, most_keys: int) -> "IndexTiling":
        most = max(1, min(MOST_COLUMNS // heads, MOST_TOKENS, q_len))
        tokens = -(-q_len // -(-q_len // most))
        return cls(batch=batch, q_len=q_len, heads=heads, tokens=tokens, most_keys=most_keys)

    @property
    def width(self) -> int:
        """The numbers of a token's scores, a multiple of the tile."""
        return -(-self.most_keys // PAGE) * PAGE

    @property
    def row_items(self) -> int:
        """The number of items per row."""
        return -(-self.q_len // self.tokens)

    @property
    def items(self) -> int:
        return self.batch * self.row_items

    @property
    def columns(self) -> int:
        return self.tokens * self.heads

    @property
    def groups(self) -> int:
        most = max(1, SCRATCH_BYTES // (self.tokens * self.width * 4))
        return -(-self.items // most)

    @property
    def group(self) -> int:
        """The number of items whose scores are in memory at a time."""
        return -(-self.items // self.groups)

    @property
    def scratch_bytes(self) -> int:
        """The bytes of the scores that are in memory at a time."""
        return self.group * self.tokens * self.width * 4

    def in_items(self, x: jax.Array) -> jax.Array:
        """Returns [B, S, ...] as [groups, items, tokens, ...], padded with 0."""
        more = self.row_items * self.tokens - self.q_len
        x = jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(self.items, self.tokens, *x.shape[2:])
        more = self.groups * self.group - self.items
        x = jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(self.groups, self.group, *x.shape[1:])

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """Returns [groups, items, tokens, ...] as [B, S, ...]."""
        x = x.reshape(-1, *x.shape[2:])[: self.items]
        x = x.reshape(self.batch, self.row_items * self.tokens, *x.shape[2:])
        return x[:, : self.q_len]


def visible_keys(length: Any, new: Any, token: Any, most_keys: int) -> Any:
    """Returns the number of keys that a token sees, for scalars or arrays. It is 0 for a padding
    row or token, and in a row that is longer than its block table.

    Args:
        length: The length of the row.
        new: The number of new tokens of the row.
        token: The token's index among them.
        most_keys: The most keys that a block table has room for.
    """
    within = (length > 0) & (length <= most_keys) & (token < new)
    return jnp.where(within, jnp.maximum(length - new + token + 1, 0), 0)


@dataclasses.dataclass(frozen=True)
class IndexRows:
    """A group's items, as a CTA reads them.

    Attributes:
        query_lens_ref: None: every row has all S tokens.
        first_ref: The group's first item, if there are several groups.
    """

    tiling: IndexTiling
    lens_ref: Any
    query_lens_ref: Any
    first_ref: Any

    def row(self, item: jax.Array) -> jax.Array:
        """Returns the item's row; the last row for an item after the last."""
        return jnp.minimum(self._item(item)[0], self.tiling.batch - 1)

    def visible(self, item: jax.Array, token: Any) -> jax.Array:
        """Returns the number of keys that a token of an item sees."""
        row, part = self._item(item)
        here, q_len = self.row(item), self.tiling.q_len
        new = q_len if self.query_lens_ref is None else self.query_lens_ref[here]
        number = part * self.tiling.tokens + token
        seen = visible_keys(self.lens_ref[here], new, number, self.tiling.most_keys)
        return jnp.where(row < self.tiling.batch, seen, 0)

    def most(self, item: jax.Array) -> jax.Array:
        """Returns the most keys that any token of an item sees."""
        seen = [self.visible(item, token) for token in range(self.tiling.tokens)]
        return functools.reduce(jnp.maximum, seen)

    def _item(self, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the item's row and its index within the row."""
        item = item if self.first_ref is None else item + self.first_ref[0]
        each = self.tiling.row_items
        return (item, jnp.int32(0)) if each == 1 else (lax.div(item, each), lax.rem(item, each))


def tiles_of(most: Any, top_k: int) -> Any:
    """Returns the number of an item's tiles. An item whose tokens see at most `top_k` keys has
    none: all of them are selected."""
    return jnp.where(most > top_k, (most + (PAGE - 1)) // PAGE, 0)


def part_begins(visible: jax.Array, top_k: int, parts: int) -> jax.Array:
    """Returns int32 [3, parts + 1]: each part's first item, the tiles before that item, and the
    total number of tiles. The parts' numbers of tiles differ by at most one.

    Args:
        visible: int32 [items, tokens].
    """
    tiles = tiles_of(visible.max(axis=1), top_k)
    behind = jnp.cumsum(tiles, dtype=jnp.int32)
    total = behind[-1]
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    begins = part * (total // parts) + jnp.minimum(part, total % parts)
    first = (behind[None] <= begins[:, None]).sum(axis=1, dtype=jnp.int32)
    first = jnp.minimum(first, len(tiles) - 1)
    return jnp.stack([first, (behind - tiles)[first], jnp.full_like(first, total)])
