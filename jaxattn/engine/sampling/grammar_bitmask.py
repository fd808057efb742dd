"""Bitmasks of rows with grammars: the tokens that may come next, as bits.

While the device computes the logits of a row with a grammar, the host fetches the previous token
and advances the grammar. Then the step masks the logits of forbidden tokens, and samples the row.
So rounds with such a row wait for the host; rounds without one do not.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.engine.requests.request import Request

EVERY = -1  # a word that allows all of its 32 tokens


class MaskedRow(Protocol):
    """The attributes of a running request that a bitmask needs."""

    request: Request

    @property
    def ended(self) -> bool: ...


def words_of(vocab: int) -> int:
    """Returns the number of int32 words of a mask."""
    return -(-vocab // 32)


def fill_bitmask(rows: Sequence[MaskedRow | None], lines: int, vocab: int) -> np.ndarray:
    """Returns int32 [lines, words]: each row's allowed tokens; all of them without a grammar."""
    words = np.full((lines, words_of(vocab)), EVERY, np.int32)
    for line, row in zip(words, rows, strict=False):
        if row is not None and not row.ended and row.request.grammar is not None:
            line[:] = 0
            row.request.grammar.mask(line)
    return words


@jax.named_scope("grammar")
def masked(
    logits: Float[Array, "b vocab"], bitmask: Int[Array, "b words"]
) -> Float[Array, "b vocab"]:
    """Returns the logits with -inf for forbidden tokens. A row with only ones keeps its bits.

    Columns after the last word belong to no token, and are -inf already.
    """
    token = jnp.arange(logits.shape[1])
    bits = bitmask[:, jnp.minimum(token // 32, bitmask.shape[1] - 1)] >> (token % 32)
    return jnp.where(bits & 1 > 0, logits, -jnp.inf)
