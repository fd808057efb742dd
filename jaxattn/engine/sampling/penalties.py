"""Penalties and biases that a request applies to its logits before a token is chosen."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# History tokens that are counted at a time, so that scratch does not grow with their length.
BLOCK = 1024


@jax.named_scope("penalties")
def penalized(
    logits: Float[Array, "b vocab"],
    history: Int[Array, "B L"],
    row_indices: Int[Array, "b"],
    prompts: Int[Array, "b"],
    lengths: Int[Array, "b"],
    *,
    repetition: Float[Array, "b"],
    presence: Float[Array, "b"],
    frequency: Float[Array, "b"],
) -> Float[Array, "b vocab"]:
    """Returns the logits with penalties; rows without penalties keep their bits.

    Args:
        history: The tokens of all rows.
        row_indices: The index of each row of `logits` in `history`; B for no row.
        prompts: The number of each row's tokens that belong to the prompt.
        lengths: The number of each row's tokens.
        repetition: The divisor of positive logits, and the factor of negative ones, for tokens that
            the row contains; 1 for none.
        presence: The number subtracted from the logits of tokens that the row has generated.
        frequency: The number subtracted once per occurrence of a generated token.
    """
    some = (repetition != 1) | (presence != 0) | (frequency != 0)
    in_prompt, behind = _counts(
        logits.shape, history, row_indices, prompts, jnp.where(some, lengths, 0)
    )
    by = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / by, logits * by)
    repeated = jnp.where(in_prompt + behind > 0, repeated, logits)
    taken = presence[:, None] * (behind > 0) + frequency[:, None] * behind
    return jnp.where(some[:, None], repeated - taken, logits)


def _counts(
    shape: tuple[int, ...], history: Array, row_indices: Array, prompts: Array, lengths: Array
) -> tuple[Int[Array, "b vocab"], Int[Array, "b vocab"]]:
    """Returns how often each token occurs in the prompt, and after it."""
    longest = history.shape[1]
    size, row = min(BLOCK, longest), jnp.arange(shape[0])[:, None]

    def block(i: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last block overlaps the one before it if blocks do not divide the length.
        first = jnp.minimum(i * size, longest - size)
        places = first + jnp.arange(size)
        tokens = lax.dynamic_slice_in_dim(history, first, size, axis=1)
        tokens = tokens.at[row_indices].get(mode="fill", fill_value=shape[1])
        there = (places >= i * size) & (places < lengths[:, None])
        generated = places >= prompts[:, None]

        def with_these(count: Array, mask: Array) -> Array:
            return count.at[row, jnp.where(mask, tokens, shape[1])].add(1, mode="drop")

        return (
            with_these(counts[0], there & ~generated),
            with_these(counts[1], there & generated),
        )

    none = jnp.zeros(shape, jnp.int32)
    # The loop ends with the longest row that has penalties.
    return lax.fori_loop(0, -(-jnp.max(lengths, initial=0) // size), block, (none, none))


@jax.named_scope("logit_bias")
def biased(
    logits: Float[Array, "B vocab"], tokens: Int[Array, "B K"], biases: Float[Array, "B K"]
) -> Float[Array, "B vocab"]:
    """Adds each row's biases to the logits of these tokens; ids past the vocabulary add nothing."""
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, tokens].add(biases, mode="drop")
