"""Detection of rows that are longer than their block tables, as traced lengths can be."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.array_checks import BoundedLengths


def beyond_table(
    tokens: int,
    seq_lens: Int[Array, "B"] | BoundedLengths,
    most: int,
    query_lens: Int[Array, "B"] | None,
) -> Bool[Array, "B T"] | None:
    """Which new tokens belong to a traced row of more than `most` tokens; None if none can.

    Concrete lengths have been checked already, and so have `BoundedLengths`.
    """
    if not isinstance(seq_lens, jax.core.Tracer) or most >= MOST:
        return None
    beyond = jnp.broadcast_to((seq_lens > most)[:, None], (seq_lens.shape[0], tokens))
    if query_lens is not None:  # further tokens are padding, also in such a row
        beyond &= jnp.arange(tokens) < query_lens[:, None]
    return beyond


def nan_beyond_table(
    y: Float[Array, "B T hidden"],
    seq_lens: Int[Array, "B"] | BoundedLengths,
    most: int,
    query_lens: Int[Array, "B"] | None,
) -> Float[Array, "B T hidden"]:
    """NaN for the new tokens of a traced row of more than `most` tokens.

    The ops mark such a row in its LSE, which the module does not return. The op's output 0 would
    look like a valid result.
    """
    beyond = beyond_table(y.shape[1], seq_lens, most, query_lens)
    return y if beyond is None else jnp.where(beyond[..., None], jnp.nan, y)
