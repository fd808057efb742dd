"""The slot of a CTA's token in a paged cache, shared by the kernels that append."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def slot_mapping(
    token: jax.Array,
    *,
    q_len: int,
    page_size: int,
    layer: jax.Array,
    layers: int,
    tables_ref: Any,
    lens_ref: Any,
    query_lens_ref: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (page, position in the row, whether the cache has a place for the token).

    The page may still lie outside of the pool: the writer compares it with the pool's size.

    Args:
        token: Index among the B S tokens, with a row's S tokens after one another.
        layer: The layer that is written, of `layers`.
        tables_ref, lens_ref: int32 [B, M] and [B], the new tokens included.
        query_lens_ref: int32 [B], each row's new tokens; None: all S tokens are new.
    """
    row = lax.div(token, q_len)
    length, number = lens_ref[row], lax.rem(token, q_len)
    queries = q_len if query_lens_ref is None else query_lens_ref[row]
    position = length - queries + number
    column = lax.div(jnp.maximum(position, 0), page_size)
    known = (length > 0) & (number < queries) & (position >= 0)
    known &= (column < tables_ref.shape[1]) & (layer >= 0) & (layer < layers)
    return tables_ref[row, jnp.minimum(column, tables_ref.shape[1] - 1)], position, known
