"""Collectives over the residual stream: sums of layers' outputs over GPUs; none on one GPU.

Where `fused`, a step sums in the launches of its norms (`ops/collectives/all_reduce_norm.py`). What
a layer gives is then one GPU's part, until the next norm.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxattn.arena import Arena
from jaxattn.core.dispatch import Implementation
from jaxattn.models.blocks import Block
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.network.layer_scan import in_repeat
from jaxattn.ops.linear.norm_linear import ExpertOutputs
from jaxattn.parallel import (
    Dimension,
    all_gather,
    all_gather_via_all_reduce,
    all_reduce,
    local_shard,
    rank,
)


@dataclasses.dataclass(frozen=True)
class StepTokens:
    """The tokens of a step, padding included.

    Attributes:
        valid: whether a token is no padding.
        everyones: the same of all data groups, where their tokens meet at experts.
        shares: what of each kind of feed-forward this GPU computes.
    """

    valid: Array
    everyones: Array
    shares: dict[Any, Any]

    @classmethod
    def of(cls, collectives: "ResidualCollectives", valid: Array) -> Self:
        spec = collectives.spec
        everyones = (
            all_gather(valid, spec.parallel, "data") if spec.parallel.experts_meet else valid
        )
        shares = {
            block.feed_forward: block.feed_forward.share(
                everyones.size if collectives.meets(block) else valid.size
            )
            for block in dict.fromkeys(spec.blocks)
        }
        return cls(valid, everyones, shares)


@dataclasses.dataclass(frozen=True)
class ResidualCollectives:
    """The sums, gathers and shares of a decoder over its GPUs."""

    spec: DecoderSpec

    def total(self, y: Array, over: Dimension = "tensor") -> Array:
        """The sum of what the GPUs have of a layer's output."""
        return all_reduce(y, self.spec.parallel, over, self.spec.stream.dtype)

    def added_dtype(self, x: Array) -> DTypeLike:
        """Of what a layer adds to the stream x: as GPUs sent it, where those of all layers do."""
        parallel = self.spec.parallel
        return self.spec.stream.dtype if parallel.data == 1 < parallel.tensor else x.dtype

    def meets(self, block: Block) -> bool:
        """Whether the tokens of all data groups meet at a layer's feed-forward."""
        return block.feed_forward.summed_over == "experts" and self.spec.parallel.experts_meet

    def part(self, y: Array, fused: bool) -> Array:
        """What one GPU adds to the tokens of all; of tokens of its own, between zeros."""
        parallel = self.spec.parallel
        if not (fused and self.spec.tokens_meet):
            return y
        whole = jnp.zeros((parallel.gpus * len(y), *y.shape[1:]), y.dtype)
        first = jnp.asarray(rank(parallel, "data"), jnp.int32) * len(y)
        return lax.dynamic_update_slice_in_dim(whole, y, first, axis=0)

    def local_total(self, y: Array) -> Array:
        """The sum of the GPUs' parts of this GPU's tokens."""
        return local_shard(self.total(y, "all"), self.spec.parallel, "data")

    def feed_forward(
        self,
        block: Block,
        module: Any,
        x: Any,
        tokens: StepTokens,
        stacks: dict[str, Array],
        following: Array,
        arena: Arena | None,
        implementation: Implementation | None,
        fused: bool = False,
        apart: bool = False,
    ) -> tuple[Any, Arena | None]:
        """A layer's feed-forward; tokens of all data groups meet where experts do.

        Args:
            stacks: the weights that it reads where they lie, of all repeats.
            following: the repeat after the layer's.
            fused: the tokens have met, and the output is one GPU's part, see `part`.
            apart: whether the output may be an `ExpertOutputs`.
        """
        parallel, over = self.spec.parallel, block.feed_forward.summed_over
        meets, valid = self.meets(block), tokens.valid
        if meets:
            x, valid = (
                x if fused else all_gather_via_all_reduce(x, parallel, "data"),
                tokens.everyones,
            )
        share = tokens.shares[block.feed_forward]
        y, arena = block.feed_forward.step(
            module, x, valid, stacks, in_repeat(following), arena, implementation, apart, share
        )
        if isinstance(y, ExpertOutputs):
            return y, arena
        if fused:
            return (y if meets else self.part(y, fused)), arena
        y = self.total(y, over)
        return (local_shard(y, parallel, "data") if meets else y), arena
