"""What a request takes from or adds to its logits before a token is chosen."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.named_scope("penalties")
def penalized(
    logits: Float[Array, "B vocab"],
    history: Int[Array, "B L"],
    prompts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    repetition: Float[Array, "B"],
    presence: Float[Array, "B"],
    frequency: Float[Array, "B"],
) -> Float[Array, "B vocab"]:
    """The logits of rows with penalties; those of other rows stay as they are, bit for bit.

    Args:
        history: each row's tokens.
        prompts: how many of them are the prompt's.
        lengths: how many there are.
        repetition: divides a positive logit of a token that is there, and multiplies a negative
            one; 1 for none.
        presence: is taken from the logit of a token that is there behind the prompt.
        frequency: is taken from it once per time.
    """
    rows, vocab = logits.shape
    place = jnp.arange(history.shape[1])
    behind = (place >= prompts[:, None]) & (place < lengths[:, None])
    none = jnp.zeros((rows, vocab), jnp.int32)
    row = jnp.arange(rows)[:, None]

    def counted(which: Array) -> Array:
        return none.at[row, jnp.where(which, history, vocab)].add(1, mode="drop")

    count, seen = counted(behind), counted(place < lengths[:, None]) > 0
    by = repetition[:, None]
    repeated = jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)
    taken = presence[:, None] * (count > 0) + frequency[:, None] * count
    some = (repetition != 1) | (presence != 0) | (frequency != 0)
    return jnp.where(some[:, None], repeated - taken, logits)


@jax.named_scope("logit_bias")
def biased(
    logits: Float[Array, "B vocab"], tokens: Int[Array, "B K"], biases: Float[Array, "B K"]
) -> Float[Array, "B vocab"]:
    """Adds each row's biases to the logits of these tokens; one behind the vocabulary is none."""
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, tokens].add(biases, mode="drop")
