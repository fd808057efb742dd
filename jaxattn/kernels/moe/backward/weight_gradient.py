"""Gradients of the experts' weights: for each expert, the sum of the outer products of its rows.

    gradient_e [M, N] = sum over rows r of expert e: left[r]^T right[r]

Rows are sorted by expert; each expert's begin at a multiple of 64, and rows of padding are 0 in
both operands. The sum is ragged: an expert takes as many steps of 64 rows as it has, and one
without rows gets exact zeros. One CTA adds up a tile from its first row to its last, so the order
of a sum is fixed.

As in grouped_gemm.py, one persistent CTA per multiprocessor processes tiles of the experts. Its
last warpgroup issues the TMA copies into a ring of stages, and one or two consumers multiply, each
its own 64 rows of `parts` tiles. Both operands have the summed axis outermost, a layout that wgmma
accepts.

Limits: M and N multiples of 64; bfloat16 or float16.
Reference and tests: `jaxattn.ops.moe.experts` (implementation="xla"),
tests/kernels/moe/test_gradient.py.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, RESERVED_BYTES, SHARED_BYTES
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.store.unoptimized_store import store
from jaxattn.kernels.moe.tile_config import BARRIER_BYTES, MOST_STAGES, ROWS

DEPTH = 64  # rows of a step; an expert's rows begin at a multiple of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGradientTileConfig:
    """The tiling of the gradient of an expert's weights.

    Attributes:
        consumers: Consumer warpgroups, each with its own rows of the tile: 1 or 2.
        parts: Tiles of 64 rows per consumer.
        columns: Columns of the tile.
        stages: Stages of the ring; None: all that fit.
        blocks: Concurrent CTAs.
    """

    consumers: int
    parts: int
    columns: int
    stages: int | None = None
    blocks: int = NUM_SMS

    @property
    def rows(self) -> int:
        return self.consumers * self.parts * ROWS

    def stages_of(self, itemsize: int) -> int:
        """Returns the requested stages, or all that fit in shared memory."""
        if self.stages is not None:
            return self.stages
        stage = (self.rows + self.columns) * DEPTH * itemsize
        results = self.consumers * ROWS * self.columns * itemsize
        room = SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES - results
        return max(2, min(MOST_STAGES, room // stage))


def tile_config_of(rows: int, columns: int) -> WeightGradientTileConfig:
    """Returns the largest tile that divides a gradient of these sizes."""
    for consumers, parts, width in ((2, 2, 128), (2, 1, 256), (2, 1, 128), (1, 2, 128)):
        if rows % (consumers * parts * ROWS) == 0 and columns % width == 0:
            return WeightGradientTileConfig(consumers=consumers, parts=parts, columns=width)
    return WeightGradientTileConfig(consumers=1, parts=1, columns=ROWS)


def weight_gradient(
    left: jax.Array,
    right: jax.Array,
    starts: jax.Array,
    steps: jax.Array,
    *,
    name: str,
    config: WeightGradientTileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns [E, M, N] in the operands' dtype.

    Args:
        left: [R, M].
        right: [R, N].
        starts: int32 [E], the first row of each expert, a multiple of 64.
        steps: int32 [E], the number of each expert's steps of 64 rows.
    """
    experts, height, width = starts.size, left.shape[1], right.shape[1]
    config = config or tile_config_of(height, width)
    stages = config.stages_of(left.dtype.itemsize)
    cut = WeightGradientCut(
        config=config,
        stages=stages,
        down=height // config.rows,
        across=width // config.columns,
        experts=experts,
        interpret=interpret,
    )
    tiled = swizzled(left.dtype)
    multiplying = config.consumers
    return launch(
        lambda **refs: WeightGradientCta(cut, WeightGradientRefs(**refs)).run(),
        name=name,
        grid={"block": min(config.blocks, cut.items)},
        inputs={"left": left, "right": right, "starts": starts, "steps": steps},
        outputs={"out": jax.ShapeDtypeStruct((experts, height, width), left.dtype)},
        scratch={
            "left_smem": plgpu.SMEM(
                (stages, config.parts * multiplying, DEPTH, ROWS), left.dtype, transforms=tiled
            ),
            "right_smem": plgpu.SMEM(
                (stages, DEPTH, config.columns), right.dtype, transforms=tiled
            ),
            "out_smem": plgpu.SMEM(
                (multiplying, ROWS, config.columns), left.dtype, transforms=tiled
            ),
            "loaded": plgpu.Barrier(
                num_arrivals=config.parts * multiplying + 1, num_barriers=stages
            ),
            "read": plgpu.Barrier(num_arrivals=multiplying, num_barriers=stages),
        },
        warpgroups=multiplying + 1,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )["out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGradientCut:
    """The static properties of a launch, known when it is traced.

    Attributes:
        down, across: Tiles of an expert's gradient, one below the other and side by side.
    """

    config: WeightGradientTileConfig
    stages: int
    down: int
    across: int
    experts: int
    interpret: bool

    @property
    def items(self) -> int:
        return self.experts * self.down * self.across

    @property
    def many_registers(self) -> bool:
        """232 + 232 + 40 = 504, the most that three warpgroups may have."""
        return self.config.consumers == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGradientRefs:
    """The refs of a CTA: operands, then its shared memory and barriers."""

    left: Any
    right: Any
    starts: Any
    steps: Any
    out: Any
    left_smem: Any  # [stage, tile of 64 columns, DEPTH, 64]
    right_smem: Any  # [stage, DEPTH, N]
    out_smem: Any  # [warpgroup, 64, N]
    loaded: Any  # full barriers
    read: Any  # empty barriers, arrived at by every consumer


class WeightGradientTile(NamedTuple):
    """The next tile of a CTA."""

    expert: jax.Array
    row: jax.Array  # of the gradient
    column: jax.Array
    start: jax.Array  # first of the expert's rows
    steps: jax.Array


class WeightGradientCta:
    """A CTA that processes tiles: its last warpgroup loads, the others multiply and store."""

    def __init__(self, cut: WeightGradientCut, refs: WeightGradientRefs):
        self.cut, self.refs = cut, refs
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.blocks = min(cut.config.blocks, cut.items)
        self.mine = lax.div(cut.items - self.block + (self.blocks - 1), self.blocks)

    def run(self) -> None:
        consumers = self.cut.config.consumers
        pl.when(self.wg == consumers)(self.load)
        pl.when(self.wg < consumers)(self.multiply)

    def item(self, i: Any) -> WeightGradientTile:
        """Returns the CTA's i-th tile; any tile if there are fewer."""
        cut = self.cut
        number = jnp.minimum(self.block + i * self.blocks, cut.items - 1)
        expert = lax.div(number, cut.down * cut.across)
        inside = number - expert * (cut.down * cut.across)
        down = lax.div(inside, cut.across)
        return WeightGradientTile(
            expert,
            down * cut.config.rows,
            (inside - down * cut.across) * cut.config.columns,
            self.refs.starts[expert],
            self.refs.steps[expert],
        )

    def each(self, function: Any) -> jax.Array:
        """Calls `function(item, steps before it)` for each item, with the next item's indices
        loaded ahead. Returns the total number of steps."""

        def one(i: Any, carry: Any) -> Any:
            done, work_tile = carry
            following = self.item(i + 1)
            function(work_tile, done)
            return done + work_tile.steps, following

        return lax.fori_loop(0, self.mine, one, (jnp.int32(0), self.item(0)))[0]

    def load(self) -> None:
        """Loads steps of 64 rows into the ring, as its stages become free, in the producer
        warpgroup."""
        stages, read = self.cut.stages, self.refs.read
        if self.cut.many_registers:
            plgpu.set_max_registers(40, action="decrease")
        done = self.each(self._load_item)

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _drain(s):
            plgpu.barrier_wait(read.at[lax.rem(s, stages)])

    def _load_item(self, work_tile: WeightGradientTile, done: jax.Array) -> None:
        cut, refs, config = self.cut, self.refs, self.cut.config

        @pl.loop(0, work_tile.steps)
        def _step(s):
            slot = lax.rem(done + s, cut.stages)
            pl.when(done + s >= cut.stages)(lambda: plgpu.barrier_wait(refs.read.at[slot]))
            barrier = refs.loaded.at[slot]
            rows = pl.ds(pl.multiple_of(work_tile.start + s * DEPTH, DEPTH), DEPTH)
            for tile in range(config.parts * config.consumers):
                column_slice = pl.ds(pl.multiple_of(work_tile.row + tile * ROWS, ROWS), ROWS)
                destination = refs.left_smem.at[slot, tile]
                plgpu.copy_gmem_to_smem(refs.left.at[rows, column_slice], destination, barrier)
            column_slice = pl.ds(pl.multiple_of(work_tile.column, ROWS), config.columns)
            plgpu.copy_gmem_to_smem(
                refs.right.at[rows, column_slice], refs.right_smem.at[slot], barrier
            )

    def multiply(self) -> None:
        """Computes a consumer warpgroup's rows of each tile."""
        if self.cut.many_registers:
            plgpu.set_max_registers(232, action="increase")
        self.each(self._multiply_item)
        plgpu.wait_smem_to_gmem(0)

    def _multiply_item(self, work_tile: WeightGradientTile, done: jax.Array) -> None:
        config, out = self.cut.config, self.refs.out_smem
        for part, total in enumerate(self._sums(work_tile, done)):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store(out.at[self.wg], total.astype(out.dtype), interpret=self.cut.interpret)
            plgpu.commit_smem()
            row = pl.multiple_of(work_tile.row + (self.wg * config.parts + part) * ROWS, ROWS)
            column_slice = pl.ds(pl.multiple_of(work_tile.column, ROWS), config.columns)
            destination = self.refs.out.at[work_tile.expert, pl.ds(row, ROWS), column_slice]
            plgpu.copy_smem_to_gmem(out.at[self.wg], destination)

    def _sums(self, work_tile: WeightGradientTile, done: jax.Array) -> list[jax.Array]:
        """Returns each part's sums over all rows of the expert."""
        cut, refs, parts = self.cut, self.refs, self.cut.config.parts

        def accumulate(*accs: Any) -> list[jax.Array]:
            @pl.loop(0, work_tile.steps)
            def _step(s):
                slot = lax.rem(done + s, cut.stages)
                plgpu.barrier_wait(refs.loaded.at[slot])
                for part, acc in enumerate(accs):
                    tile = refs.left_smem.at[slot, self.wg * parts + part]
                    plgpu.wgmma(acc, tile.transpose((1, 0)), refs.right_smem.at[slot])
                plgpu.wgmma_wait(parts)  # all wgmmas except this step's are done

                @pl.when(s > 0)
                def _before():
                    plgpu.barrier_arrive(refs.read.at[lax.rem(done + s - 1, cut.stages)])

            part_sums = [acc[...] for acc in accs]

            @pl.when(work_tile.steps > 0)
            def _last():
                plgpu.barrier_arrive(refs.read.at[lax.rem(done + work_tile.steps - 1, cut.stages)])

            return part_sums

        shape = (ROWS, cut.config.columns)
        return pl.run_scoped(accumulate, *[plgpu.ACC(shape, jnp.float32)] * parts)
