"""The indexer's work: items of a few query tokens of one row, each with its tiles of 64 keys.

A token's scores are a row of scratch memory as wide as the block tables. `SCRATCH_BYTES` bounds it:
a call with more tokens goes through groups of items, one group after another.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.kernels.attention.tile_scheduler import PAGE

# Of scores, float32's bits, at a time. A single item may take more: 8 tokens of 2**22 keys do.
SCRATCH_BYTES = 2**27
# Columns of a product, packed pairs (query token, head) of an item, and tokens that they are of.
MOST_COLUMNS, MOST_TOKENS = 256, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTiling:
    """How a call is cut, which shapes alone decide.

    Attributes:
        tokens: of an item.
        row_items: items of a row; the last may have fewer tokens.
        width: numbers of a token's scores, a multiple of the tile.
        group: items whose scores are in memory at a time.
    """

    batch: int
    q_len: int
    heads: int
    tokens: int
    width: int

    @classmethod
    def of(cls, batch: int, q_len: int, heads: int, most_keys: int) -> "IndexTiling":
        most = max(1, min(MOST_COLUMNS // heads, MOST_TOKENS, q_len))
        tokens = -(-q_len // -(-q_len // most))
        width = -(-most_keys // PAGE) * PAGE
        return cls(batch=batch, q_len=q_len, heads=heads, tokens=tokens, width=width)

    @property
    def row_items(self) -> int:
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
        return -(-self.items // self.groups)

    @property
    def scratch_bytes(self) -> int:
        """Of the scores that are in memory at a time."""
        return self.group * self.tokens * self.width * 4

    def in_items(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] as [groups, items, tokens, ...]; what is behind the last is 0."""
        more = self.row_items * self.tokens - self.q_len
        x = jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(self.items, self.tokens, *x.shape[2:])
        more = self.groups * self.group - self.items
        x = jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(self.groups, self.group, *x.shape[1:])

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """[groups, items, tokens, ...] as [B, S, ...]."""
        x = x.reshape(-1, *x.shape[2:])[: self.items]
        x = x.reshape(self.batch, self.row_items * self.tokens, *x.shape[2:])
        return x[:, : self.q_len]


def visible_keys(
    seq_lens: jax.Array, query_lens: jax.Array | None, q_len: int, most_keys: int
) -> jax.Array:
    """int32 [B, S], the keys that each token sees; 0 of a padding row or token."""
    token = jnp.arange(q_len, dtype=jnp.int32)
    new = jnp.full_like(seq_lens, q_len) if query_lens is None else query_lens
    seen = seq_lens[:, None] - new[:, None] + token + 1
    seen = jnp.where(token < new[:, None], seen, 0)
    return jnp.clip(seen, 0, jnp.clip(seq_lens, 0, most_keys)[:, None])


def work_of(visible: jax.Array, top_k: int, parts: int) -> dict[str, Any]:
    """Where each part of a launch begins: `parts` of the items' tiles, equally many.

    An item whose tokens see at most `top_k` keys has no tiles: all of them are chosen.

    Args:
        visible: int32 [items, tokens].
    """
    most = visible.max(axis=1)
    tiles = jnp.where(most > top_k, -(-most // PAGE), 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles, dtype=jnp.int32)])
    part = jnp.arange(parts, dtype=jnp.int32)
    each, more = jnp.divmod(starts[-1], parts)
    begins = part * each + jnp.minimum(part, more)
    first = (starts[None, 1:] <= begins[:, None]).sum(axis=1, dtype=jnp.int32)
    return {"most_ref": most, "starts_ref": starts, "first_ref": first}
