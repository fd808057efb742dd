"""Rotary position embedding: DeepSeek's interleaved layout, the half-split one, and YaRN.

DeepSeek-V3's configuration (theta 10000, 64 rope dims, trained at 4096 tokens, extended 40 times):

    yarn = YarnConfig(factor=40, original_max_position_embeddings=4096, mscale_all_dim=1.0)
    config = RopeConfig(yarn=yarn)
    scale = softmax_scale(192, config)      # 0.1352..., where 192**-0.5 is 0.0721...
"""

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxattn.core.validation.arguments import MOST
from jaxattn.core.validation.config_fields import (
    Flag,
    Integer,
    NestedConfig,
    Nullable,
    Number,
    check_fields,
)

MOST_ROPE_DIMS = 2**16
# With these limits, the lowest frequency is above 1e-36, a normal float32 number.
MOST_THETA, MOST_FACTOR = 1e30, 1e6


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071), with the field names of DeepSeek's `rope_scaling`.

    Attributes:
        factor: Factor by which the trained context is extended, from 1 to a million.
        original_max_position_embeddings: Length of the trained context in tokens.
        beta_fast: Frequencies with at least this many turns within the trained context are kept.
        beta_slow: Frequencies with at most this many turns are divided by `factor`, with a ramp
            between the two.
        mscale: Weight of the logarithmic correction of the length of rotated queries and keys, from
            0 to 100.
        mscale_all_dim: Weight of the correction that moves into the softmax scale, where it also
            affects dims that are not rotated. DeepSeek-V3 uses 1.0 for both; 0 moves nothing.
        truncate: Whether the ramp begins and ends at whole pairs.

    Raises:
        ValueError: A field is not a finite number or is out of range, or beta_fast < beta_slow.
    """

    factor: Annotated[float, Number(1, MOST_FACTOR)]
    original_max_position_embeddings: Annotated[int, Integer(1, MOST)]
    beta_fast: Annotated[float, Number(1e-6, 1e6)] = 32.0
    beta_slow: Annotated[float, Number(1e-6, 1e6)] = 1.0
    mscale: Annotated[float, Number(0, 100)] = 1.0
    mscale_all_dim: Annotated[float, Number(0, 100)] = 0.0
    truncate: Annotated[bool, Flag()] = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                "YarnConfig: beta_fast must be at least beta_slow; got "
                f"beta_fast={self.beta_fast:g}, beta_slow={self.beta_slow:g}"
            )


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's context extension, with the field names of its `rope_scaling`.

    Attributes:
        factor: Divisor of the frequencies of long waves.
        low_freq_factor: A wave with fewer turns within the trained context is long.
        high_freq_factor: Frequencies with more turns are kept, with a ramp between the two.
        original_max_position_embeddings: Length of the trained context in tokens.

    Raises:
        ValueError: A field is not a finite number or is out of range, or high_freq_factor is not
            above low_freq_factor.
    """

    factor: Annotated[float, Number(1, MOST_FACTOR)]
    low_freq_factor: Annotated[float, Number(1e-6, 1e6)]
    high_freq_factor: Annotated[float, Number(1e-6, 1e6)]
    original_max_position_embeddings: Annotated[int, Integer(1, MOST)]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "Llama3RopeScaling: high_freq_factor must be above low_freq_factor; got "
                f"low_freq_factor={self.low_freq_factor:g}, "
                f"high_freq_factor={self.high_freq_factor:g}"
            )


