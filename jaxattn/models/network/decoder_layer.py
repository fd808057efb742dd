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

# Minimum rows of a large product: for one row XLA makes a float32 copy of the whole weight (H200).
LEAST_ROWS = 8


class DecoderLayer(nnx.Module):
    """A block with its parameters."""

    def __init__(self, block: Block, stream: Stream, *, rngs: nnx.Rngs):
        self.mixer_spec, self.norms_after, self.dtype = block.mixer, block.norms_after, stream.dtype
        self.norm = norm_of(stream)
        self.mixer = block.mixer.build(stream, rngs)
        self.mlp_norm = norm_of(stream)
        self.mlp = block.feed_forward.build(stream, rngs)

    def __call__(
        self, x: Array, packed: Mapping[str, Any], handed_on: Array | None = None
    ) -> tuple[Array, Array | None]:
        """Returns (the stream of whole sequences, what the layer passes on to later ones).

        Args:
            packed: Keyword arguments of attention that describe the sequences packed in rows.
            handed_on: The choice of tokens by earlier layers, or None if no layer needs it.
        """
        turned = takes_positions(self.mixer)
        given = {name: of for name, of in packed.items() if turned or name != "positions"}
        y, handed_on = self.mixer_spec.whole(self.mixer, self.read(self.norm, x), given, handed_on)
        x = x + self.given(self.norm, y)
        x = x + self.given(self.mlp_norm, self.mlp(self.read(self.mlp_norm, x)))
        return x, handed_on

    def read(self, norm: RMSNorm, x: Array) -> Array:
        """Returns the input of a mixer or feed-forward, from the stream."""
        return x.astype(self.dtype) if self.norms_after else norm(x)

    def given(self, norm: RMSNorm, y: Array) -> Array:
        """Returns the addend to the stream from a mixer's or feed-forward's output y."""
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
    """The modules around a draft head's block: input norms, their projection, and the last norm."""

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
        """Returns the stream before the block.

        Args:
            embedded: A token's embedding.
            hidden: The output head's input for the token before it.
        """
        both = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x = jnp.concatenate(both, axis=-1).reshape(-1, 2 * hidden.shape[-1])
        y = self.projection(jnp.pad(x, ((0, max(LEAST_ROWS - len(x), 0)), (0, 0))))
        return y[: len(x)].astype(jnp.float32).reshape(hidden.shape)


def takes_positions(module: nnx.Module) -> bool:
    """Returns whether a module's call has `positions`, as attention's does."""
    arguments = inspect.signature(type(module).__call__).parameters.values()
    return any(each.name == "positions" or each.kind == each.VAR_KEYWORD for each in arguments)


def norm_of(stream: Stream) -> RMSNorm:
    dtype = stream.norm_dtype or stream.param_dtype
    return RMSNorm(stream.hidden_size, eps=stream.eps, param_dtype=dtype)
