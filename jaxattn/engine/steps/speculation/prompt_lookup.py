"""Drafts by prompt lookup: the draft repeats earlier tokens of the row.

The draft is the tokens after the latest earlier occurrence of the row's last two or three tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxattn.engine.steps.device_batch import DeviceBatch, read
from jaxattn.engine.steps.speculation.verification import DraftTokens

# A draft needs at least LEAST matching tokens. At most MOST count; ties go to the latest place.
LEAST, MOST = 2, 3


@jax.named_scope("draft")
def draft(rows: DeviceBatch, places: Int[Array, "b"], drafts: int, checkpoints: int) -> DraftTokens:
    """Looks up `drafts` tokens for each row at `places`.

    Args:
        checkpoints: The number of slots between the rows' slots and the spare ones.
    """
    found = read(rows, places)
    last = found.cursor.length  # position of the last token
    history = rows.history.at[found.indices].get(mode="fill", fill_value=0)
    column = jnp.arange(history.shape[1])
    same, equal = jnp.ones(history.shape, bool), jnp.zeros(history.shape, jnp.int32)
    for back in range(MOST):
        before = jnp.pad(history, ((0, 0), (back, 0)))[:, : history.shape[1]]
        own = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        same &= (before == own) & (column >= back) & (last >= back)[:, None]
        equal += same
    there = (equal >= LEAST) & (column < last[:, None])
    at = jnp.argmax(jnp.where(there, equal * len(column) + column, -1), axis=1)
    # If the draft is longer than the text since the match, it repeats that text.
    since = jnp.maximum(last - at, 1)[:, None]
    follows = at[:, None] + 1 + jnp.arange(drafts) % since
    guessed = jnp.take_along_axis(history, follows, axis=1)
    return DraftTokens.of(rows, found, guessed, there.any(1), checkpoints)