@dataclasses.dataclass(frozen=True)
class QueryScaling:
    """The scaling of queries beyond the trained context (Llama 4, Ministral 3).

    Attributes:
        beta: Weight of the logarithm, from 0 to 100.
        original_max_position_embeddings: Length of the trained context in tokens.

    Raises:
        ValueError: A field is not a finite number or is out of range.
    """

    beta: Annotated[float, Number(0, 100)]
    original_max_position_embeddings: Annotated[int, Integer(1, MOST)]

    def __post_init__(self) -> None:
        check_fields(self)

    def factor(self, positions: Int[Array, "..."]) -> Float[Array, "..."]:
        """Returns the factor of queries at these positions, 1 within the trained context."""
        contexts = positions // self.original_max_position_embeddings
        return 1 + self.beta * jnp.log1p(contexts.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotated pairs of dims and their frequencies.

    Attributes:
        dim: P, the number of rotated dims (qk_rope_head_dim), even.
        theta: Base of the frequencies, greater than 1. None rotates nothing (Kimi-Linear's NoPE).
        interleaved: True pairs dims (2i, 2i + 1) as in DeepSeek's checkpoints. False pairs (i, i +
            P/2), the half-split layout of GPT-NeoX and Llama. Input and output have the same
            layout.
        yarn: Context extension by YaRN. None keeps the frequencies.
        llama3: Context extension as in Llama 3.1.
        linear: Context extension that divides all frequencies by this factor, from 1 to a million;
            1 keeps them. At most one of `yarn`, `llama3` and `linear` may be used.

    Raises:
        ValueError: A field does not fit, YaRN's ramp would run backwards, or an extension is given
            without theta or twice.
    """

    dim: Annotated[int, Integer(2, MOST_ROPE_DIMS, multiple_of=2)] = 64
    theta: Annotated[float | None, Nullable(Number(1, MOST_THETA, open_below=True))] = 10000.0
    interleaved: Annotated[bool, Flag()] = True
    yarn: Annotated[YarnConfig | None, Nullable(NestedConfig(YarnConfig))] = None
    llama3: Annotated[Llama3RopeScaling | None, Nullable(NestedConfig(Llama3RopeScaling))] = None
    linear: Annotated[float, Number(1, MOST_FACTOR)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        given = {"yarn": self.yarn, "llama3": self.llama3, "linear": self.linear != 1}
        kinds = [name for name, is_so in given.items() if is_so]
        if kinds and self.theta is None:
            raise ValueError(
                f"RopeConfig.theta must be a number, as {kinds[0]} scales its frequencies; got None"
            )
        if len(kinds) > 1:
            raise ValueError(
                f"RopeConfig: {kinds[0]} and {kinds[1]} both stretch the context; give only one"
            )
        if self.yarn is not None and self.theta is not None:
            _ramp(self.dim, self.theta, self.yarn)


def _ramp(dim: int, theta: float, yarn: YarnConfig) -> tuple[float, float]:
    """Returns the pairs where YaRN's ramp begins and ends, as in DeepSeek-V3's model.py."""

    def pair_turning(times: float) -> float:
        """Returns the (fractional) pair with this many turns within the trained context."""
        wavelength = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The published code bounds the index of a pair by dim - 1 instead of dim / 2 - 1.
    low, high = max(first, 0), min(last, dim - 1)
    if low > high:  # the formulas would swap the kept and the stretched pairs
        raise ValueError(
            f"RopeConfig: YaRN's ramp would begin at pair {low:,.4g} and end at pair {high:,.4g} "
            f"of {dim=}; change theta={theta:g} or original_max_position_embeddings="
            f"{yarn.original_max_position_embeddings:,}"
        )
    return low, high


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def inv_freq(config: RopeConfig) -> np.ndarray:
    """Returns radians per token of each pair, float32 [P / 2], as DeepSeek-V3's model.py does."""
    pairs = np.arange(config.dim // 2, dtype=np.float64)
    if config.theta is None:
        return np.zeros_like(pairs, np.float32)
    freq = config.theta ** (-2 * pairs / config.dim)
    if config.llama3 is not None:
        return _llama3(freq, config.llama3).astype(np.float32)
    if config.yarn is None:
        return (freq / config.linear).astype(np.float32)
    yarn = config.yarn
    low, high = _ramp(config.dim, config.theta, yarn)
    width = high - low if high != low else 0.001
    stretched = np.clip((pairs - low) / width, 0, 1)
    return (freq / yarn.factor * stretched + freq * (1 - stretched)).astype(np.float32)


def _llama3(freq: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Stretches the frequencies of pairs as transformers does for Llama 3.1."""
    turns = freq * scaling.original_max_position_embeddings / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * freq / scaling.factor + kept * freq


def softmax_scale(qk_head_dim: int, config: RopeConfig) -> float:
    """Returns qk_head_dim**-0.5 * mscale**2; mscale is 1 unless YaRN's `mscale_all_dim` is set.

    `qk_head_dim` counts the dims of the unabsorbed query (DeepSeek-V3: nope 128 + rope 64 = 192),
    because absorption changes the shape of the dot product, but not its value.

    Raises:
        ValueError: `qk_head_dim` is not an integer of at least 1.
    """
    Integer(1, MOST)("softmax_scale: qk_head_dim", qk_head_dim)
    mscale = _mscale(config.yarn.factor, config.yarn.mscale_all_dim) if config.yarn else 1.0
    return qk_head_dim**-0.5 * mscale**2


class Rotation(NamedTuple):
    """The angles of tokens, for the layers that share them.

    Attributes:
        angles: [..., 2 P], float32 by default: the cosine of every dim, its own factor, followed by
            the signed sine, the factor of the other dim of its pair.
    """

    angles: jax.Array


@jax.named_scope("rotation")
def rotation(
    positions: Int[Array, "..."], config: RopeConfig, dtype: DTypeLike = jnp.float32
) -> Rotation:
    """Returns the rotation by every position's angles, times YaRN's factor of vector lengths.

    Raises:
        TypeError: `positions` are not integers.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"rope: positions must be integers, got {positions.dtype} {positions.shape}"
        )
    angle = positions[..., None].astype(dtype) * jnp.asarray(inv_freq(config), dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if config.yarn:
        yarn = config.yarn
        length = _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
        cos, sin = cos * length, sin * length
    axis = -1 if config.interleaved else -2
    cosines, sines = jnp.stack([cos, cos], axis=axis), jnp.stack([-sin, sin], axis=axis)
    shape = (*positions.shape, config.dim)
    return Rotation(jnp.concatenate([cosines.reshape(shape), sines.reshape(shape)], axis=-1))


def in_layout(rotation: Rotation, config: RopeConfig, interleaved: bool) -> Rotation:
    """Converts a rotation of `config` to another layout of pairs."""
    if interleaved == config.interleaved:
        return rotation
    cosines, sines = jnp.split(rotation.angles, 2, axis=-1)
    pairs = config.dim // 2
    # Pairs are the inner axis of one layout and the outer axis of the other.
    pair_shape = (pairs, 2) if config.interleaved else (2, pairs)
    parts = (
        x.reshape(*x.shape[:-1], *pair_shape).swapaxes(-1, -2).reshape(x.shape)
        for x in (cosines, sines)
    )
    return Rotation(jnp.concatenate(list(parts), axis=-1))


def check_config(op: str, config: Any) -> None:
    """Raises, naming the op, unless `config` is a `RopeConfig`."""
    if not isinstance(config, RopeConfig):
        raise TypeError(f"{op}: config must be a jaxattn.RopeConfig, got {type(config).__name__}")


def check_rotation(
    op: str, rotation: Rotation, config: RopeConfig, tokens: tuple[int, int]
) -> None:
    """Raises, naming the op, unless `rotation` is for `tokens` [B, S] and `config.dim`."""
    if not isinstance(rotation, Rotation):
        dtype = str(getattr(rotation, "dtype", type(rotation).__name__))
        raise TypeError(
            (
                f"{op}: rotation must be a result of jaxattn.rotation, got {dtype} "
                f"{getattr(rotation, 'shape', '')}"
            ).rstrip()
        )
    if rotation.angles.shape != (*tokens, 2 * config.dim):
        raise ValueError(
            f"{op}: rotation must be for positions [B, S] = {[*tokens]} and {config.dim=}, got "
            f"angles {rotation.angles.shape}"
        )


@jax.named_scope("rope")
def rope(
    x: Float[Array, "... P"], positions: Int[Array, "..."] | Rotation, config: RopeConfig
) -> Float[Array, "... P"]:
    """Rotates the last axis of `x` by its positions; computed in float32, returned in x's dtype.

    Args:
        x: [..., T, P], or with heads [..., T, H, P].
        positions: Integer positions, one per token, or their `rotation`. The array has one axis
            fewer than `x`, or two fewer with heads. Each axis equals that of `x` or is 1.
        config: Configuration of the rotation; P must be `config.dim`.

    Raises:
        TypeError: `positions` are not integers, or `x` is not floating.
        ValueError: The shapes do not fit.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"rope: x must be floating, got {x.dtype} {x.shape}")
    if x.ndim < 1 or x.shape[-1] != config.dim:
        raise ValueError(f"rope: the last axis of x must be {config.dim=}, got x {x.shape}")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if not isinstance(positions, Rotation):
        positions = rotation(positions, config, dtype)
    angles = positions.angles
    tokens = angles.shape[:-1]
    if x.ndim - len(tokens) not in (1, 2) or any(
        n not in (1, m) for n, m in zip(tokens, x.shape[: len(tokens)], strict=True)
    ):
        raise ValueError(
            "rope: positions must have the axes of x without P, or without H and P, got x "
            f"{x.shape}, positions {tokens}"
        )
    if config.theta is None:
        return x
    if x.ndim - len(tokens) == 2:
        angles = angles[..., None, :]
    wide, half = x.astype(dtype), config.dim // 2
    if config.interleaved:
        a, b, axis = wide[..., 0::2], wide[..., 1::2], -1
        cos, sin = angles[..., : config.dim : 2], angles[..., config.dim + 1 :: 2]
    else:
        a, b, axis = wide[..., :half], wide[..., half:], -2
        cos, sin = angles[..., :half], angles[..., config.dim + half :]
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=axis)
    return rotated.reshape(x.shape).astype(x.dtype)
