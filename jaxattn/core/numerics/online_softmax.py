"""The online softmax of the plain-JAX attentions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class OnlineSoftmax(NamedTuple):
    """Attention over the keys seen so far: row maxima, sums of exponentials, undivided output."""

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
        """Adds keys: scores [*rows, K], those not visible excluded; weigh(p) sums p's values."""
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(self.top, scores.max(-1))
        # The result does not depend on the shift, so no gradient goes through it. Rows that have
        # seen nothing shift by 0: -inf - -inf is NaN.
        top = lax.stop_gradient(top)
        shift = jnp.where(top == -jnp.inf, 0, top)
        p = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(lax.stop_gradient(self.top) - shift)
        total = self.total * rescale + p.sum(-1)
        return OnlineSoftmax(top, total, self.acc * rescale[..., None] + weigh(p))

    def finish(self, sees: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(out [*rows, V], lse [*rows]); `sees` says which rows have any key, the rest is 0, -inf.

        It comes from the lengths and not from `total`: a NaN of a real row is not hidden.
        """
        total = jnp.where(sees, self.total, 1)
        out = jnp.where(sees[..., None], self.acc / total[..., None], 0)
        return out, jnp.where(sees, self.top + jnp.log(total), -jnp.inf)
