"""A causal convolution in XLA, as a float32 sum of shifted inputs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def shifted_inputs(x: Array, position: Array, width: int) -> list[Array]:
    """Returns W shifted copies of x [B, T, Dc], the input W - 1 to 0 tokens before each token.

    The copies are zero before a token's sequence, in which the token has the position [B, T].
    """

    def before(back: int) -> Array:
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        return jnp.where((position >= back)[..., None], shifted, 0)

    return [before(back) for back in reversed(range(width))]


def weighted_sum(taps: list[Array], weight: Array) -> Array:
    return sum(
        (tap.astype(jnp.float32) * weight[:, j].astype(jnp.float32) for j, tap in enumerate(taps)),
        start=jnp.zeros((), jnp.float32),
    )


def activated(total: Array, bias: Array | None, activation: str | None) -> Array:
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return jax.nn.silu(total) if activation == "silu" else total
