"""The next token of each row, chosen inside the jitted step.

A row's randomness is a function of its request's seed and id and of the token's position, and of
nothing else: its draws are the same in any row, beside any neighbours.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """How each row samples.

    Attributes:
        temperature: float32 [B]; 0 takes the most likely token.
        top_p: float32 [B] in (0, 1]; the fewest most likely tokens that together reach it.
        seeds: uint32 [B].
        request_ids: int32 [B].
    """

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    seeds: UInt[Array, "B"]
    request_ids: Int[Array, "B"]


def sampling_key(
    seed: UInt[Array, ""], request_id: Int[Array, ""], position: Int[Array, ""]
) -> Key[Array, ""]:
    """The key of the token at `position` (0 is the prompt's first) of a request."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request_id), position)


def sample(
    logits: Float[Array, "B vocab"], sampling: SamplingBatch, positions: Int[Array, "B"]
) -> Int[Array, "B"]:
    """int32 token ids. Of equally likely tokens the greedy choice and `top_p` prefer the lowest id.

    Args:
        logits: float32.
        positions: int32, where in its row the sampled token will stand.
    """
    with jax.named_scope("sample"):
        return jax.vmap(_sample_row)(logits, sampling, positions)


def _sample_row(logits: Array, sampling: SamplingBatch, position: Array) -> Array:
    greedy = jnp.argmax(logits)
    heat = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # A maximum of 0 before the division: a tiny temperature then gives -inf, not inf - inf.
    order = jnp.argsort(-logits)  # stable
    scaled = (logits[order] - logits[greedy]) / heat
    probabilities = jax.nn.softmax(scaled)
    before = jnp.cumsum(probabilities) - probabilities
    # A sum of float32 can reach 1 before the last token: 1 has to keep them all.
    kept = (before < sampling.top_p) | (sampling.top_p >= 1)
    scaled = jnp.where(kept, scaled, -jnp.inf)
    key = sampling_key(sampling.seeds, sampling.request_ids, position)
    drawn = order[jax.random.categorical(key, scaled)]
    return jnp.where(sampling.temperature > 0, drawn, greedy).astype(jnp.int32)


def sampled(step: Callable) -> Callable:
    """A model's step (..., state, batch) -> (logits, state), made to return tokens for logits.

    The new step's batch is a pair of the model's batch, whose `seq_lens` are the new tokens'
    positions, and a `SamplingBatch`.
    """

    @functools.wraps(step)
    def step_and_sample(config, params, state, batch, **options):
        rows, sampling = batch
        logits, state = step(config, params, state, rows, **options)
        return sample(logits, sampling, rows.seq_lens), state

    return step_and_sample
