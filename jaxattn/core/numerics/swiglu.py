"""Gated activations of experts: SwiGLU, and gpt-oss's clamped variant."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.core.validation.config_fields import Number, check_fields


def swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns silu(gate) * up."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate and |up| clamped to at most `limit`.

    Raises:
        ValueError: A field is not a finite number above 0.
    """

    alpha: Annotated[float, Number(0, 1e6, open_below=True)]
    limit: Annotated[float, Number(0, 1e6, open_below=True)]

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.maximum(jnp.minimum(up, self.limit), -self.limit)
        return gate / (1.0 + jnp.exp(-self.alpha * gate)) * (up + 1.0)
