"""Top-k gating of a token's scores by one warpgroup: its experts and their weights.

XLA sorts all E scores of a token in several kernels. Here the best is selected K times; among equal
ones the first, as in `lax.top_k`. A token whose scores are NaN gets weights of NaN.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.moe.routing.warp_topk import warp_topk

THREADS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkGating:
    """The gating of a token among `experts`; a `Router` has the other options."""

    experts: int
    top_k: int
    sigmoid: bool
    groups: int
    top_groups: int
    best_of_group: int
    normalize: bool
    scale: float
    interpret: bool

    @property
    def width(self) -> int:
        """The size of the vectors: E, rounded up to the threads."""
        return -(-self.experts // THREADS) * THREADS

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=1)

    def full(self, value: Any) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (self.width,), []), self.layout)

    def scratch(self) -> dict[str, Any]:
        """The scratch of `take`."""
        scores = plgpu.SMEM((self.width,), jnp.float32)
        return {
            "scores_smem": scores,
            "choice_smem": None if self.interpret else scores,
            "ids_smem": None if self.interpret else plgpu.SMEM((self.top_k,), jnp.int32),
        }

    def take(
        self,
        logits: jax.Array,
        bias: jax.Array | None,
        scores_smem: Any,
        choice_smem: Any,
        ids_smem: Any,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns K experts, best first, and their weights, as scalars.

        Args:
            logits: In `layout`; places after the experts may be anything.
            bias: The bias of the scores for the selection.
        """
        full, nothing = self.full, self.full(jnp.float32(-jnp.inf))
        expert = plgpu.broadcasted_iota(jnp.int32, (self.width,), 0, layout=self.layout)
        inside = expert < full(jnp.int32(self.experts))
        logits = jnp.where(inside, logits, nothing)
        choice = scores = self._scores(logits)
        if bias is not None:
            choice = scores + bias
        warpgroup_barrier(interpret=self.interpret)
        scores_smem[...] = scores  # for the weights, which exclude the bias
        warpgroup_barrier(interpret=self.interpret)
        choice = jnp.where(inside, choice, nothing)
        if self.top_groups < self.groups:
            choice = self._of_best_groups(choice, expert)
        if self.interpret:
            ids = self._best_interpreted(choice, expert)
        else:
            choice_smem[...] = choice
            warpgroup_barrier(interpret=False)
            warp_topk(choice_smem, ids_smem, self.top_k)
            warpgroup_barrier(interpret=False)
            ids = [ids_smem[k] for k in range(self.top_k)]
        return ids, self._weights([scores_smem[place] for place in ids])

    def _scores(self, logits: jax.Array) -> jax.Array:
        """Returns the sigmoid of each logit, or the softmax of all."""
        if self.sigmoid:
            return 1.0 / (1.0 + jnp.exp(-logits))
        scores = jnp.exp(logits - self.full(jnp.max(logits)))
        return scores / self.full(jnp.sum(scores))

    def _weights(self, scores: list[jax.Array]) -> list[jax.Array]:
        """Returns the weights of the chosen experts, from their scores."""
        factor = jnp.float32(self.scale)
        if self.normalize:
            total = sum(scores[1:], scores[0]) + 1e-20
            scores = [score / total for score in scores]
        return [score * factor for score in scores]

    def _of_best_groups(self, choice: jax.Array, expert: jax.Array) -> jax.Array:
        """Returns the scores with -inf for experts outside of the best `top_groups` groups.

        Args:
            choice: The scores of all experts.
            expert: Their indices.
        """
        full, size = self.full, self.experts // self.groups
        nothing, nowhere = full(jnp.float32(-jnp.inf)), full(jnp.int32(self.width))

        def inside(group: int) -> jax.Array:
            low, high = (full(jnp.int32(x * size)) for x in (group, group + 1))
            return (expert >= low) & (expert < high)

        totals = []
        for group in range(self.groups):
            own = jnp.where(inside(group), choice, nothing)
            total = jnp.float32(0)
            for i in range(self.best_of_group):
                top = jnp.max(own)
                total += top
                if i < self.best_of_group - 1:  # the first of several; no place among NaN
                    place = jnp.min(jnp.where(own == full(top), expert, nowhere))
                    own = jnp.where(expert == full(place), nothing, own)
            totals.append(total)
        kept = nothing
        for group, total in enumerate(totals):
            before = sum(
                jnp.where((other > total) | ((other == total) & (i < group)), 1, 0)
                for i, other in enumerate(totals)
                if i != group
            )
            is_kept = full(jnp.where(before < self.top_groups, 1, 0)) > full(jnp.int32(0))
            kept = jnp.where(inside(group) & is_kept, choice, kept)
        return kept

    def _best_interpreted(self, choice: jax.Array, expert: jax.Array) -> list[jax.Array]:
        """Returns the places of the best scores, in the interpreter, which cannot run the PTX of
        `warp_topk`."""
        full = self.full
        nowhere = full(jnp.int32(self.width))
        # A NaN is better than any number, and a selected score cannot be selected again.
        choice = jnp.where(choice != choice, full(jnp.float32(jnp.inf)), choice)
        untaken, ids = expert, []
        for _ in range(self.top_k):
            some = jnp.where(untaken < nowhere, choice, full(jnp.float32(-jnp.inf)))
            place = jnp.min(jnp.where(some == full(jnp.max(some)), untaken, nowhere))
            untaken = jnp.where(expert == full(place), nowhere, untaken)
            ids.append(place)
        return ids
