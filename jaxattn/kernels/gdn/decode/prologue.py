"""The prologue of delta-rule decode: the loads other than states, the convolution and the gates.

It computes the convolved channels of q, k and values, the gates, and the factors that make q and k
unit vectors. A thread has one channel of a head's 128.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.silu import silu
from jaxattn.kernels.hopper.store.row_store import store

DIM = 128  # Dk and Dv
WIDTH = 4  # taps of the convolution
CHANNEL = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class GdnDecodeConfig:
    """The static properties of a launch; `conv` and `norm` are whether these ends of the layer are
    fused.

    `stacked`: whether there is a row of weights per layer, not one. `keep`: whether states are
    stored after every token, not only after the last. `channels`: whether every channel of the key
    has its own decay (KDA), and the norm's factor is sigmoid(z). `lower_bound`: the lower bound of
    such log decays, or None for softplus. `halves`: whether b and a are sums of two columns, 2 Hv
    apart.
    """

    q_len: int
    key_heads: int
    value_heads: int
    conv: bool
    norm: bool
    l2norm: bool
    stacked: bool
    keep: bool
    scale: float
    eps: float
    channels: bool = False
    lower_bound: float | None = None
    halves: bool = False

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def conv_channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * DIM


@dataclasses.dataclass(frozen=True)
class ChannelSlice:
    """Adjacent numbers of a row of inputs or weights, and the threads that hold them."""

    first: Any
    count: int = DIM
    layout: Any = CHANNEL

    def load(self, ref: Any) -> jax.Array:
        """Loads the slice from a ref of a whole row."""
        at = pl.ds(self.first, self.count)
        return plgpu.load(ref.at[at], layout=self.layout, optimized=False)


def _softplus(x: jax.Array) -> jax.Array:
    """Returns log(1 + e^x). The GPU's logarithm is accurate to 2^-22 near 1, not relative to a
    result near 0."""
    t = jnp.exp(-jnp.abs(x))
    series = t * (1 - t * (1 / 2 - t * (1 / 3 - t * (1 / 4))))
    return jnp.maximum(x, 0.0) + jnp.where(t < 0.05, series, jnp.log(1.0 + t))


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x.astype(jnp.float32)))


def gates(
    op: GdnDecodeConfig, A_log: Any, bias: Any, b: list[Any], a: list[Any]
) -> list[tuple[Any, Any]]:
    """Returns the (decay, beta) of a head's tokens; a decay per channel has the layout CHANNEL."""
    rate = jnp.exp(A_log)

    def decay(a: Any) -> Any:
        if op.lower_bound is not None:
            return jnp.exp(op.lower_bound * _sigmoid(rate * (a + bias)))
        return jnp.exp(-rate * _softplus(a + bias))

    numbers = [[x.astype(jnp.float32) for x in each] for each in zip(a, b, strict=True)]
    return [(decay(a), _sigmoid(b)) for a, b in numbers]


def gated(op: GdnDecodeConfig, z: jax.Array) -> jax.Array:
    """Returns the factor of the normed output."""
    return _sigmoid(z) if op.channels else silu(z)


def products(op: GdnDecodeConfig, q: jax.Array, k: jax.Array) -> Iterator[jax.Array]:
    """Yields the products whose sums `factors_of` takes."""
    if op.l2norm:
        yield q * q
        yield k * k
    yield q * k


def factors_of(op: GdnDecodeConfig, sums: Iterable[jax.Array]) -> tuple[Any, Any, jax.Array]:
    """Returns the factors of a token's q and k, and the product of both, from the sums of
    `products`."""
    sums = iter(sums)
    if not op.l2norm:
        return op.scale, 1.0, next(sums) * op.scale
    q_factor, k_factor = (lax.rsqrt(next(sums) + 1e-6) for _ in range(2))
    q_factor *= op.scale
    # For a vector too long for its norm the factor is 0, and the product may be inf.
    k_q = next(sums) * q_factor * k_factor
    return q_factor, k_factor, jnp.where((q_factor == 0) | (k_factor == 0), 0.0, k_q)


def convolved(window: list[jax.Array], taps: list[jax.Array], token: int) -> jax.Array:
    if not taps:
        return window[token].astype(jnp.float32)
    terms = [tap * window[token + j].astype(jnp.float32) for j, tap in enumerate(taps)]
    return silu(functools.reduce(operator.add, terms))


