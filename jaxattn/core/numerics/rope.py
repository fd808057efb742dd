"""Rotary position embedding: DeepSeek's interleaved layout, the half-split one, and YaRN.

DeepSeek-V3's configuration (theta 10000, 64 rope dims, trained at 4096 and stretched 40 times):

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
# With both, the slowest frequency is above 1e-36, a normal float32 number.
MOST_THETA, MOST_FACTOR = 1e30, 1e6


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071), with the names of DeepSeek's `rope_scaling`.

    Attributes:
        factor: the new context divided by the trained context, from 1 to a million.
        original_max_position_embeddings: tokens of the trained context.
        beta_fast: frequencies with at least this many rotations within the trained context are
            unchanged.
        beta_slow: frequencies with at most this many rotations are divided by `factor`. A ramp
            connects both ranges.
        mscale: weight of the logarithmic correction of the length of rotated queries and keys, from
            0 to 100.
        mscale_all_dim: weight of the part of the correction that moves into the softmax scale,
            which also applies to dims that are not rotated. DeepSeek-V3 has 1.0 for both; 0 moves
            nothing.
        truncate: the ramp begins and ends at whole pairs.

    Raises:
        ValueError: a field is not a finite number or is out of range, or beta_fast < beta_slow.
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
    """The stretched context of Llama 3.1, in the words of its `rope_scaling`.

    Attributes:
        factor: by what the frequencies of long waves are divided.
        low_freq_factor: a wave is long if it turns less often within the trained context.
        high_freq_factor: a frequency that turns more often there is kept; a ramp lies between.
        original_max_position_embeddings: tokens of the trained context.

    Raises:
        ValueError: a field is no finite number or outside its range, or the second factor is not
            above the first.
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
    """The growth of queries behind the trained context (Llama 4, Ministral 3).

    Attributes:
        beta: weight of the logarithm, from 0 to 100.
        original_max_position_embeddings: tokens of the trained context.

    Raises:
        ValueError: a field is no finite number or outside its range.
    """

    beta: Annotated[float, Number(0, 100)]
    original_max_position_embeddings: Annotated[int, Integer(1, MOST)]

    def __post_init__(self) -> None:
        check_fields(self)

    def factor(self, positions: Int[Array, "..."]) -> Float[Array, "..."]:
        """What the queries at these positions are times: 1 within the trained context."""
        contexts = positions // self.original_max_position_embeddings
        return 1 + self.beta * jnp.log1p(contexts.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The pairs of dims that RoPE rotates, and the frequencies.

    At most one of `yarn`, `llama3` and `linear` may scale the frequencies.

    Attributes:
        dim: P, the number of rotated dims (qk_rope_head_dim), even.
        theta: base of the frequencies, more than 1; None rotates nothing (Kimi-Linear's NoPE).
        interleaved: True pairs dims (2i, 2i + 1) as DeepSeek's checkpoints do; False pairs (i, i +
            P/2), the half-split layout of GPT-NeoX and Llama. Input and output have the same
            layout.
        yarn: YaRN scaling for a longer context; None leaves the frequencies unchanged.
        llama3: Llama 3's scaling for a longer context.
        linear: divides all frequencies by this factor, from 1 to a million; 1 leaves them
            unchanged.

    Raises:
        ValueError: a field is out of range, YaRN's ramp would be reversed, theta is None with a
            scaling, or two scalings are given.
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
    """The pairs where YaRN's ramp begins and ends, as DeepSeek-V3's model.py computes them."""

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns that often within the trained context."""
        wavelength = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The published code bounds this index of a pair by dim - 1, not by dim / 2 - 1.
    low, high = max(first, 0), min(last, dim - 1)
    if low > high:  # the formulas would stretch the pairs to keep, and keep those to stretch
        raise ValueError(
            f"RopeConfig: YaRN's ramp would begin at pair {low:,.4g} and end at pair {high:,.4g} "
            f"of {dim=}; change theta={theta:g} or original_max_position_embeddings="
            f"{yarn.original_max_position_embeddings:,}"
        )
    return low, high


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def inv_freq(config: RopeConfig) -> np.ndarray:
    """Radians per token of each pair, float32 [P / 2], as DeepSeek-V3's model.py computes them."""
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
    """Frequencies of pairs, stretched as transformers stretches those of Llama 3.1."""
    turns = freq * scaling.original_max_position_embeddings / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * freq / scaling.factor + kept * freq


def softmax_scale(qk_head_dim: int, config: RopeConfig) -> float:
    """qk_head_dim**-0.5 * mscale**2, with mscale = 1 unless YaRN's `mscale_all_dim` is set.

    `qk_head_dim` is the number of dims of the query before absorption (DeepSeek-V3: nope 128 + rope
    64 = 192). Absorption changes the shape of the dot product, but not its value.

    Raises:
        ValueError: `qk_head_dim` is not an integer of at least 1.
    """
    Integer(1, MOST)("softmax_scale: qk_head_dim", qk_head_dim)
    mscale = _mscale(config.yarn.factor, config.yarn.mscale_all_dim) if config.yarn else 1.0
    return qk_head_dim**-0.5 * mscale**2


class Rotation(NamedTuple):
    """The angles of some tokens, for the layers that share them.

    Attributes:
        angles: [..., 2 P], float32 unless asked otherwise: of every dim the cosine, which it is
            times, and then the signed sine, which the other dim of its pair is times.
    """

    angles: jax.Array


@jax.named_scope("rotation")
def rotation(
    positions: Int[Array, "..."], config: RopeConfig, dtype: DTypeLike = jnp.float32
) -> Rotation:
    """The rotation by the angles of all positions, including YaRN's scale of lengths.

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


def in_layout(given: Rotation, config: RopeConfig, interleaved: bool) -> Rotation:
    """A rotation of `config` for dims in another layout of pairs."""
    if interleaved == config.interleaved:
        return given
    cosines, sines = jnp.split(given.angles, 2, axis=-1)
    pairs = config.dim // 2
    # Pairs are the inner axis of one layout and the outer axis of the other.
    now = (pairs, 2) if config.interleaved else (2, pairs)
    parts = (
        x.reshape(*x.shape[:-1], *now).swapaxes(-1, -2).reshape(x.shape) for x in (cosines, sines)
    )
    return Rotation(jnp.concatenate(list(parts), axis=-1))


def check_config(op: str, config: Any) -> None:
    """Raises, in the op's name, unless it is a `RopeConfig`."""
    if not isinstance(config, RopeConfig):
        raise TypeError(f"{op}: config must be a jaxattn.RopeConfig, got {type(config).__name__}")


def check_rotation(op: str, given: Rotation, config: RopeConfig, tokens: tuple[int, int]) -> None:
    """Raises, in the op's name, unless it is a rotation of `tokens` [B, S] and of `config.dim`."""
    if not isinstance(given, Rotation):
        found = str(getattr(given, "dtype", type(given).__name__))
        raise TypeError(
            (
                f"{op}: rotation must be a result of jaxattn.rotation, got {found} "
                f"{getattr(given, 'shape', '')}"
            ).rstrip()
        )
    if given.angles.shape != (*tokens, 2 * config.dim):
        raise ValueError(
            f"{op}: rotation must be for positions [B, S] = {[*tokens]} and {config.dim=}, got "
            f"angles {given.angles.shape}"
        )


@jax.named_scope("rope")
def rope(
    x: Float[Array, "... P"], positions: Int[Array, "..."] | Rotation, config: RopeConfig
) -> Float[Array, "... P"]:
    """Rotates the last axis of `x` by its positions; computed in float32, returned in x's dtype.

    Args:
        x: [..., T, P], or with heads [..., T, H, P].
        positions: integers, one per token: one axis fewer than `x`, or with heads two. Each axis
            equals that of `x` or is 1. Or the `rotation` of such.
        config: P must be `config.dim`.

    Raises:
        TypeError: `positions` are not integers, or `x` is not floating.
        ValueError: the shapes do not fit.
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
