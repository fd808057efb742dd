"""The weights of attention scores and their gradient, as functions of the products q k^T."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels.attention.softmax_constants import LOG2E


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreGradient:
    """The weights of scores, and the factor of the scores' gradient."""

    scale: float
    soft_cap: float | None

    def weights(self, products: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns (exp(score - lse), d score / d product without the scale or None for 1); the lse
        is in powers of 2."""
        lse = lax.broadcast_in_dim(lse, products.shape, [1])
        if self.soft_cap is None:
            return jnp.exp2(products * (self.scale * LOG2E) - lse), None
        # tanh by exp2, since the approximate instruction is off by 2**-11 of the cap.
        power = 2 * LOG2E * self.scale / self.soft_cap
        capped = 1.0 - 2.0 / (jnp.exp2(products * power) + 1.0)
        return jnp.exp2(capped * (self.soft_cap * LOG2E) - lse), 1.0 - capped * capped
