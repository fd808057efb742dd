"""Pieces of several prompts packed into lines: which tokens of which row each line has.

    tokens [L, T]     row 0   row 0   row 0   row 1   row 2   row 2   -
    rows   [L]          0       0       0       1       2       2     B

A row's tokens fill its lines one after another, so only its last line has padding. Whatever is
computed for each token alone takes all lines as one flat list. An op that knows only rows takes
each line as a row of its own, whose earlier lines are its prefix.
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
        rows: int32 [L], the row of each line, ascending; B for a line of no row.
        tokens: T, of a line.
        begins: int32 [L], tokens of the row's piece that are in lines before this one.
        query_lens: int32 [L], tokens of the line; the rest is padding.
        seq_lens: int32 [L], the length of the row up to the line's last token; 0 of no row.
        offsets: int32 [B + 1], where each row's lines begin in the flat list, padding counted.
        last: int32 [B], where each row's last token is there; of a row without tokens anything.
        one_each: whether there are B lines, one for each row.
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
        """The lines of rows with so many new tokens, of so many in all; lines of T tokens. None is
        one line for each row."""
        batch, one_each = query_lens.shape[0], rows is None
        if rows is None:
            rows = jnp.arange(batch, dtype=jnp.int32)
        # By comparing, which is one kernel where a search is a loop.
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
        """(the lines' [L, T, ...], others' [R, 1, ...]) of a flat list [1, L T + R, ...]."""
        lines = len(self.rows)
        own, rest = x[0, : lines * self.tokens], x[0, lines * self.tokens :]
        return own.reshape(lines, self.tokens, *x.shape[2:]), rest[:, None]

    @staticmethod
    def join(lines: Array, rest: Array | None) -> Array:
        """What `split` takes apart; None is no others."""
        flat = lines.reshape(1, -1, *lines.shape[2:])
        return flat if rest is None else jnp.concatenate([flat, rest.swapaxes(0, 1)], axis=1)

    def to_rows(self, x: Array) -> Array:
        """[B, N, ...] of lines [L, T, ...]: each row's tokens in one line, N of one line or of all;
        what follows them is anything."""
        if self.one_each:
            return x
        flat = x.reshape(-1, *x.shape[2:])
        at = self.offsets[:-1, None] + jnp.arange(len(flat))
        return flat.at[at].get(mode="clip")

    def from_rows(self, x: Array) -> Array:
        """What `to_rows` makes, as lines; 0 at padding."""
        if not self.one_each:
            row = jnp.minimum(self.rows, len(x) - 1)
            x = x[row[:, None], self.begins[:, None] + jnp.arange(self.tokens)]
        valid = self.valid.reshape(*self.valid.shape, *(1,) * (x.ndim - 2))
        return jnp.where(valid, x, 0)

    def of_row(self, values: Int[Array, "B *n"], missing: int) -> Int[Array, "L *n"]:
        """What each line's row has; `missing` where there is no row."""
        return values.at[self.rows].get(mode="fill", fill_value=missing)

    @property
    def valid(self) -> Bool[Array, "L T"]:
        """Whether a token is none of the padding."""
        return jnp.arange(self.tokens) < self.query_lens[:, None]
