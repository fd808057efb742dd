"""Pieces of several prompts, packed into lines: which tokens of which row each line holds.

    tokens [L, T]     row 0   row 0   row 0   row 1   row 2   row 2   -
    rows   [L]          0       0       0       1       2       2     B

A row's tokens fill its lines one after another, so only its last line has padding. Computations per
token treat all lines as one flat list. An op that only supports rows treats each line as a row,
whose earlier lines are its prefix.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLines:
    """The lines of B rows.

    Attributes:
        rows: int32 [L], the row of each line, ascending; B for a line without a row.
        tokens: T, the number of tokens per line.
        begins: int32 [L], number of tokens of the row's piece in lines before this one.
        query_lens: int32 [L], number of tokens in the line; the rest is padding.
        seq_lens: int32 [L], length of the row up to the line's last token; 0 without a row.
        offsets: int32 [B + 1], where each row's lines begin in the flat list, padding included.
        last: int32 [B], the index of each row's last token in the flat list; undefined for a row
            without tokens.
        one_each: Whether there are B lines, one for each row.
    """

    rows: Int[Array, "L"]
    begins: Int[Array, "L"]
    query_lens: Int[Array, "L"]
    seq_lens: Int[Array, "L"]
    offsets: Int[Array, "B+1"]
    last: Int[Array, "B"]
    tokens: int = dataclasses.field(metadata={"static": True})
    one_each: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        rows: Int[Array, "L"] | None,
        query_lens: Int[Array, "B"],
        seq_lens: Int[Array, "B"],
        tokens: int,
    ) -> Self:
        """Returns the lines, of T tokens, for rows with `query_lens` new tokens of `seq_lens`.

        `rows` None means one line for each row.
        """
        batch, one_each = query_lens.shape[0], rows is None
        if rows is None:
            rows = jnp.arange(batch, dtype=jnp.int32)
        # Computed by comparison, which is one kernel, whereas a search is a loop.
        first = jnp.sum(rows < jnp.arange(batch + 1)[:, None], axis=1, dtype=jnp.int32)
        owned = (rows >= 0) & (rows < batch)
        row = jnp.where(owned, rows, 0)
        begins = jnp.where(owned, (jnp.arange(rows.shape[0]) - first[row]) * tokens, 0)
        new = jnp.where(owned, jnp.clip(query_lens[row] - begins, 0, tokens), 0)
        lens = jnp.where(new > 0, seq_lens[row] - query_lens[row] + begins + new, 0)
        offsets = first * tokens
        last = offsets[:-1] + jnp.maximum(query_lens - 1, 0)
        return cls(rows, begins, new, lens, offsets, last, tokens, one_each)

    def split(self, x: Array) -> tuple[Array, Array]:
        """Splits a flat list [1, L T + R, ...] into (lines [L, T, ...], others [R, 1, ...])."""
        lines = len(self.rows)
        own, rest = x[0, : lines * self.tokens], x[0, lines * self.tokens :]
        return own.reshape(lines, self.tokens, *x.shape[2:]), rest[:, None]

    @staticmethod
    def join(lines: Array, rest: Array | None) -> Array:
        """Inverts `split`; `rest` None means that there are no others."""
        flat = lines.reshape(1, -1, *lines.shape[2:])
        return flat if rest is None else jnp.concatenate([flat, rest.swapaxes(0, 1)], axis=1)

    def to_rows(self, x: Array) -> Array:
        """Converts lines [L, T, ...] to [B, N, ...], with each row's tokens contiguous.

        N is T if there is one line per row, else L * T. What follows a row's tokens is undefined.
        """
        if self.one_each:
            return x
        flat = x.reshape(-1, *x.shape[2:])
        at = self.offsets[:-1, None] + jnp.arange(len(flat))
        return flat.at[at].get(mode="clip")

    def from_rows(self, x: Array) -> Array:
        """Converts the result of `to_rows` back to lines; 0 at padding."""
        if not self.one_each:
            row = jnp.minimum(self.rows, len(x) - 1)
            x = x[row[:, None], self.begins[:, None] + jnp.arange(self.tokens)]
        valid = self.valid.reshape(*self.valid.shape, *(1,) * (x.ndim - 2))
        return jnp.where(valid, x, 0)

    def of_row(self, values: Int[Array, "B *n"], missing: int) -> Int[Array, "L *n"]:
        """Returns the value of each line's row, or `missing` for a line without a row."""
        return values.at[self.rows].get(mode="fill", fill_value=missing)

    @property
    def valid(self) -> Bool[Array, "L T"]:
        """Whether each token is not padding."""
        return jnp.arange(self.tokens) < self.query_lens[:, None]

    def places(self, tokens: int) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
        """(the index of each token in its row's piece, its row) of a flat list of N tokens.

        A token behind the lines counts as the first one of row 0.
        """
        begins = self.begins[:, None] + jnp.arange(self.tokens)
        rows = jnp.minimum(self.rows, len(self.last) - 1)[:, None]
        more = tokens - begins.size
        flat = (begins, jnp.broadcast_to(rows, begins.shape))
        first, second = (jnp.pad(each.reshape(-1), (0, more)) for each in flat)
        return first, second