class GdnDecodeInputs:
    """The inputs of one row's value heads `heads`, which share a key head.

    `channels`: those of q, of k and of each head's values. With decays per channel, f and z of the
    value heads are separate arrays, and `ba` has only b.
    """

    def __init__(
        self, op: GdnDecodeConfig, qkvz: Any, ba: Any, f: Any, z: Any, weights: Any, conv: Any,
        row: Any, key_head: Any, heads: list[Any],
    ) -> None:  # fmt: skip
        self.op, self.qkvz, self.ba, self.weights, self.conv = op, qkvz, ba, weights, conv
        self.f, self.z, self.row, self.heads = f, z, row, heads
        of_values = (2 * op.key_heads + head for head in heads)
        of_heads = (key_head, op.key_heads + key_head, *of_values)
        self.channels = [ChannelSlice(head * DIM) for head in of_heads]

    def of_tokens(self, channels: ChannelSlice, ref: Any = None) -> list[jax.Array]:
        """Loads each token's channels, from q, k and v unless `ref` is another input."""
        ref = self.qkvz if ref is None else ref
        return [channels.load(ref.at[self.row, token]) for token in range(self.op.q_len)]

    def b_and_a(self) -> list[Any]:
        """Returns (b, a) of the value heads' tokens; with decays per channel a is 128 channels of
        f."""

        def numbers(first: Any) -> list[Any]:
            found = [self.ba[self.row, token, first] for token in range(self.op.q_len)]
            if self.op.halves:
                rest = first + 2 * self.op.value_heads
                found = [x + self.ba[self.row, token, rest] for token, x in enumerate(found)]
            return found

        if self.op.channels:
            return [
                [numbers(head), self.of_tokens(ChannelSlice(head * DIM), self.f)]
                for head in self.heads
            ]
        return [[numbers(head), numbers(self.op.value_heads + head)] for head in self.heads]

    def new(self) -> list[list[jax.Array]]:
        """Returns the tokens' inputs of `channels`."""
        return [self.of_tokens(some) for some in self.channels]

    def of_gate(self, head: Any, first: Any = 0, count: int = DIM, layout: Any = CHANNEL) -> Any:
        """Returns z of a head's channels from `first` on, for each token."""
        packed = 0 if self.op.channels else self.op.conv_channels
        z = ChannelSlice(packed + head * DIM + first, count, layout)
        return self.of_tokens(z, self.z if self.op.channels else self.qkvz)

    @property
    def first_norm(self) -> int:
        """The index of the norm's weight in a row of weights: after A_log and dt_bias."""
        return self.op.value_heads * (1 + DIM if self.op.channels else 2)

    def given(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Loads everything whose address does not depend on the slot: (inputs, (b, a) and z of the
        value heads)."""
        b_and_a = self.b_and_a()
        z = [self.of_gate(head) for head in self.heads] if self.op.norm else []
        return self.new(), b_and_a, z

    def windows(self, layer: Any, own: Any, slot: Any, new: list[list[jax.Array]]) -> list[Any]:
        """Returns, for each of `channels`: (the channels, their W - 1 + S inputs, their W taps).

        `own`: the layer's row of weights.
        """
        if not self.op.conv:
            return [(some, inputs, []) for some, inputs in zip(self.channels, new, strict=True)]
        at = self.first_norm + DIM  # index of the first tap
        every = self.op.conv_channels
        windows = []
        for some, inputs in zip(self.channels, new, strict=True):
            old = [some.load(self.conv.at[layer, slot, j]) for j in range(WIDTH - 1)]
            taps = [
                some.load(self.weights.at[own, pl.ds(at + j * every, every)]) for j in range(WIDTH)
            ]
            windows.append((some, old + inputs, taps))
        return windows

    def of_gates(self, own: Any, b_and_a: list[Any]) -> list[tuple[Any, ...]]:
        """Returns the arguments of `gates` for each head."""
        count = self.op.value_heads

        def bias(head: Any) -> Any:
            if self.op.channels:
                return ChannelSlice(count + head * DIM).load(self.weights.at[own])
            return self.weights[own, count + head]

        return [
            (self.weights[own, head], bias(head), *each)
            for head, each in zip(self.heads, b_and_a, strict=True)
        ]

    def norm_weight(self, own: Any) -> jax.Array:
        return ChannelSlice(self.first_norm).load(self.weights.at[own])

    def keep(self, layer: Any, target: Any, token: int, window: Any) -> None:
        """Stores a window's last W - 1 inputs up to `token` as the convolution's state of a
        slot."""
        channels, inputs, _ = window
        at = pl.ds(channels.first, channels.count)
        for j, x in enumerate(inputs[token + 1 : token + WIDTH]):
            kept = x.astype(self.conv.dtype)
            store(self.conv.at[layer, target, j, at], kept)
