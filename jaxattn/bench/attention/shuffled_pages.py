"""Lengths, and block tables with shuffled pages, for the rows that benches time."""

import jax
import jax.numpy as jnp


def shuffled_pages(
    key: jax.Array, rows: int, pages: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """(block tables int32 [rows, pages], lengths int32 [rows]) of rows of `tokens` tokens.

    Together the rows own all pages of the cache.
    """
    numbers = jax.random.permutation(key, rows * pages).astype(jnp.int32)
    return numbers.reshape(rows, pages), jnp.full(rows, tokens, jnp.int32)
