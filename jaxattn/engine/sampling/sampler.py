"""The next token of each row, chosen on the device.

A row's randomness is a function of its request's seed and of the token's position, and of nothing
else: its draws are the same in any row, beside any other rows.
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


class SamplingMode(enum.IntEnum):
    """How much of sampling a step does. The host takes the least that its rows need.

    XLA has the host wait for the branch of a conditional, so each level is an executable of its
    own. What a row is given does not depend on the level, if it is enough for the row.
    """

    GREEDY = 0
    DRAWS = 1
    CONTROLS = 2
    LOGPROBS = 3

    def __str__(self) -> str:
        return self.name.lower()


def level_of(request: Request) -> SamplingMode:
    """The least that a row of this request needs."""
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
    """The tokens of `draw`."""
    return draw(logits, sampling, positions, level)[0]


def draw(
    logits: Float[Array, "B vocab"],
    sampling: SamplingBatch,
    positions: Int[Array, "B"],
    level: SamplingMode = SamplingMode.CONTROLS,
) -> tuple[Int[Array, "B"], Float[Array, "B vocab"]]:
    """int32 token ids, -1 for a row whose logits hold NaN or an infinite maximum.

    Of equally likely tokens the greedy choice and the filters prefer the lowest id. `min_p` and
    `top_k` filter first, then `top_p` filters what they leave. The vocabulary is searched for
    `top_k` and `top_p` from `SamplingMode.CONTROLS` on.

    Args:
        logits: float32.
        positions: int32, where in its row the sampled token will stand.
        level: rows that need more are sampled wrong.

    Returns:
        (the tokens, the `masked_logits` that they are drawn from; those of the model where all rows
        are greedy).
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
    most: Float[Array, "B 1"] | None = None,
    level: SamplingMode = SamplingMode.CONTROLS,
) -> Float[Array, "B vocab"]:
    """Logits of the distribution that a row draws from, -inf for tokens that it cannot draw. NaN
    where the largest logit is infinite or NaN.

    Args:
        most: the largest logit of each row, if it is known.
    """
    most = logits.max(axis=-1, keepdims=True) if most is None else most
    draws = sampling.temperature > 0
    heat = jnp.where(draws, sampling.temperature, 1.0)
    # A maximum of 0 before the division: a tiny temperature then gives -inf, not inf - inf.
    scaled = _min_p((logits - most) / heat[:, None], sampling)
    if level <= SamplingMode.DRAWS:
        return scaled
    return _filters(scaled, sampling, draws & ((sampling.top_k > 0) | (sampling.top_p < 1)))


def _min_p(scaled: Array, sampling: SamplingBatch) -> Array:
    """-inf for tokens that `min_p` leaves out."""
    return jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)


def _categorical(scaled: Array, sampling: SamplingBatch, positions: Array) -> Array:
    keys = jax.vmap(sampling_key)(sampling.seeds, positions)
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)


def _filters(
    scaled: Float[Array, "B vocab"], sampling: SamplingBatch, filters: Bool[Array, "B"]
) -> Float[Array, "B vocab"]:
    """-inf for what `top_k` and `top_p` leave out, in the rows that have one of them."""
    keys = _ordered(scaled)
    count = sampling.top_k[:, None].astype(jnp.float32)
    ones = jnp.ones_like(scaled)
    # The k-th largest is the least with fewer than k above it.
    least = _least_with_less_above(keys, ones, count)
    above = (keys > least).sum(1, keepdims=True)
    few = (keys == least) & (_before(keys == least) < count - above)
    kept = (sampling.top_k[:, None] == 0) | (keys > least) | few
    scaled = jnp.where(kept, scaled, -jnp.inf)

    keys, chances = _ordered(scaled), jax.nn.softmax(scaled)
    top_p = sampling.top_p[:, None]
    least = _least_with_less_above(keys, chances, top_p)
    above = jnp.where(keys > least, chances, 0).sum(1, keepdims=True)
    equal = jnp.where(keys == least, chances, 0).max(1, keepdims=True)
    few = (keys == least) & (above + equal * _before(keys == least) < top_p)
    # A sum of float32 can reach 1 before the last token: 1 has to keep them all.
    best = jnp.arange(scaled.shape[1]) == jnp.argmax(scaled, axis=1)[:, None]
    kept = (top_p >= 1) | (keys > least) | few | best
    return jnp.where(kept | ~filters[:, None], scaled, -jnp.inf)


def _ordered(x: Float[Array, "B vocab"]) -> UInt[Array, "B vocab"]:
    """Integers in the order of these numbers."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits == sign, 0, bits)  # -0.0 is 0.0; XLA leaves out an addition of 0.0
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _before(marked: Bool[Array, "B vocab"]) -> Int[Array, "B vocab"]:
    """How many marked tokens have a lower id."""
    return jnp.cumsum(marked, axis=1, dtype=jnp.int32) - marked


def _least_with_less_above(
    keys: UInt[Array, "B vocab"], weights: Float[Array, "B vocab"], limit: Float[Array, "B 1"]
) -> UInt[Array, "B 1"]:
    """The least number above which the weights' sum is below `limit`, two bits at a time.

    A sort of the vocabulary would give it too, and XLA has the host wait for it.
    """

    def two_bits(i: Array, least: Array) -> Array:
        shift = (30 - 2 * i).astype(jnp.uint32)
        steps = [least + ((jnp.uint32(step) << shift) - 1) for step in (1, 2, 3)]
        sums = [jnp.where(keys > step, weights, 0).sum(1, keepdims=True) for step in steps]
        passed = sum((total >= limit).astype(jnp.uint32) for total in sums)
        return least + (passed << shift)

    return lax.fori_loop(0, 16, two_bits, jnp.zeros_like(keys[:, :1]))
