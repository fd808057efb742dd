"""Log-probabilities of tokens for training, bit for bit equal to those that an engine returned."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
    logits: Float[Array, "B T vocab"],
    tokens: Int[Array, "B T"],
    *,
    scored: Float[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """The log-probability of each token given the tokens before it, float32; 0 for a row's first
    token.

    A trainer and an engine round differently, so their log-probabilities differ in the last bits
    even with equal weights. With `scored`, the values are the engine's, bit for bit, and the
    gradient is that of `logits`. The ratio of two policies with equal weights is then exactly 1.

    Args:
        logits: the logits of a forward pass, such as `model.bind(params)(tokens)`.
        scored: float32, the engine's log-probabilities of the tokens (`jaxattn.logprob_array`),
            with the weights of `logits`; NaN for tokens without a log-probability. A token that the
            engine's filters excluded has -inf, and the difference of two such tokens is NaN:
            exclude these tokens from a ratio with `jnp.isfinite(scored)`.

    Raises:
        TypeError, ValueError: `tokens` or `scored` has a wrong dtype or shape.
    """
    if logits.shape[:-1] != tokens.shape or tokens.ndim != 2:
        raise ValueError(
            f"token_logprobs: tokens {tokens.shape} must have the shape [B, T] of logits "
            f"{logits.shape}"
        )
    logits = logits.astype(jnp.float32)[:, :-1]
    policy_logprobs = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    policy_logprobs = jnp.pad(policy_logprobs - jax.nn.logsumexp(logits, axis=-1), ((0, 0), (1, 0)))
    if scored is None:
        return policy_logprobs
    if scored.shape != tokens.shape:
        raise ValueError(
            f"token_logprobs: scored {scored.shape} must have the shape of tokens {tokens.shape}"
        )
    if scored.dtype != jnp.float32:
        raise TypeError(f"token_logprobs: scored must be float32; got {scored.dtype}")
    return _fill_nan(policy_logprobs, scored)


@jax.custom_jvp
def _fill_nan(policy_logprobs: Array, scored: Array) -> Array:
    """`scored` where it is a number, else `policy_logprobs`."""
    return jnp.where(jnp.isnan(scored), policy_logprobs, scored)


@_fill_nan.defjvp
def _gradient_of_own(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _fill_nan(*primals), tangents[0]
