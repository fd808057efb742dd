"""Masks of rows with grammars: which tokens may come next, in bits.

A row with a grammar is masked by it: its logits are computed while the token before is fetched and
the grammar goes on, then what may not come next is left out, and then the row is sampled. So a
round with such a row waits for its host; rounds without one do not.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn.engine.requests.request import Request

EVERY = -1  # a word of which all 32 tokens may come


class MaskedRow(Protocol):
    """What a bitmask needs of a running request."""

    request: Request

    @property
    def ended(self) -> bool: ...


def words_of(vocab: int) -> int:
    """int32 words of a mask."""
    return -(-vocab // 32)


def fill_bitmask(rows: Sequence[MaskedRow | None], lines: int, vocab: int) -> np.ndarray:
    """int32 [lines, words]: what may come next in each row; everything where it has no grammar."""
    words = np.full((lines, words_of(vocab)), EVERY, np.int32)
    for line, row in zip(words, rows, strict=False):
        if row is not None and not row.ended and row.request.grammar is not None:
            line[:] = 0
            row.request.grammar.mask(line)
    return words


@jax.named_scope("grammar")
def masked(
    logits: Float[Array, "b vocab"], words: Int[Array, "b words"]
) -> Float[Array, "b vocab"]:
    """The logits with -inf for tokens that may not come. A row of all ones keeps its bits.

    Columns behind the words are no tokens, and -inf already.
    """
    token = jnp.arange(logits.shape[1])
    bits = words[:, jnp.minimum(token // 32, words.shape[1] - 1)] >> (token % 32)
    return jnp.where(bits & 1 > 0, logits, -jnp.inf)
