"""Collectives over the residual stream, which sum layers' outputs over GPUs; none on one GPU.

If `fused`, a step sums in the launches of its norms (`ops/collectives/all_reduce_norm.py`). A
layer's output is then one GPU's part, until the next norm.
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
        valid: Whether each token is not padding.
        gathered_valid: The same for all data groups, if their tokens are gathered at experts.
        shares: This GPU's share of each kind of feed-forward.
    """

    valid: Array
    gathered_valid: Array
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

    def total(self, y: Array, dimension: Dimension = "tensor") -> Array:
        """Returns the sum of the GPUs' parts of a layer's output."""
        return all_reduce(y, self.spec.parallel, dimension, self.spec.stream.dtype)

    def added_dtype(self, x: Array) -> DTypeLike:
        """Returns the dtype of addends to the stream: that of transfers, if all layers use them."""
        parallel = self.spec.parallel
        return self.spec.stream.dtype if parallel.data == 1 < parallel.tensor else x.dtype

    def meets(self, block: Block) -> bool:
        """Returns whether the tokens of all data groups are gathered at a layer's feed-forward."""
        return block.feed_forward.summed_over == "experts" and self.spec.parallel.experts_meet

    def part(self, y: Array, fused: bool) -> Array:
        """Returns one GPU's addend for all tokens, with zeros for other GPUs' own tokens."""
        parallel = self.spec.parallel
        if not (fused and self.spec.gathers_tokens):
            return y
        whole = jnp.zeros((parallel.gpus * len(y), *y.shape[1:]), y.dtype)
        first = jnp.asarray(rank(parallel, "data"), jnp.int32) * len(y)
        return lax.dynamic_update_slice_in_dim(whole, y, first, axis=0)

    def local_total(self, y: Array) -> Array:
        """Returns the sum of the GPUs' parts for this GPU's tokens."""
        return local_shard(self.total(y, "all"), self.spec.parallel, "data")

    def feed_forward(
        self,
        block: Block,
        module: Any,
        x: Any,
        tokens: StepTokens,
        stacks: dict[str, Array],
        next_repeat: Array,
        arena: Arena | None,
        implementation: Implementation | None,
        fused: bool = False,
        defer_sum: bool = False,
    ) -> tuple[Any, Arena | None]:
        """Runs a layer's feed-forward, and gathers all data groups' tokens if experts need it.

        Args:
            stacks: The weights of all repeats, which it reads in place.
            next_repeat: The repeat after the layer's.
            fused: Whether the tokens are gathered already, and the output is one GPU's part (see
                `part`).
            defer_sum: Whether the output may be an `ExpertOutputs`.
        """
        parallel, dimension = self.spec.parallel, block.feed_forward.summed_over
        gathers_tokens, valid = self.meets(block), tokens.valid
        if gathers_tokens:
            x, valid = (
                x if fused else all_gather_via_all_reduce(x, parallel, "data"),
                tokens.gathered_valid,
            )
        share = tokens.shares[block.feed_forward]
        y, arena = block.feed_forward.step(
            module,
            x,
            valid,
            stacks,
            in_repeat(next_repeat),
            arena,
            implementation,
            defer_sum,
            share,
        )
        if isinstance(y, ExpertOutputs):
            return y, arena
        if fused:
            return (y if gathers_tokens else self.part(y, fused)), arena
        y = self.total(y, dimension)
        return (local_shard(y, parallel, "data") if gathers_tokens else y), arena
