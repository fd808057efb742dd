"""The main loop of the grouped GEMM: how a CTA loads, multiplies and stores its items.

`grouped_gemm.py` describes the algorithm and launches it.
"""

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.kernels.hopper.four_bit_mainloop import FourBitMainloop, lines_of_step
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.hopper.store.unoptimized_store import store
from jaxattn.kernels.moe.fp8_accumulators import PRODUCT, ScaledAccumulators
from jaxattn.kernels.moe.panel_matrix import PanelMatrix
from jaxattn.kernels.moe.routing.token_alignment import (
    EXPERT,
    FROM,
    GROUPS,
    TO,
    GroupedGemmTile,
)
from jaxattn.kernels.moe.tile_config import (
    GROUP,
    NARROWEST,
    ROWS,
    GemmTileConfig,
)


def neighbors(limit: float, dtype: Any) -> tuple[float, float]:
    """Returns the largest number of a dtype below a limit, and the smallest above it."""
    nearest = np.asarray(limit, dtype)
    below = nearest if float(nearest) < limit else np.nextafter(nearest, np.asarray(-np.inf, dtype))
    above = nearest if float(nearest) > limit else np.nextafter(nearest, np.asarray(np.inf, dtype))
    return float(below), float(above)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        columns: Tokens that are multiplied together.
        stages: Stages of the ring.
        steps: Steps of K.
        part_stride: Rows of weights from one part to the next.
        pieces: Pieces of an expert's rows.
        blocks: Persistent CTAs that process the items.
    """

    product: GemmTileConfig
    columns: int
    stages: int
    steps: int
    part_stride: int
    pieces: int
    blocks: int
    affine: tuple[int, int]
    gated: bool
    activation: ClampedSwiGLU | None
    source: PanelMatrix
    results: PanelMatrix
    form: FourBitFormat | None
    transposed: bool
    interpret: bool

    @property
    def piece(self) -> int:
        """The rows of an item: those of a part are consecutive, and so are down's parts."""
        return self.product.rows * (1 if self.gated else self.product.parts)

    @property
    def widths(self) -> Sequence[int]:
        """The numbers of tokens with which tiles can be multiplied."""
        if not self.product.narrow:
            return (self.columns,)
        min_width = NARROWEST if self.form is None else self.columns // 2
        return range(min_width, self.columns + 1, min_width)

    @property
    def many_registers(self) -> bool:
        """232 + 232 + 40 = 504, the most that three warpgroups may have. Two have enough."""
        return self.columns >= 64 and self.product.warpgroups == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmRefs:
    """The refs of a CTA: operands, then its shared memory and barriers."""

    tokens: Any
    weights: Any  # [L, E, rows, K], if transposed [L, E, K, rows], or lines of tiles
    tiles: Any
    total: Any
    layer: Any
    scales: Any  # for FP8 weights, else None
    biases: Any  # or None
    target: Any
    saved: Any  # or None
    weights_smem: Any  # [stage, part, warpgroup, 64, depth], transposed, or lines of tiles
    tokens_smem: Any  # [stage, piece, N, columns]; 16-bit and FP8 weights have them in one piece
    out_smem: Any  # [warpgroup, N, 64]
    up_smem: Any  # [64, N], if up has its own warpgroup
    loaded: Any  # full barriers
    read: Any  # empty barriers, arrived at by every consumer
    up_ready: Any
    up_read: Any


