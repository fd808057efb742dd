"""Log-probabilities of the chosen tokens, and of the most likely alternatives."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn.engine.requests.request import MOST_LOGPROBS


@jax.named_scope("logprobs")
def logprobs(
    logits: Float[Array, "B vocab"],
    tokens: Int[Array, "B"],
    num_likeliest: Int[Array, ""] | int = MOST_LOGPROBS,
) -> Int[Array, "B 1+2*20"]:
    """Returns the bits of each token's log-probability, the likeliest tokens, and the bits of
    theirs.

    A loop finds the likeliest tokens one by one, because the host would have to wait for XLA's
    sort. Among equal tokens the lowest id comes first.

    Args:
        num_likeliest: The number of likeliest tokens to find; the remaining places hold -1.
    """
    rows, vocab = logits.shape
    row = jnp.arange(rows)
    num_likeliest = (
        min(num_likeliest, vocab)
        if isinstance(num_likeliest, int)
        else jnp.minimum(num_likeliest, vocab)
    )
    whole = jax.nn.logsumexp(logits, axis=-1)
    token_logprobs = logits[row, jnp.maximum(tokens, 0)] - whole

    def next_best(rank: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, ids, values = carry
        best = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        values = values.at[:, rank].set(rest[row, best] - whole)
        return rest.at[row, best].set(-jnp.inf), ids.at[:, rank].set(best), values

    ids = jnp.full((rows, MOST_LOGPROBS), -1, jnp.int32)
    values = jnp.full((rows, MOST_LOGPROBS), -jnp.inf)
    _, ids, values = lax.fori_loop(0, num_likeliest, next_best, (logits, ids, values))
    bits = lax.bitcast_convert_type(
        jnp.concatenate([token_logprobs[:, None], values], axis=1), jnp.int32
    )
    return jnp.concatenate([bits[:, :1], ids, bits[:, 1:]], axis=1)
