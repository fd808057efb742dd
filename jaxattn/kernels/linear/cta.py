"""The CTA of `linear_layer`: copies, products, the cluster's sums and the store."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.hopper.reduce.cluster_reduction import cluster_barrier, cluster_block_index
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import (
    PAIR,
    RmsNormPrologue,
    RmsNormPrologueParams,
)
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.linear.rope_epilogue import RopeEpilogue, RopeEpilogueParams

ROWS = 128  # columns of a matrix per cluster
STEP = 64  # numbers of K per copy
TOGETHER = 4  # tokens whose sums a CTA reads at a time
ROW = plgpu.Layout.WG_STRIDED((ROWS,), vec_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        parts: CTAs that divide the K numbers of 128 columns (split-K).
        stages: Copies that a CTA has in flight.
        columns: Tokens, rounded up to 8.
        steps: Steps of K.
        sizes: N of each result.
        num_rotated_dims: Numbers of x, and of a result, that follow those of a head.
        split: Whether each result has its own K numbers of x, in order.
    """

    parts: int
    stages: int
    tokens: int
    columns: int
    steps: int
    sizes: tuple[int, ...]
    affine: tuple[int, int]
    gated: bool
    heads: int
    num_rotated_dims: int
    split: bool
    interpret: bool

    @property
    def tiles(self) -> tuple[int, ...]:
        """The tiles of 128 columns of each result."""
        return tuple(-(-size // ROWS) for size in self.sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRefs:
    """The refs of a CTA: operands, then its shared memory and barriers."""

    x_ref: Any
    weights_refs: Any
    layer_ref: Any
    cluster_sums_ref: Any  # the interpreter's, for the sums of a cluster
    angles_ref: Any  # for rotated dims, else None
    out_refs: Any
    total_ref: Any  # for a norm, else None
    normed_ref: Any
    x_smem: Any  # [stage, columns, 64]; with a norm `rms_norm_prologue.smem`
    w_smem: Any  # [stage, matrix, 64, 128]
    sums_smem: Any  # [matrix, columns, 128]
    turn_smem: Any
    loaded: Any  # full barriers
    cluster_barrier: Any
    added_ref: Any = None  # for a norm, as those below
    norms_ref: Any = None
    positions_ref: Any = None
    shares_ref: Any = None
    scales_refs: Any = None  # for FP8 weights (fp8_linear.py)
    biases_refs: Any = None  # [L, N or more] of each result, or None


class LinearCta:
    """A CTA that computes its part of K for a tile of columns."""

    depth = STEP  # numbers of K per step

    def __init__(
        self,
        cut: LinearConfig,
        rope: RopeEpilogueParams | None,
        normed: RmsNormPrologueParams | None,
        refs: LinearRefs,
    ):
        self.cut, self.rope, self.refs = cut, rope, refs
        layer = refs.layer_ref[0]
        self.zero = jnp.minimum(layer, 0)
        self.layer = layer * cut.affine[0] + cut.affine[1]
        self.number = self.tile = lax.axis_index("tile")
        # The first column of a head, in x and in the result.
        self.of_x = self.of_out = jnp.int32(0)
        if cut.heads > 1:
            head = lax.div(self.tile, cut.tiles[0])
            self.tile = lax.rem(self.tile, cut.tiles[0])
            self.layer = self.layer * cut.heads + head
            self.of_x = head * (cut.steps * STEP + cut.num_rotated_dims)
            self.of_out = head * (cut.sizes[0] + cut.num_rotated_dims)
        is_unsplit = cut.parts == 1
        self.part = (
            jnp.int32(0) if is_unsplit else cluster_block_index(cut.parts, interpret=cut.interpret)
        )
        self.begin, end = (
            lax.div((self.part + offset) * cut.steps, cut.parts) for offset in (0, 1)
        )
        self.mine = end - self.begin
        # For each result the tile's index, and its first column: the last tile ends with N.
        self.places, first_tile = [], 0
        for size, tiles in zip(cut.sizes, cut.tiles, strict=True):
            number = self.tile - first_tile
            self.places.append((number, jnp.minimum(number * ROWS, size - ROWS)))
            first_tile += tiles
        if cut.split:
            later = [jnp.where(number >= 0, 1, 0) for number, _ in self.places[1:]]
            self.of_x = sum(later, jnp.int32(0)) * (cut.steps * STEP)
        self.norm = None
        if normed is not None:
            self.norm = RmsNormPrologue(
                x_ref=refs.x_ref, added_ref=refs.added_ref, weights_ref=refs.norms_ref,
                row=layer * normed.affine[0] + normed.affine[1], total_ref=refs.total_ref,
                normed_ref=refs.normed_ref, x_smem=refs.x_smem, first=self.begin * self.depth,
                pairs=cut.steps // cut.parts * self.depth // PAIR, eps=normed.eps,
                interpret=cut.interpret, parts=normed.added, positions_ref=refs.positions_ref,
                shares_ref=refs.shares_ref,
            )  # fmt: skip

    def run(self) -> None:
        cut, refs = self.cut, self.refs
        for step in range(cut.stages):
            pl.when(step < self.mine)(partial(self._load, step))
        biases = self._biases()  # loaded while the products run
        sums, weighted, squares = self.norm.make() if self.norm else ([], [], None)
        self._reduce_and_store()
        if self.norm:
            refs.sums_smem.at[0, cut.tokens][...] = squares  # in the memory of a next token's sums
        if refs.cluster_sums_ref is not None:
            refs.cluster_sums_ref[self.part, self.number] = refs.sums_smem[...]
        self._sync_tile()
        factor: jax.Array | None = None
        if self.norm:
            first, *others = self._rows_of(0, cut.tokens)
            factor = self.norm.factor(sum(others, first))
        for result, (_, first) in enumerate(self.places):
            self._when_in_result(
                result, partial(self._store, result, first, factor, biases[result])
            )
        if self.norm and factor is not None:
            pl.when(self.number == 0)(partial(self.norm.give, sums, weighted, factor))
        if cut.parts > 1:
            self._sync_tile()  # no CTA exits before the others have read its sums

    def _biases(self) -> list[Any]:
        """Loads, for each result, the biases of the tile's columns, if the tile is the result's."""
        refs = self.refs.biases_refs
        if refs is None:
            return [None] * len(self.places)
        return [
            plgpu.load(
                ref.at[self.layer, pl.ds(jnp.maximum(first, 0), ROWS)], layout=ROW, optimized=False
            ).astype(jnp.float32)
            for ref, (_, first) in zip(refs, self.places, strict=True)
        ]

    def _reduce_and_store(self) -> None:
        """Stores the CTA's products to shared memory, tokens as rows."""
        cut, shape = self.cut, (ROWS, self.cut.columns)
        accumulators = [plgpu.ACC(shape, jnp.float32)] * (1 + cut.gated)
        for place, total in enumerate(pl.run_scoped(self._multiply, *accumulators)):
            store_transposed(self.refs.sums_smem.at[place], total, interpret=cut.interpret)

    def _sync_tile(self) -> None:
        """Synchronizes the CTAs that share the tile."""
        if self.cut.parts > 1:
            cluster_barrier(self.refs.cluster_barrier, interpret=self.cut.interpret)
        else:
            warpgroup_barrier(interpret=self.cut.interpret)

    def _when_in_result(self, result: int, function: Any) -> None:
        """Runs `function` if the tile is the result's."""
        number, tiles = self.places[result][0], self.cut.tiles[result]
        if len(self.cut.sizes) == 1:
            function()
        else:
            pl.when((number >= 0) & (number < tiles))(function)

    def _load(self, step: Any) -> None:
        cut, refs = self.cut, self.refs
        slot, first = lax.rem(step, cut.stages), (self.begin + step) * STEP
        step_columns = pl.ds(pl.multiple_of(first, STEP), STEP)
        is_own_columns = cut.heads > 1 or cut.split
        of_x = (
            pl.ds(pl.multiple_of(self.of_x + first, STEP), STEP) if is_own_columns else step_columns
        )
        barrier = refs.loaded.at[slot]
        if not self.norm:
            tokens = refs.x_ref.at[pl.ds(self.zero, cut.columns), of_x]
            plgpu.copy_gmem_to_smem(tokens, refs.x_smem.at[slot], barrier)

        def of_matrix(matrix: int, buffer: int, first: Any) -> None:
            source = refs.weights_refs[matrix].at[self.layer, step_columns, pl.ds(first, ROWS)]
            plgpu.copy_gmem_to_smem(source, refs.w_smem.at[slot, buffer], barrier)

        for result, (_, column) in enumerate(self.places):
            self._when_in_result(result, partial(of_matrix, result, 0, column))
            if cut.gated:
                of_matrix(1, 1, column)

    def _multiply(self, *accs: Any) -> list[jax.Array]:
        cut, refs = self.cut, self.refs

        @pl.loop(0, self.mine)
        def _step(step):
            slot = lax.rem(step, cut.stages)
            plgpu.barrier_wait(refs.loaded.at[slot])
            tokens = self.norm.operand.at[step] if self.norm else refs.x_smem.at[slot]
            for place, acc in enumerate(accs):
                weights = refs.w_smem.at[slot, place].transpose((1, 0))
                plgpu.wgmma(acc, weights, tokens.transpose((1, 0)))
            plgpu.wgmma_wait(len(accs))  # all wgmmas except this step's are done

            @pl.when((step > 0) & (step + cut.stages - 1 < self.mine))
            def _reload():
                warpgroup_barrier(
                    interpret=cut.interpret
                )  # all four warps' products have read the stage
                self._load(step + cut.stages - 1)

        return [acc[...] for acc in accs]

    def _rows_of(self, matrix: int, token: Any) -> list[jax.Array]:
        """Returns a token's sums from each CTA."""
        cut, refs = self.cut, self.refs
        rows = []
        for other in range(cut.parts):
            if refs.cluster_sums_ref is not None:
                source = refs.cluster_sums_ref.at[other, self.number, matrix]
            elif cut.parts > 1:
                source = plgpu.cluster_ref(refs.sums_smem.at[matrix], {"part": jnp.int32(other)})
            else:
                source = refs.sums_smem.at[matrix]
            rows.append(plgpu.load(source.at[token], layout=ROW, optimized=False))
        return rows

    def _store(self, result: int, first: Any, factor: Any, bias: Any = None) -> None:
        """Stores the CTA's tokens, a few at a time, with the loads of all their rows in flight
        together.

        Args:
            factor: The factor of the products, or None.
            bias: The bias of the products, or None.
        """
        cut = self.cut
        matrices = range(1 + cut.gated)
        for start in range(0, cut.tokens, TOGETHER * cut.parts):
            end = min(start + TOGETHER * cut.parts, cut.tokens)
            mine = [self.part + token for token in range(start, end, cut.parts)]
            rows = [
                [self._rows_of(place, jnp.minimum(token, cut.columns - 1)) for place in matrices]
                for token in mine
            ]
            for token, matrix_rows in zip(mine, rows, strict=True):
                y, *up = (sum(rows_of_parts[1:], rows_of_parts[0]) for rows_of_parts in matrix_rows)
                if factor is not None:
                    y, *up = (rows_of_parts * factor for rows_of_parts in (y, *up))
                if cut.gated:
                    y = y * (1 / (1 + jnp.exp(-y))) * up[0]
                if bias is not None:
                    y = y + bias
                pl.when(token < cut.tokens)(partial(self._store_token, result, first, token, y))

    def _store_token(self, result: int, first: Any, token: Any, y: jax.Array) -> None:
        cut, out = self.cut, self.refs.out_refs[result]
        first = self.of_out + first if cut.heads > 1 else first
        out.at[token, pl.ds(first, ROWS)][...] = y.astype(out.dtype)
        if self.rope is not None:
            last = self.tile == cut.tiles[0] - 1
            pl.when(last)(partial(self._turn, self.rope, out, token, y))

    def _turn(self, rope: RopeEpilogueParams, out: Any, token: Any, y: jax.Array) -> None:
        cut, refs = self.cut, self.refs
        turn = RopeEpilogue(
            x=refs.x_ref, angles=refs.angles_ref, smem=refs.turn_smem,
            interleaved=rope.interleaved, interpret=cut.interpret,
        )  # fmt: skip
        first_rotated = self.of_x + cut.steps * STEP + cut.num_rotated_dims
        turn.store(out, y, token, first_rotated, self.of_out + cut.sizes[0] + cut.num_rotated_dims)
