"""Detection of rows that are longer than their block tables, as traced lengths can be."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.array_checks import BoundedLengths


def beyond_table(
    tokens: int,
    seq_lens: Int[Array, "B"] | BoundedLengths,
    max_tokens: int,
    query_lens: Int[Array, "B"] | None,
) -> Bool[Array, "B T"] | None:
    """Which new tokens belong to a traced row of more than `max_tokens` tokens; None if none can.

    Concrete lengths have been checked already, and so have `BoundedLengths`.
    """
    if not isinstance(seq_lens, jax.core.Tracer) or max_tokens >= MOST:
        return None
    is_beyond = jnp.broadcast_to((seq_lens > max_tokens)[:, None], (seq_lens.shape[0], tokens))
    if query_lens is not None:  # further tokens are padding, also in such a row
        is_beyond &= jnp.arange(tokens) < query_lens[:, None]
    return is_beyond


def nan_beyond_table(
    y: Float[Array, "B T hidden"],
    seq_lens: Int[Array, "B"] | BoundedLengths,
    max_tokens: int,
    query_lens: Int[Array, "B"] | None,
) -> Float[Array, "B T hidden"]:
    """NaN for the new tokens of a traced row of more than `max_tokens` tokens.

    The ops mark such a row in its LSE, which the module does not return. The op's output 0 would
    look like a valid result.
    """
    is_beyond = beyond_table(y.shape[1], seq_lens, max_tokens, query_lens)
    return y if is_beyond is None else jnp.where(is_beyond[..., None], jnp.nan, y)
