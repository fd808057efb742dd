"""The online softmax of the plain-JAX attention ops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class OnlineSoftmax(NamedTuple):
    """Attention over the keys so far: row maxima, sums of exponentials, unnormalized output."""

    top: jax.Array  # [*rows], -inf before the first key
    total: jax.Array  # [*rows]
    acc: jax.Array  # [*rows, V]

    @classmethod
    def empty(cls, rows: tuple[int, ...], width: int, dtype: Any) -> "OnlineSoftmax":
        total = jnp.zeros(rows, dtype)
        return cls(jnp.full(rows, -jnp.inf, dtype), total, jnp.zeros((*rows, width), dtype))

    def add(
        self, scores: jax.Array, visible: jax.Array, weigh: Callable[[jax.Array], jax.Array]
    ) -> "OnlineSoftmax":
        """Adds the visible keys by scores [*rows, K]; weigh(p) returns the values' weighted sum."""
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(self.top, scores.max(-1))
        # The result does not depend on the shift, so no gradient goes through it. Rows that saw no
        # key shift by 0, because -inf - -inf is NaN.
        top = lax.stop_gradient(top)
        shift = jnp.where(top == -jnp.inf, 0, top)
        p = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(lax.stop_gradient(self.top) - shift)
        total = self.total * rescale + p.sum(-1)
        return OnlineSoftmax(top, total, self.acc * rescale[..., None] + weigh(p))

    def finish(self, sees: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (out [*rows, V], lse [*rows]), with 0 and -inf where `sees` is False.

        `sees`, whether a row has any key, derives from the lengths instead of `total`, so that a
        NaN in a real row is not hidden.
        """
        total = jnp.where(sees, self.total, 1)
        out = jnp.where(sees[..., None], self.acc / total[..., None], 0)
        return out, jnp.where(sees, self.top + jnp.log(total), -jnp.inf)
