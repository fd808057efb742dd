"""The next token of each row, chosen on the device.

A row's randomness depends only on its request's seed and the token's position. So its samples do
not depend on its place in the batch or on other rows.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from jaxattn.engine.requests.request import Request

# The token of a row whose logits are not finite.
NOT_FINITE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of each row.

    Attributes:
        temperature: float32 [B]; 0 takes the most likely token.
        top_k: int32 [B]; sampling uses the k most likely tokens, all with 0.
        top_p: float32 [B] in (0, 1]; sampling uses the fewest most likely tokens whose
            probabilities add up to at least `top_p`.
        min_p: float32 [B] in [0, 1]; sampling uses tokens whose probability is at least `min_p`
            times that of the most likely one.
        seeds: uint32 [B], the random seeds.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    seeds: UInt[Array, "B"]


def sampling_key(seed: UInt[Array, ""], position: Int[Array, ""]) -> Key[Array, ""]:
    """Returns the random key of the token at `position` of a request; the prompt begins at 0."""
    return jax.random.fold_in(jax.random.key(seed), position)


class SamplingMode(enum.IntEnum):
    """The sampling operations of a step. The host takes the cheapest mode that its rows need.

    Each mode is an executable of its own, because the host would have to wait for the branch of an
    XLA conditional. A row gets the same token in every mode that is sufficient for it.
    """

    GREEDY = 0
    DRAWS = 1
    CONTROLS = 2
    LOGPROBS = 3

    def __str__(self) -> str:
        return self.name.lower()


def level_of(request: Request) -> SamplingMode:
    """Returns the cheapest mode that a row of this request needs."""
    if request.logprobs is not None:
        return SamplingMode.LOGPROBS
    filters = request.temperature > 0 and (request.top_k > 0 or request.top_p < 1)
    if filters or request.penalized or request.logit_bias:
        return SamplingMode.CONTROLS
    return SamplingMode.DRAWS if request.temperature > 0 else SamplingMode.GREEDY


def sample(
    logits: Float[Array, "B vocab"],
    sampling: SamplingBatch,
    positions: Int[Array, "B"],
    level: SamplingMode = SamplingMode.CONTROLS,
) -> Int[Array, "B"]:
    """Returns the tokens of `draw`."""
    return draw(logits, sampling, positions, level)[0]


def draw(
    logits: Float[Array, "B vocab"],
    sampling: SamplingBatch,
    positions: Int[Array, "B"],
    level: SamplingMode = SamplingMode.CONTROLS,
) -> tuple[Int[Array, "B"], Float[Array, "B vocab"]]:
    """Samples int32 token ids, -1 for a row whose logits hold NaN or an infinite maximum.

    Among equally likely tokens the greedy choice and the filters prefer the lowest id. `min_p` and
    `top_k` filter first, then `top_p` filters what they leave. `top_k` and `top_p` apply from
    `SamplingMode.CONTROLS` on, since they search the vocabulary.

    Args:
        logits: The logits, float32.
        positions: int32, the position of the sampled token in its row.
        level: The sampling mode. Rows that need a higher one get wrong tokens.

    Returns:
        (the tokens, the `masked_logits` from which they are drawn). In greedy mode the second item
        is the model's logits.
    """
    with jax.named_scope("sample"):
        greedy = jnp.argmax(logits, axis=-1)
        most = jnp.take_along_axis(logits, greedy[:, None], axis=-1)
        tokens, scaled = greedy, logits
        if level > SamplingMode.GREEDY:
            scaled = masked_logits(logits, sampling, most, level)
            draws = sampling.temperature > 0
            tokens = jnp.where(draws, _categorical(scaled, sampling, positions), greedy)
        tokens = jnp.where(jnp.isfinite(most[:, 0]), tokens.astype(jnp.int32), NOT_FINITE)
        return tokens, scaled


def masked_logits(
    logits: Float[Array, "B vocab"],
    sampling: SamplingBatch,
    max_logits: Float[Array, "B 1"] | None = None,
    level: SamplingMode = SamplingMode.CONTROLS,
) -> Float[Array, "B vocab"]:
    """Returns the logits of the distribution from which each row draws, -inf for excluded tokens.

    A row is NaN if its largest logit is infinite or NaN.

    Args:
        max_logits: The largest logit of each row, if it is known.
    """
    max_logits = logits.max(axis=-1, keepdims=True) if max_logits is None else max_logits
    draws = sampling.temperature > 0
    heat = jnp.where(draws, sampling.temperature, 1.0)
    # Subtract the maximum before the division: a tiny temperature then gives -inf, not inf - inf.
    scaled = _min_p((logits - max_logits) / heat[:, None], sampling)
    if level <= SamplingMode.DRAWS:
        return scaled
    return _filters(scaled, sampling, draws & ((sampling.top_k > 0) | (sampling.top_p < 1)))


def _min_p(scaled: Array, sampling: SamplingBatch) -> Array:
    """Returns the logits with -inf for tokens that `min_p` excludes."""
    return jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)


def _categorical(scaled: Array, sampling: SamplingBatch, positions: Array) -> Array:
    keys = jax.vmap(sampling_key)(sampling.seeds, positions)
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)


def _filters(
    scaled: Float[Array, "B vocab"], sampling: SamplingBatch, filters: Bool[Array, "B"]
) -> Float[Array, "B vocab"]:
    """Returns the logits with -inf for tokens excluded by `top_k` and `top_p`, where `filters`."""
    keys = _to_sortable_ints(scaled)
    count = sampling.top_k[:, None].astype(jnp.float32)
    ones = jnp.ones_like(scaled)
    # The k-th largest key is the least one with fewer than k above it.
    threshold = _find_threshold(keys, ones, count)
    weight_above = (keys > threshold).sum(1, keepdims=True)
    is_kept_tie = (keys == threshold) & (_count_lower_ids(keys == threshold) < count - weight_above)
    is_kept = (sampling.top_k[:, None] == 0) | (keys > threshold) | is_kept_tie
    scaled = jnp.where(is_kept, scaled, -jnp.inf)

    keys, chances = _to_sortable_ints(scaled), jax.nn.softmax(scaled)
    top_p = sampling.top_p[:, None]
    threshold = _find_threshold(keys, chances, top_p)
    weight_above = jnp.where(keys > threshold, chances, 0).sum(1, keepdims=True)
    equal = jnp.where(keys == threshold, chances, 0).max(1, keepdims=True)
    is_kept_tie = (keys == threshold) & (
        weight_above + equal * _count_lower_ids(keys == threshold) < top_p
    )
    # A sum of float32 can reach 1 before the last token, but top_p=1 has to keep them all.
    best = jnp.arange(scaled.shape[1]) == jnp.argmax(scaled, axis=1)[:, None]
    is_kept = (top_p >= 1) | (keys > threshold) | is_kept_tie | best
    return jnp.where(is_kept | ~filters[:, None], scaled, -jnp.inf)


def _to_sortable_ints(x: Float[Array, "B vocab"]) -> UInt[Array, "B vocab"]:
    """Returns integers in the same order as these numbers."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits == sign, 0, bits)  # -0.0 becomes 0.0; XLA would drop an addition of 0.0
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _count_lower_ids(mask: Bool[Array, "B vocab"]) -> Int[Array, "B vocab"]:
    """Returns how many marked tokens have a lower id."""
    return jnp.cumsum(mask, axis=1, dtype=jnp.int32) - mask


def _find_threshold(
    keys: UInt[Array, "B vocab"], weights: Float[Array, "B vocab"], limit: Float[Array, "B 1"]
) -> UInt[Array, "B 1"]:
    """Returns the least key above which the weights add up to less than `limit`.

    The search decides two bits at a time. A sort of the vocabulary would also work, but the host
    would have to wait for it.
    """

    def two_bits(i: Array, threshold: Array) -> Array:
        shift = (30 - 2 * i).astype(jnp.uint32)
        steps = [threshold + ((jnp.uint32(step) << shift) - 1) for step in (1, 2, 3)]
        sums = [jnp.where(keys > step, weights, 0).sum(1, keepdims=True) for step in steps]
        passed = sum((total >= limit).astype(jnp.uint32) for total in sums)
        return threshold + (passed << shift)

    return lax.fori_loop(0, 16, two_bits, jnp.zeros_like(keys[:, :1]))
