"""The next token of each row, chosen inside the jitted step.

A row's randomness is a function of its request's seed and of the token's position, and of nothing
else: its draws are the same in any row, beside any other rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxattn.parallel import Vocabulary

# The token of a row whose logits are not finite.
NOT_FINITE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """How each row samples.

    Attributes:
        temperature: float32 [B]; 0 takes the most likely token.
        top_k: int32 [B]; only the k most likely tokens, 0 for all.
        top_p: float32 [B] in (0, 1]; the fewest most likely tokens that together reach it.
        min_p: float32 [B] in [0, 1]; only tokens at least this likely beside the most likely one.
        seeds: uint32 [B].
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    seeds: UInt[Array, "B"]


def sampling_key(seed: UInt[Array, ""], position: Int[Array, ""]) -> Key[Array, ""]:
    """The key of the token at `position` (0 is the prompt's first) of a request."""
    return jax.random.fold_in(jax.random.key(seed), position)


def sample(
    logits: Float[Array, "B vocab"],
    sampling: SamplingBatch,
    positions: Int[Array, "B"],
    vocabulary: Vocabulary | None = None,
) -> Int[Array, "B"]:
    """int32 token ids, -1 for a row whose logits hold NaN or an infinite maximum.

    Of equally likely tokens the greedy choice and the filters prefer the lowest id. `min_p` and
    `top_k` filter first, then `top_p` filters what they leave. The vocabulary is searched only
    where a row samples with `top_k` or `top_p`.

    Args:
        logits: float32.
        positions: int32, where in its row the sampled token will stand.
        vocabulary: which tokens the logits are of, where several GPUs divide them: all of those
            GPUs return the same ids. None: all.
    """
    vocabulary = Vocabulary(logits.shape[1]) if vocabulary is None else vocabulary
    with jax.named_scope("sample"):
        greedy, most = vocabulary.best(logits)
        draws = sampling.temperature > 0
        heat = jnp.where(draws, sampling.temperature, 1.0)
        # A maximum of 0 before the division: a tiny temperature then gives -inf, not inf - inf.
        scaled = (logits - most) / heat[:, None]
        filters = draws & ((sampling.top_k > 0) | (sampling.top_p < 1))
        drawn = lax.switch(
            draws.any().astype(jnp.int32) + filters.any(),
            (_no_row_draws, partial(_draw, vocabulary), partial(_filter_and_draw, vocabulary)),
            scaled,
            sampling,
            filters,
            positions,
        )
        tokens = jnp.where(draws, drawn, greedy).astype(jnp.int32)
        return jnp.where(jnp.isfinite(most[:, 0]), tokens, NOT_FINITE)


def _no_row_draws(
    scaled: Array, sampling: SamplingBatch, filters: Array, positions: Array
) -> Array:
    """A greedy step makes no random numbers."""
    return jnp.zeros(scaled.shape[0], jnp.int32)


def _draw(
    vocabulary: Vocabulary,
    scaled: Array,
    sampling: SamplingBatch,
    filters: Array,
    positions: Array,
) -> Array:
    return _categorical(vocabulary, _min_p(scaled, sampling), sampling, positions)


def _filter_and_draw(
    vocabulary: Vocabulary,
    scaled: Array,
    sampling: SamplingBatch,
    filters: Array,
    positions: Array,
) -> Array:
    filtered = _filters(vocabulary, _min_p(scaled, sampling), sampling, filters)
    return _categorical(vocabulary, filtered, sampling, positions)


def _min_p(scaled: Array, sampling: SamplingBatch) -> Array:
    """-inf for tokens that `min_p` leaves out."""
    return jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)


def _categorical(
    vocabulary: Vocabulary, scaled: Array, sampling: SamplingBatch, positions: Array
) -> Array:
    """A draw by Gumbel's trick: the largest of the logits with noise."""
    keys = jax.vmap(sampling_key)(sampling.seeds, positions)
    return vocabulary.best(jax.vmap(vocabulary.noise)(keys) + scaled)[0].astype(jnp.int32)


def _filters(
    vocabulary: Vocabulary,
    scaled: Float[Array, "B vocab"],
    sampling: SamplingBatch,
    filters: Bool[Array, "B"],
) -> Float[Array, "B vocab"]:
    """-inf for what `top_k` and `top_p` leave out, in the rows that have one of them."""
    keys = _ordered(scaled)
    count = sampling.top_k[:, None].astype(jnp.float32)
    ones = jnp.ones_like(scaled)
    # The k-th largest is the least with fewer than k above it.
    least = _least_with_less_above(vocabulary, keys, ones, count)
    above = vocabulary.sum(keys > least)
    few = (keys == least) & (vocabulary.before(keys == least) < count - above)
    kept = (sampling.top_k[:, None] == 0) | (keys > least) | few
    scaled = jnp.where(kept, scaled, -jnp.inf)

    keys, chances = _ordered(scaled), jnp.exp(scaled)  # the largest of `scaled` is 0
    chances /= vocabulary.sum(chances)
    top_p = sampling.top_p[:, None]
    least = _least_with_less_above(vocabulary, keys, chances, top_p)
    above = vocabulary.sum(jnp.where(keys > least, chances, 0))
    equal = vocabulary.max(jnp.where(keys == least, chances, 0))
    few = (keys == least) & (above + equal * vocabulary.before(keys == least) < top_p)
    # A sum of float32 can reach 1 before the last token: 1 has to keep them all.
    best = vocabulary.ids == vocabulary.best(scaled)[0][:, None]
    kept = (top_p >= 1) | (keys > least) | few | best
    return jnp.where(kept | ~filters[:, None], scaled, -jnp.inf)


def _ordered(x: Float[Array, "B vocab"]) -> UInt[Array, "B vocab"]:
    """Integers in the order of these numbers."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits == sign, 0, bits)  # -0.0 is 0.0; XLA leaves out an addition of 0.0
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _least_with_less_above(
    vocabulary: Vocabulary,
    keys: UInt[Array, "B vocab"],
    weights: Float[Array, "B vocab"],
    limit: Float[Array, "B 1"],
) -> UInt[Array, "B 1"]:
    """The least number above which the weights' sum is below `limit`, two bits at a time.

    A sort of the vocabulary would give it too, and XLA has the host wait for it.
    """
    least = jnp.zeros_like(keys[:, :1])
    for shift in range(30, -2, -2):
        steps = [least + jnp.uint32((step << shift) - 1) for step in (1, 2, 3)]
        sums = [jnp.where(keys > step, weights, 0).sum(1, keepdims=True) for step in steps]
        totals = vocabulary.across(jnp.concatenate(sums, axis=1))
        passed = (totals >= limit).sum(1, keepdims=True, dtype=jnp.uint32)
        least += passed << shift
    return least


def sampled(step: Callable, vocabulary: Vocabulary | None = None) -> Callable:
    """A model's step (params, state, batch) -> (logits, state), made to return tokens for logits.

    The new step's batch is a pair of the model's batch, whose `seq_lens` are the new tokens'
    positions, and a `SamplingBatch`.
    """

    @functools.wraps(step)
    def step_and_sample(params, state, batch, **options):
        rows, sampling = batch
        logits, state = step(params, state, rows, **options)
        return sample(logits, sampling, rows.seq_lens, vocabulary), state

    return step_and_sample
