"""The launch that selects each token's top k scores: one cluster per token.

A token that sees at most k keys selects all of them. The unused rest of a token's list is -1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import CLUSTERS_AT_A_TIME
from jaxattn.kernels.mla.index.radix_select import WARPGROUPS, WORDS, select
from jaxattn.kernels.mla.index.work_tiles import IndexRows, IndexTiling

LEAST_SHARE = 4096  # the least numbers per CTA of a cluster


def cluster_size(rows: int, width: int) -> int:
    """Returns the number of CTAs that share a row: as many as the GPU can run for all rows at a
    time."""
    return max(
        (
            size
            for size, most in CLUSTERS_AT_A_TIME.items()
            if rows <= most and width >= size * LEAST_SHARE
        ),
        default=1,
    )


def top_k_places(
    tiling: IndexTiling, top_k: int, *, scores_ref: jax.Array, interpret: bool, detect_races: bool,
    **rows_of: Any,
) -> jax.Array:  # fmt: skip
    """Returns int32 [tokens, top_k]: the visible keys with the highest scores of each token of a
    group, ascending.

    Args:
        scores_ref: int32 [tokens, width]; numbers of keys that a token does not see do not count.
        rows_of: The fields of `IndexRows`.
    """
    rows, width = scores_ref.shape
    blocks = 1 if interpret else cluster_size(rows, width)
    return launch(
        lambda scores_ref, out_ref, smem, **refs: TopKCta(
            top_k, blocks, interpret, scores_ref, IndexRows(tiling, **refs), out_ref, smem
        ).run(),
        name="mla_index_top_k",
        grid={"row": rows},
        cluster={"rank": blocks} if blocks > 1 else {},
        inputs={"scores_ref": scores_ref, **rows_of},
        outputs={"out_ref": jax.ShapeDtypeStruct((rows, top_k), jnp.int32)},
        scratch={"smem": plgpu.SMEM((WORDS,), jnp.int32)},
        warpgroups=1 if interpret else WARPGROUPS,
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        detect_races=detect_races,
    )["out_ref"]


@dataclasses.dataclass(frozen=True)
class TopKCta:
    """A CTA of the cluster that processes one row."""

    top_k: int
    blocks: int
    interpret: bool
    scores_ref: Any
    rows: IndexRows
    out_ref: Any
    smem: Any

    def run(self) -> None:
        row = lax.axis_index("row")
        rank = lax.axis_index("rank") if self.blocks > 1 else jnp.int32(0)
        tokens = self.rows.tiling.tokens
        visible = self.rows.visible(lax.div(row, tokens), lax.rem(row, tokens))

        @pl.when((visible <= self.top_k) & (rank == 0) & (lax.axis_index("wg") == 0))
        def _all():
            layout = plgpu.Layout.WG_STRIDED((self.top_k,), vec_size=4)
            place = plgpu.broadcasted_iota(jnp.int32, (self.top_k,), 0, layout=layout)
            self.out_ref.at[row][...] = jnp.where(place < visible, place, -1)

        @pl.when(visible > self.top_k)
        def _some():
            if self.interpret:
                self._bisect(row, visible)
                return
            select(
                self.scores_ref, self.out_ref, self.smem, row, visible, rank,
                top_k=self.top_k, blocks=self.blocks, interpret=self.interpret,
            )  # fmt: skip

    def _bisect(self, row: jax.Array, visible: jax.Array) -> None:
        """Selects the top k in the interpreter, which cannot run inline PTX."""
        scores = self.scores_ref[row]
        seen = lax.broadcasted_iota(jnp.int32, scores.shape, 0) < visible

        def bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
            higher = threshold + lax.shift_left(jnp.int32(1), 31 - i)  # the first wraps to 0
            enough = (seen & (scores >= higher)).sum(dtype=jnp.int32) >= self.top_k
            return jnp.where(enough, higher, threshold)

        threshold = lax.fori_loop(0, 32, bit, jnp.int32(-(2**31)))
        wanted = self.top_k - (seen & (scores > threshold)).sum(dtype=jnp.int32)

        def place(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, equal = carry
            score = self.scores_ref[row, i]
            is_equal = score == threshold
            taken = (score > threshold) | (is_equal & (equal < wanted))

            @pl.when(taken)
            def _():
                self.out_ref[row, index] = i

            return index + taken.astype(jnp.int32), equal + is_equal.astype(jnp.int32)

        lax.fori_loop(0, visible, place, (jnp.int32(0), jnp.int32(0)))
