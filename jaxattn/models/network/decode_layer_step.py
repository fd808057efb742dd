"""A layer of a decode step: its norms, its mixer and its feed-forward, over the donated state.

A layer's output is added to the stream in the next layer's norm, in one launch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxattn.core.dispatch import ONLY_BY_NAME, Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.rms_norm import rms_norm
from jaxattn.kernels.linear.rms_norm import norms_features
from jaxattn.models.blocks import Block
from jaxattn.models.caches.layer_cache import HANDED_ON, Arrays, DecodeState
from jaxattn.models.caches.symmetric_memory import EXCHANGE, MEETING
from jaxattn.models.interface import DecodeBatch
from jaxattn.models.network.decoder_layer import DecoderLayer
from jaxattn.models.network.layer_segments import LayerSegment
from jaxattn.models.network.residual_collectives import ResidualCollectives, StepTokens
from jaxattn.models.network.residual_norm import (
    add_alone,
    add_norm_in_stack,
    add_then_norm,
    defer_norm,
    sum_add_norm,
    summed,
)
from jaxattn.nn import RMSNorm
from jaxattn.ops.collectives.all_reduce_norm import (
    all_reduce_norm_layer,
    norm_gather_layer,
    own_sum_norm_layer,
)


def caches_of(state: DecodeState, name: str) -> Arrays:
    """Returns the arrays that a layer of this cache may use.

    The arrays are the cache's own, the mailboxes through which its layers send rows, and the arrays
    that earlier layers pass on.
    """
    given = dict(state.caches[name])
    for other in (EXCHANGE, MEETING, HANDED_ON):
        given |= state.caches.get(other, {})
    return given


def kept(state: DecodeState, name: str, arrays: Arrays, arena: Any) -> DecodeState:
    """Returns the state with a layer's arrays, the mailboxes it used, and what it passes on."""
    for cache in (name, EXCHANGE, MEETING, HANDED_ON):
        own = state.caches.get(cache, {})
        if found := {key: arrays[key] for key in own if key in arrays}:
            state = state.replace(cache, found, arena)
    return state


class LayerPosition(NamedTuple):
    """A layer's place in a segment's pattern, in the repeat before `next_repeat`."""

    segment: LayerSegment[Block]
    number: int
    next_repeat: Array

    @property
    def block(self) -> Block:
        return self.segment.pattern[self.number]

    def norm(self, number: int) -> LayerIndex:
        """Returns the place of the first or second norm in the stack of all layers' norms."""
        step = 2 * len(self.segment.pattern)
        first = 2 * (self.segment.first + self.number) + number
        return LayerIndex(self.next_repeat, step, first - step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The inputs that all layers of a decode step share.

    Attributes:
        tokens: The step's tokens. `valid` is a number for the kernels, because converting a bool
            inside the loop would be a launch in each layer.
        shared: The values that the layers of each cache share, by the cache's name.
        packed: The small weights of all layers of each cache, by the cache's name.
        norms: The weights of all layers' norms in one stack, or None.
        fused: Whether a layer's output is one GPU's part, which the next norm sums.
    """

    collectives: ResidualCollectives
    batch: DecodeBatch
    tokens: StepTokens
    shared: dict[str, Any]
    packed: dict[str, Array]
    norms: Array | None
    fused: bool
    implementation: Implementation | None

    def layer(
        self,
        layer: DecoderLayer,
        place: LayerPosition,
        stacks: dict[str, Array],
        carry: tuple[Any, Any, DecodeState],
        unrolled: bool,
    ) -> tuple[Any, Any, DecodeState]:
        """Returns (the stream, the layer's addend, the state) after a layer.

        Args:
            stacks: The feed-forward's weights of all repeats, which it reads in place.
            unrolled: Whether the layers have no loop, so that the addend may be an `ExpertOutputs`.
        """
        (x, y, state), block = carry, place.block
        name, spec = block.mixer.cache_name, self.collectives.spec
        add_norm, add_mlp_norm = self.norms_of(layer, place)
        x, normed, state = add_norm(x, y, state)
        y, arrays, arena = block.mixer.decode(
            layer.mixer,
            normed,
            caches_of(state, name),
            state.arena,
            self.batch,
            spec.layer_of(*place),
            self.packed.get(name),
            self.shared[name],
            self.implementation,
        )
        y = y if self.fused else self.collectives.total(y)
        y = self.given(layer.norm, y, place, 0)
        x, normed, state = add_mlp_norm(summed(x, normed), y, state)
        y, arena_after = self.collectives.feed_forward(
            block,
            layer.mlp,
            normed,
            self.tokens,
            stacks,
            place.next_repeat,
            arena,
            self.implementation,
            fused=self.fused,
            defer_sum=unrolled and not block.norms_after,
        )
        y = self.given(layer.mlp_norm, y, place, 1)
        return summed(x, normed), y, kept(state, name, arrays, arena_after)

    def given(self, norm: RMSNorm, y: Array, place: LayerPosition, number: int) -> Array:
        """Returns a layer's addend for an output y, which norm `number` norms if `norms_after`."""
        if not place.block.norms_after:
            return y
        if self.norms is None:
            return norm(y)
        return rms_norm(y, self.norms[place.norm(number).index], norm.eps).astype(y.dtype)

    def norms_of(self, layer: DecoderLayer, place: LayerPosition) -> tuple[Callable, Callable]:
        """Returns a layer's two norms, `norm(x, added, state)` -> (the sum, its norm, the state).

        The norms use the stack of all layers' weights if there is one. For a single token, the
        product after a norm may compute the norm.
        """
        if place.block.norms_after:
            add = partial(add_alone, dtype=jnp.dtype(self.collectives.spec.stream.dtype))
            return add, add
        if self.norms is None:
            return add_then_norm(layer.norm), add_then_norm(layer.mlp_norm)
        spec, block, implementation = self.collectives.spec, place.block, self.implementation
        stream = spec.stream
        norm_options: dict[str, Any] = dict(
            weights=self.norms, eps=stream.eps, dtype=jnp.dtype(stream.dtype)
        )
        chosen = implementation if norms_features(stream.hidden_size) else "xla"
        norm: Callable = partial(add_norm_in_stack, implementation=chosen, **norm_options)
        mlp_norm = norm
        if self.tokens.valid.size == 1 == spec.parallel.gpus and chosen == implementation:
            later: Callable = partial(defer_norm, implementation=chosen, **norm_options)
            norm = later if block.mixer.norms else norm
            mlp_norm = later if block.feed_forward.norms else mlp_norm
        if self.fused:
            norm, summing = self._summing_norms(block, norm_options)
            mlp_norm = summing or mlp_norm
        return partial(norm, layer=place.norm(0)), partial(mlp_norm, layer=place.norm(1))

    def _summing_norms(
        self, block: Block, norm_options: dict[str, Any]
    ) -> tuple[Callable, Callable | None]:
        """Returns the norms that also sum over GPUs.

        The second is None if all GPUs have their own tokens, and the layer does not gather them.
        """
        spec, given = self.collectives.spec, self.implementation
        by_name = "xla" if given in ONLY_BY_NAME else given
        meets = partial(
            sum_add_norm, axes=spec.parallel.axes("all"), implementation=by_name, **norm_options
        )
        if not spec.gathers_tokens:
            return (partial(meets, meet=all_reduce_norm_layer),) * 2
        gathers = self.collectives.meets(block)
        mlp_norm = partial(meets, meet=norm_gather_layer) if gathers else None
        return partial(meets, meet=own_sum_norm_layer), mlp_norm
