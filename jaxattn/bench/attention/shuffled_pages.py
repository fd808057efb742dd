"""Block tables whose pages are shuffled, and lengths, of the rows that benches time."""

import jax
import jax.numpy as jnp


def shuffled_pages(
    key: jax.Array, rows: int, pages: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """(int32 [rows, pages], int32 [rows]) of rows of so many tokens, which own all pages of a
    cache."""
    numbers = jax.random.permutation(key, rows * pages).astype(jnp.int32)
    return numbers.reshape(rows, pages), jnp.full(rows, tokens, jnp.int32)
