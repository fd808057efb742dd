"""The modules of a decoder's layers: a block with its parameters, and a repeat of a segment."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxattn.models.blocks import Block, Stream
from jaxattn.nn import RMSNorm
from jaxattn.nn.linear import Linear

# Of a large product of XLA's: of one row it makes a float32 copy of the whole weight (H200).
LEAST_ROWS = 8


class DecoderLayer(nnx.Module):
    """A block with its parameters."""

    def __init__(self, block: Block, stream: Stream, *, rngs: nnx.Rngs):
        self.of, self.norms_after, self.dtype = block.mixer, block.norms_after, stream.dtype
        self.norm = norm_of(stream)
        self.mixer = block.mixer.build(stream, rngs)
        self.mlp_norm = norm_of(stream)
        self.mlp = block.feed_forward.build(stream, rngs)

    def __call__(
        self, x: Array, packed: Mapping[str, Any], handed_on: Array | None = None
    ) -> tuple[Array, Array | None]:
        """(whole sequences, what the layer hands on to those behind it).

        Args:
            packed: how rows hold several, in the keywords of attention.
            handed_on: by the layers before, the choice of tokens; None if no layer needs it.
        """
        turned = takes_positions(self.mixer)
        given = {name: of for name, of in packed.items() if turned or name != "positions"}
        y, handed_on = self.of.whole(self.mixer, self.read(self.norm, x), given, handed_on)
        x = x + self.given(self.norm, y)
        x = x + self.given(self.mlp_norm, self.mlp(self.read(self.mlp_norm, x)))
        return x, handed_on

    def read(self, norm: RMSNorm, x: Array) -> Array:
        """What a mixer or feed-forward reads of the stream."""
        return x.astype(self.dtype) if self.norms_after else norm(x)

    def given(self, norm: RMSNorm, y: Array) -> Array:
        """What a mixer or feed-forward with the output y adds to the stream."""
        return norm(y) if self.norms_after else y


class LayerGroup(nnx.Module):
    """One repeat of a segment: the body of its scan."""

    def __init__(self, pattern: tuple[Block, ...], stream: Stream, *, rngs: nnx.Rngs):
        self.layers = nnx.List([DecoderLayer(block, stream, rngs=rngs) for block in pattern])

    def __call__(
        self, x: Array, packed: Mapping[str, Any], handed_on: Array | None = None
    ) -> tuple[Array, Array | None]:
        for layer in self.layers:
            x, handed_on = layer(x, packed, handed_on)
        return x, handed_on


class DraftLayers(nnx.Module):
    """What is around the block of a draft head: norms of what it reads, their projection, and the
    norm before the output head."""

    def __init__(self, stream: Stream, *, rngs: nnx.Rngs):
        self.embedding_norm, self.hidden_norm = norm_of(stream), norm_of(stream)
        self.projection = Linear(
            2 * stream.hidden_size,
            stream.hidden_size,
            dtype=stream.dtype,
            param_dtype=stream.param_dtype,
            rngs=rngs,
        )
        self.norm = norm_of(stream)

    def __call__(self, embedded: Array, hidden: Array) -> Array:
        """The stream before the block, of a token's embedding and of what the output head read of
        the token before it."""
        both = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x = jnp.concatenate(both, axis=-1).reshape(-1, 2 * hidden.shape[-1])
        y = self.projection(jnp.pad(x, ((0, max(LEAST_ROWS - len(x), 0)), (0, 0))))
        return y[: len(x)].astype(jnp.float32).reshape(hidden.shape)


def takes_positions(module: nnx.Module) -> bool:
    """Whether a module's call has `positions`, as attention's has and a recurrence's has not."""
    arguments = inspect.signature(type(module).__call__).parameters.values()
    return any(each.name == "positions" or each.kind == each.VAR_KEYWORD for each in arguments)


def norm_of(stream: Stream) -> RMSNorm:
    dtype = stream.norm_dtype or stream.param_dtype
    return RMSNorm(stream.hidden_size, eps=stream.eps, param_dtype=dtype)
