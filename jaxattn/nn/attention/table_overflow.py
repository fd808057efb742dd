"""Rows longer than their block tables, which a traced length can be."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.array_checks import BoundedLengths


def nan_beyond_table(
    y: Float[Array, "B T hidden"],
    seq_lens: Int[Array, "B"] | BoundedLengths,
    most: int,
    query_lens: Int[Array, "B"] | None,
) -> Float[Array, "B T hidden"]:
    """NaN for the new tokens of a traced row of more than `most` tokens.

    The ops mark such a row by its LSE, which ends in the module. Its 0 would be a finite, wrong
    output. Lengths that are known were refused, and those `BoundedLengths` were looked after.
    """
    if not isinstance(seq_lens, jax.core.Tracer) or most >= MOST:
        return y
    beyond = (seq_lens > most)[:, None]
    if query_lens is not None:  # the others are padding, whatever the row's length
        beyond &= jnp.arange(y.shape[1]) < query_lens[:, None]
    return jnp.where(beyond[..., None], jnp.nan, y)
