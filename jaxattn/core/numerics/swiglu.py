"""Gated activations of experts: SwiGLU, and gpt-oss's, which is clamped."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.core.validation.config_fields import Number, check_fields


def swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate up to `limit` and up from -limit to limit.

    Raises:
        ValueError: a field is no finite number above 0.
    """

    alpha: Annotated[float, Number(0, 1e6, open_below=True)]
    limit: Annotated[float, Number(0, 1e6, open_below=True)]

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.maximum(jnp.minimum(up, self.limit), -self.limit)
        return gate / (1.0 + jnp.exp(-self.alpha * gate)) * (up + 1.0)