class GroupedGemmCta:
    """A CTA that processes items: its last warpgroup loads, the others multiply and store."""

    def __init__(self, cut: GroupedGemmConfig, refs: GroupedGemmRefs):
        self.cut, self.refs = cut, refs
        self.layer = refs.layer[0] * cut.affine[0] + cut.affine[1]
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        last = refs.total[0] * cut.pieces
        self.mine = lax.div(last - self.block + (cut.blocks - 1), cut.blocks)

    def run(self) -> None:
        warpgroups = self.cut.product.warpgroups
        pl.when(self.wg == warpgroups)(self.load)
        pl.when(self.wg < warpgroups)(self.multiply)

    def item(self, i: Any) -> GroupedGemmTile:
        """Returns the CTA's i-th item; any item if there are fewer. It does not wait for the number
        of items."""
        tiles, pieces = self.refs.tiles, self.cut.pieces
        number = jnp.minimum(self.block + i * self.cut.blocks, tiles.shape[1] * pieces - 1)
        tile = lax.div(number, pieces)
        # h is where it was written, and x may have stayed in place.
        source = tiles[FROM if self.cut.gated else TO, tile]
        expert, target, groups = (tiles[j, tile] for j in (EXPERT, TO, GROUPS))
        return GroupedGemmTile(expert, source, target, groups, number - tile * pieces)

    def each(self, function: Any) -> jax.Array:
        """Calls `function(item, steps before it)` for each item, with the next item's indices
        loaded ahead. Returns the total number of steps."""

        def one(i, carry):
            done, work_tile = carry
            following = self.item(i + 1)
            function(work_tile, done)
            return done + self.cut.steps, following

        return lax.fori_loop(0, self.mine, one, (jnp.int32(0), self.item(0)))[0]

    def narrowed(self, columns: int) -> "GroupedGemmCta":
        """Returns the same CTA for tiles of `columns` tokens, in the first rows of shared
        memory."""

        def rows(ref: Any) -> Any:  # [..., N, width]
            return ref.at[*[slice(None)] * (len(ref.shape) - 2), pl.ds(0, columns)]

        refs, block = self.refs, copy.copy(self)
        block.cut = dataclasses.replace(self.cut, columns=columns)
        up = refs.up_smem
        block.refs = dataclasses.replace(
            refs,
            tokens_smem=rows(refs.tokens_smem),
            out_smem=rows(refs.out_smem),
            up_smem=None if up is None else up.at[:, pl.ds(0, columns)],
        )
        return block

    def in_width(self, method: Any) -> Any:
        """Returns `method(block, item, steps before it)`, called with the CTA for the item's
        width."""
        columns, widths = self.cut.columns, self.cut.widths
        if len(widths) == 1:
            return partial(method, self)

        def function(work_tile: GroupedGemmTile, done: jax.Array) -> None:
            previous_width = 0
            for width in widths:
                block = self if width == columns else self.narrowed(width)
                fits = (work_tile.groups > previous_width // GROUP) & (
                    work_tile.groups <= width // GROUP
                )
                pl.when(fits)(partial(method, block, work_tile, done))
                previous_width = width

        return function

    def load(self) -> None:
        """Loads steps of K into the ring, as its stages become free, in the producer warpgroup."""
        stages, read = self.cut.stages, self.refs.read
        if self.cut.many_registers:
            plgpu.set_max_registers(40, action="decrease")
        done = self.each(self.in_width(GroupedGemmCta._load_item))

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _drain(s):
            plgpu.barrier_wait(read.at[lax.rem(s, stages)])

    def _load_item(self, work_tile: GroupedGemmTile, done: jax.Array) -> None:
        cut, refs = self.cut, self.refs
        product, depth = cut.product, cut.product.depth
        of_expert = refs.weights.at[self.layer, work_tile.expert]

        @pl.loop(0, cut.steps)
        def _step(s):
            slot = lax.rem(done + s, cut.stages)
            pl.when(done + s >= cut.stages)(lambda: plgpu.barrier_wait(refs.read.at[slot]))
            barrier = refs.loaded.at[slot]
            k_slice = pl.ds(pl.multiple_of(s * depth, depth), depth)
            for part in range(product.parts):
                for warpgroup in range(product.consumers):
                    row = work_tile.piece_index * cut.piece + (
                        part * cut.part_stride + warpgroup * ROWS
                    )
                    if cut.form is None:
                        of_tile = pl.ds(pl.multiple_of(row, ROWS), ROWS), k_slice
                        tile = of_expert.at[of_tile[:: -1 if cut.transposed else 1]]
                    else:
                        count = lines_of_step(cut.form, depth)
                        tile = of_expert.at[lax.div(row, ROWS), pl.ds(s * count, count)]
                    destination = refs.weights_smem.at[slot, part, warpgroup]
                    plgpu.copy_gmem_to_smem(tile, destination, barrier)
            _, pieces, _, size = refs.tokens_smem.shape
            for piece in range(pieces):
                first = s * depth + piece * size
                rows = cut.source.at(refs.tokens, work_tile.source, cut.columns, first, size)
                plgpu.copy_gmem_to_smem(rows, refs.tokens_smem.at[slot, piece], barrier)

    def multiply(self) -> None:
        """Computes a consumer warpgroup's rows of each item."""
        if self.cut.many_registers:
            plgpu.set_max_registers(232, action="increase")
        if self.cut.product.split:
            self._multiply_split()
            return
        self.each(self.in_width(GroupedGemmCta._multiply_item))
        plgpu.wait_smem_to_gmem(0)

    @property
    def sums(self) -> Any:
        """The function `sums(item, steps before it)` that computes an item's sums."""
        if self.cut.form is not None:
            return partial(self._four_bit_sums, self.cut.form)
        return self._sums if self.refs.scales is None else ScaledAccumulators(self)

    def _four_bit_sums(
        self, form: FourBitFormat, work_tile: GroupedGemmTile, done: jax.Array
    ) -> list[jax.Array]:
        del work_tile
        cut, refs, product = self.cut, self.refs, self.cut.product
        # (part, its group of 64 rows)
        part_groups: list[Any] = [(part, self.wg) for part in range(product.parts)]
        if product.split:
            part_groups = [(self.wg, 0)]
        sums = FourBitMainloop(
            form=form, dtype=refs.tokens.dtype, columns=cut.columns,
            arrived=lambda step: self.arrived(step)[0],
            tiles=lambda slot: [refs.weights_smem.at[slot, *each] for each in part_groups],
            tokens=refs.tokens_smem, read=refs.read, interpret=cut.interpret,
        )  # fmt: skip
        return sums(cut.steps, done)

    def _multiply_item(self, work_tile: GroupedGemmTile, done: jax.Array) -> None:
        part_sums = self._biased(
            work_tile, self.sums(work_tile, done), range(self.cut.product.parts)
        )
        if self.refs.saved is not None:
            self._store(work_tile, self._kept(part_sums), self.refs.saved, None)
        if self.cut.gated:
            part_sums = [self._activated(*part_sums)]
        self._store(work_tile, part_sums, self.refs.target, self.cut.results)

    def _kept(self, part_sums: list[jax.Array]) -> list[jax.Array]:
        """Returns gate and up as saved. Rounding moves none across a limit, where the gradient
        jumps."""
        activation, dtype = self.cut.activation, self.refs.saved.dtype
        if activation is None:
            return part_sums
        gate, up = part_sums
        below, above = neighbors(activation.limit, dtype)
        gate = jnp.where(gate < activation.limit, jnp.minimum(gate, below), gate)
        gate = jnp.where(gate > activation.limit, jnp.maximum(gate, above), gate)
        size = jnp.abs(up)
        size = jnp.where(size < activation.limit, jnp.minimum(size, below), size)
        size = jnp.where(size > activation.limit, jnp.maximum(size, above), size)
        return [gate, jnp.where(up < 0.0, -size, size)]

    def _activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.cut.activation is None:
            return gate / (1.0 + jnp.exp(-gate)) * up
        return self.cut.activation(gate, up)

    def _biased(
        self, work_tile: GroupedGemmTile, sums: list[jax.Array], parts: Iterable[int]
    ) -> list[jax.Array]:
        if self.refs.biases is None:
            return sums
        return [
            total + self._bias(work_tile, part) for total, part in zip(sums, parts, strict=True)
        ]

    def _bias(self, work_tile: GroupedGemmTile, part: int) -> jax.Array:
        """Returns the bias of each row of a part's weights, for every token."""
        cut, of_expert = self.cut, self.refs.biases.at[self.layer, work_tile.expert]
        row_slice = pl.ds(pl.multiple_of(self.row(work_tile, part), ROWS), ROWS)
        bias = plgpu.load(of_expert.at[row_slice], layout=PRODUCT.reduce(1), optimized=False)
        broadcast = lax.broadcast_in_dim(bias.astype(jnp.float32), (ROWS, cut.columns), (0,))
        return plgpu.layout_cast(broadcast, PRODUCT)

    def row(self, work_tile: GroupedGemmTile, part: int) -> jax.Array:
        """Returns the first of this warpgroup's rows of a part's weights."""
        group_offset = 0 if self.cut.product.split else self.wg * ROWS
        return work_tile.piece_index * self.cut.piece + part * self.cut.part_stride + group_offset

    def _multiply_split(self) -> None:
        """Runs the warpgroup of gate, or that of up."""

        @pl.when(self.wg == 0)
        def _gate():
            self.each(self.in_width(GroupedGemmCta._gate_item))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.wg == 1)
        def _up():
            done = self.each(self.in_width(GroupedGemmCta._up_item))
            pl.when(done > 0)(lambda: plgpu.barrier_wait(self.refs.up_read))

    def _gate_item(self, work_tile: GroupedGemmTile, done: jax.Array) -> None:
        refs = self.refs
        (total,) = self._biased(work_tile, self.sums(work_tile, done), [0])
        plgpu.barrier_wait(refs.up_ready)
        up = plgpu.load(refs.up_smem, layout=PRODUCT, optimized=False)
        plgpu.barrier_arrive(refs.up_read)
        self._store(work_tile, [self._activated(total, up)], refs.target, self.cut.results)

    def _up_item(self, work_tile: GroupedGemmTile, done: jax.Array) -> None:
        refs = self.refs
        (total,) = self._biased(work_tile, self.sums(work_tile, done), [1])
        pl.when(done > 0)(lambda: plgpu.barrier_wait(refs.up_read))
        store(refs.up_smem, total, interpret=self.cut.interpret)
        plgpu.barrier_arrive(refs.up_ready)

    def _store(
        self,
        work_tile: GroupedGemmTile,
        part_sums: list[jax.Array],
        target: Any,
        panels: PanelMatrix | None,
    ) -> None:
        """Stores each part; without `panels` the target is a plain matrix."""
        cut, out = self.cut, self.refs.out_smem
        panels = panels or PanelMatrix(0, target.shape[0], target.shape[1])
        for part, result in enumerate(part_sums):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store_transposed(out.at[self.wg], result.astype(out.dtype), interpret=cut.interpret)
            plgpu.commit_smem()
            self._write(work_tile, self.row(work_tile, part), target, panels)

    def arrived(self, step: jax.Array) -> tuple[jax.Array, Any]:
        """Waits for a step, and returns its stage and its tokens as columns."""
        slot = lax.rem(step, self.cut.stages)
        plgpu.barrier_wait(self.refs.loaded.at[slot])
        return slot, self.refs.tokens_smem.at[slot, 0].transpose((1, 0))

    @property
    def accumulators(self) -> list[Any]:
        shape = (ROWS, self.cut.columns)
        return [plgpu.ACC(shape, jnp.float32)] * self.cut.product.parts

    def _sums(self, work_tile: GroupedGemmTile, done: jax.Array) -> list[jax.Array]:
        """Returns each part's sums over all of K, for 16-bit weights."""
        del work_tile
        cut, refs = self.cut, self.refs

        def accumulate(*accs: Any) -> list[jax.Array]:
            @pl.loop(0, cut.steps)
            def _step(s):
                slot, tokens_t = self.arrived(done + s)
                for part, acc in enumerate(accs):
                    tile = refs.weights_smem.at[slot, part, self.wg]
                    plgpu.wgmma(acc, tile.transpose((1, 0)) if cut.transposed else tile, tokens_t)
                plgpu.wgmma_wait(cut.product.parts)  # all wgmmas except this step's are done

                @pl.when(s > 0)
                def _before():
                    plgpu.barrier_arrive(refs.read.at[lax.rem(done + s - 1, cut.stages)])

            part_sums = [acc[...] for acc in accs]
            plgpu.barrier_arrive(refs.read.at[lax.rem(done + cut.steps - 1, cut.stages)])
            return part_sums

        return pl.run_scoped(accumulate, *self.accumulators)

    def _write(
        self, work_tile: GroupedGemmTile, column: jax.Array, target: Any, panels: PanelMatrix
    ) -> None:
        """Stores a tile whose first `work_tile.groups` groups of rows are in use."""
        for group in range(self.cut.columns // GROUP):

            @pl.when(group < work_tile.groups)
            def _some(group=group):
                destination = panels.at(
                    target, work_tile.target + group * GROUP, GROUP, column, ROWS
                )
                of_group = self.refs.out_smem.at[self.wg, pl.ds(group * GROUP, GROUP)]
                plgpu.copy_smem_to_gmem(of_group, destination)
