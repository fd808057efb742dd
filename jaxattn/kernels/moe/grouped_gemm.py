"""One of the two products of a mixture of experts, over the items of a work list.

Weights are the 64-row side of wgmma, as they are published, and tokens its columns, so that a few
of them cost a few columns. With `narrow` a tile of fewer tokens than N is multiplied as one of
fewer columns:

    gate_up    h^T [64, N] = silu(gate x^T) * (up x^T)      gate, up [64, K = F] of an expert
    down       y^T [64, N] = down h^T                       down     [64, K = I]

An item is a tile of N tokens of one expert and 64 or 128 rows of its weights. A block of each
multiprocessor takes many, item b, b + blocks and so on. Its last warpgroup issues the TMA copies
into a ring of `stages` steps of K, the next item's too. One or two warpgroups multiply, each its
own 64 rows (of gate and up, or of `parts` tiles of down). A sum over K has one order whatever the
cut, so a token's result does not depend on the other tokens.

Products of 16-bit weights may have a bias, and the activation may be another than SwiGLU (gpt-oss).

FP8 weights are widened on their way through registers (hopper/fp8_operands.py). Each step's
product, of 128 of K, has a scale, by which it is multiplied as it is added to the sum, in float32.
Where few multiprocessors have an item, gate has one warpgroup and up another. Up's sums go through
shared memory to gate's warpgroup.

Results leave turned round, tokens as rows, in panels: [width / w, R, w] for w columns of each.

Limits: K a multiple of 64, rows of weights of `GemmTileConfig.rows` * parts; bfloat16 or float16.
Of FP8 weights K is a multiple of 128.
Reference and tests: `jaxattn.ops.moe.experts` (implementation="xla"),
tests/kernels/moe/test_kernel.py.
"""

import copy
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.swiglu import ClampedSwiGLU
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import swizzled
from jaxattn.kernels.hopper.fp8_operands import SWIZZLED, plain_product, widened
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.hopper.store.unoptimized_store import store
from jaxattn.kernels.moe.routing.token_alignment import EXPERT, FROM, GROUPS, TO, TokenAlignment
from jaxattn.kernels.moe.tile_config import (
    BLOCK,
    GROUP,
    NARROWEST,
    ROWS,
    GemmTileConfig,
    stages_of,
)

PRODUCT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class PanelMatrix:
    """A matrix [rows, K] in a 2-D array: panels of `width` columns, one below the other.

    Attributes:
        first: row of the array where it begins.
        rows: of a panel.
    """

    first: int
    rows: int
    width: int

    def at(self, ref: Any, row: Any, rows: int, column: Any, columns: int) -> Any:
        """Some of its rows and columns, which lie in one panel."""
        of_panel, inside = lax.div(column, self.width), lax.rem(column, self.width)
        row = pl.multiple_of(self.first + of_panel * self.rows + row, GROUP)
        return ref.at[pl.ds(row, rows), pl.ds(pl.multiple_of(inside, columns), columns)]


class GroupedGemmTile(NamedTuple):
    """What a block does next."""

    expert: jax.Array
    source: jax.Array  # first row of its tokens
    target: jax.Array  # first row of its results
    groups: jax.Array  # of 8 tokens
    place: jax.Array  # which of the expert's pieces of rows


def grouped_product(
    tokens: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None,
    biases: jax.Array | None,
    work: TokenAlignment,
    target: Any,
    *,
    activation: ClampedSwiGLU | None = None,
    layer: jax.Array,
    affine: tuple[int, int],
    source: PanelMatrix,
    results: PanelMatrix,
    columns: int,
    product: GemmTileConfig,
    gated: bool,
    name: str,
    interpret: bool = False,
    detect_races: bool = False,
) -> None:
    """Writes the product of each tile of tokens with its expert's weights.

    Args:
        tokens: a 2-D array of bfloat16 or float16, in which `source` says where the tokens are.
        weights: [L, E, rows, K] of the tokens' dtype, or float8_e4m3fn.
        scales: of the latter, float32 [L, E, blocks of rows, blocks of K]; gate's before up's.
        biases: [L, E, rows], of 16-bit weights.
        activation: of gate_up; None is silu(gate) * up.
        target: a reference to a 2-D array: rows of h in the tokens' dtype, of y in that or float32.
        layer: int32 [1]; the layer is `affine[0] * layer + affine[1]`.
        results: where they go in `target`.
        columns: N.
        gated: whether this is gate_up, and its result h.
    """
    height, depth = weights.shape[-2:]
    dtype, out_dtype = tokens.dtype, jnp.dtype(target.dtype)
    stages = stages_of(product, columns, dtype.name, out_dtype.name, weights.dtype.name)
    pieces = height // (product.rows * product.parts)
    blocks = min(product.blocks, work.tiles.shape[1] * pieces)
    cut = GroupedGemmConfig(
        product=product,
        columns=columns,
        stages=stages,
        steps=depth // product.depth,
        apart=height // 2 if gated else product.rows,
        pieces=pieces,
        blocks=blocks,
        affine=affine,
        gated=gated,
        activation=activation,
        source=source,
        results=results,
        interpret=interpret,
    )
    tiled = swizzled(dtype)
    of_weights = tiled if scales is None else SWIZZLED
    consumers, parts = product.consumers, product.parts
    ring = (stages, parts, consumers, ROWS, product.depth)
    launch(
        lambda **refs: GroupedGemmCta(cut, GroupedGemmRefs(**refs)).run(),
        name=name,
        grid={"block": blocks},
        inputs={
            "tokens": tokens,
            "weights": weights,
            "tiles": work.tiles,
            "total": work.total,
            "layer": layer,
            "scales": scales,
            "biases": biases,
            "target": target,
        },
        scratch={
            "weights_smem": plgpu.SMEM(ring, weights.dtype, transforms=of_weights),
            "tokens_smem": plgpu.SMEM((stages, columns, product.depth), dtype, transforms=tiled),
            "out_smem": plgpu.SMEM(
                (consumers, columns, ROWS), out_dtype, transforms=swizzled(out_dtype)
            ),
            "up_smem": plgpu.SMEM((ROWS, columns), jnp.float32) if product.split else None,
            "loaded": plgpu.Barrier(num_arrivals=parts * consumers + 1, num_barriers=stages),
            "read": plgpu.Barrier(num_arrivals=product.warpgroups, num_barriers=stages),
            "up_there": plgpu.Barrier(num_arrivals=1) if product.split else None,
            "up_read": plgpu.Barrier(num_arrivals=1) if product.split else None,
        },
        warpgroups=product.warpgroups + 1,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        detect_races=detect_races,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmConfig:
    """What is known of a launch when it is traced.

    Attributes:
        stages: places of the ring.
        steps: of K.
        apart: rows of weights from a part to the next.
        pieces: of an expert's rows.
        blocks: that walk over the items.
    """

    product: GemmTileConfig
    columns: int
    stages: int
    steps: int
    apart: int
    pieces: int
    blocks: int
    affine: tuple[int, int]
    gated: bool
    activation: ClampedSwiGLU | None
    source: PanelMatrix
    results: PanelMatrix
    interpret: bool

    @property
    def piece(self) -> int:
        """Rows of an item: those of a part follow one another, and so do down's parts."""
        return self.product.rows * (1 if self.gated else self.product.parts)

    @property
    def many_registers(self) -> bool:
        """232 + 232 + 40 = 504, the most that three warpgroups may have. Two have enough."""
        return self.columns >= 64 and self.product.warpgroups == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmRefs:
    """What a block works on: operands, then its shared memory and barriers."""

    tokens: Any
    weights: Any  # [L, E, rows, K]
    tiles: Any
    total: Any
    layer: Any
    scales: Any  # of FP8 weights, else None
    biases: Any  # or None
    target: Any
    weights_smem: Any  # [stage, part, warpgroup, 64, depth]
    tokens_smem: Any  # [stage, N, depth]
    out_smem: Any  # [warpgroup, N, 64]
    up_smem: Any  # [64, N], where up has a warpgroup of its own
    loaded: Any  # of each stage
    read: Any  # by every warpgroup that multiplies
    up_there: Any
    up_read: Any


class GroupedGemmCta:
    """A block's items: its last warpgroup loads, the others multiply and store."""

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
        """The block's i-th, of which it may have none: then any. How many there are is not waited
        for."""
        tiles, pieces = self.refs.tiles, self.cut.pieces
        number = jnp.minimum(self.block + i * self.cut.blocks, tiles.shape[1] * pieces - 1)
        tile = lax.div(number, pieces)
        # h lies where it was written, and x may have stayed where it was.
        source = tiles[FROM if self.cut.gated else TO, tile]
        expert, target, groups = (tiles[j, tile] for j in (EXPERT, TO, GROUPS))
        return GroupedGemmTile(expert, source, target, groups, number - tile * pieces)

    def each(self, function: Any) -> jax.Array:
        """`function(item, steps before it)` for each item, the next one's numbers read ahead; the
        steps of all."""

        def one(i, carry):
            done, now = carry
            following = self.item(i + 1)
            function(now, done)
            return done + self.cut.steps, following

        return lax.fori_loop(0, self.mine, one, (jnp.int32(0), self.item(0)))[0]

    def narrowed(self, columns: int) -> "GroupedGemmCta":
        """The same block for tiles of so many tokens, in the first rows of shared memory."""

        def rows(ref: Any) -> Any:  # [..., N, width]
            return ref.at[*[slice(None)] * (len(ref.shape) - 2), pl.ds(0, columns)]

        refs, block = self.refs, copy.copy(self)
        block.cut = dataclasses.replace(self.cut, columns=columns)
        block.refs = dataclasses.replace(
            refs, tokens_smem=rows(refs.tokens_smem), out_smem=rows(refs.out_smem)
        )
        return block

    def in_width(self, method: Any) -> Any:
        """`method(block, item, steps before it)` of the block for the item's tokens."""
        columns = self.cut.columns
        if not self.cut.product.narrow:
            return partial(method, self)

        def function(now: GroupedGemmTile, done: jax.Array) -> None:
            for width in range(NARROWEST, columns + 1, NARROWEST):
                block = self if width == columns else self.narrowed(width)
                fits = (now.groups > (width - NARROWEST) // GROUP) & (now.groups <= width // GROUP)
                pl.when(fits)(partial(method, block, now, done))

        return function

    def load(self) -> None:
        """The copying warpgroup: steps of K into the ring, as its places become free."""
        stages, read = self.cut.stages, self.refs.read
        if self.cut.many_registers:
            plgpu.set_max_registers(40, action="decrease")
        done = self.each(self.in_width(GroupedGemmCta._load_item))

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _drain(s):
            plgpu.barrier_wait(read.at[lax.rem(s, stages)])

    def _load_item(self, now: GroupedGemmTile, done: jax.Array) -> None:
        cut, refs = self.cut, self.refs
        product, depth = cut.product, cut.product.depth
        of_expert = refs.weights.at[self.layer, now.expert]

        @pl.loop(0, cut.steps)
        def _step(s):
            slot = lax.rem(done + s, cut.stages)
            pl.when(done + s >= cut.stages)(lambda: plgpu.barrier_wait(refs.read.at[slot]))
            there = refs.loaded.at[slot]
            some = pl.ds(pl.multiple_of(s * depth, depth), depth)
            for part in range(product.parts):
                for warpgroup in range(product.consumers):
                    row = now.place * cut.piece + (part * cut.apart + warpgroup * ROWS)
                    rows = of_expert.at[pl.ds(pl.multiple_of(row, ROWS), ROWS), some]
                    to = refs.weights_smem.at[slot, part, warpgroup]
                    plgpu.copy_gmem_to_smem(rows, to, there)
            rows = cut.source.at(refs.tokens, now.source, cut.columns, s * depth, depth)
            plgpu.copy_gmem_to_smem(rows, refs.tokens_smem.at[slot], there)

    def multiply(self) -> None:
        """A multiplying warpgroup: its rows of each item."""
        if self.cut.many_registers:
            plgpu.set_max_registers(232, action="increase")
        if self.cut.product.split:
            self._multiply_split()
            return
        self.each(self.in_width(GroupedGemmCta._multiply_item))
        plgpu.wait_smem_to_gmem(0)

    def _multiply_item(self, now: GroupedGemmTile, done: jax.Array) -> None:
        sums = self._sums if self.refs.scales is None else ScaledAccumulators(self)
        every = sums(now, done)
        if self.refs.biases is not None:
            every = [total + self._bias(now, part) for part, total in enumerate(every)]
        if self.cut.gated:
            gate, up = every
            if self.cut.activation is None:
                every = [gate / (1.0 + jnp.exp(-gate)) * up]
            else:
                every = [self.cut.activation(gate, up)]
        self._store(now, every)

    def _bias(self, now: GroupedGemmTile, part: int) -> jax.Array:
        """A number for each row of the weights of a part, for every token."""
        cut, of_expert = self.cut, self.refs.biases.at[self.layer, now.expert]
        some = pl.ds(pl.multiple_of(self.row(now, part), ROWS), ROWS)
        bias = plgpu.load(of_expert.at[some], layout=PRODUCT.reduce(1), optimized=False)
        wide = lax.broadcast_in_dim(bias.astype(jnp.float32), (ROWS, cut.columns), (0,))
        return plgpu.layout_cast(wide, PRODUCT)

    def row(self, now: GroupedGemmTile, part: int) -> jax.Array:
        """The first of the weights' rows that this warpgroup has of a part."""
        return now.place * self.cut.piece + part * self.cut.apart + self.wg * ROWS

    def _multiply_split(self) -> None:
        """The warpgroup of gate, or that of up."""
        refs, sums = self.refs, ScaledAccumulators(self)

        def gate(now: GroupedGemmTile, done: jax.Array) -> None:
            (total,) = sums(now, done)
            plgpu.barrier_wait(refs.up_there)
            up = plgpu.load(refs.up_smem, layout=PRODUCT, optimized=False)
            plgpu.barrier_arrive(refs.up_read)
            self._store(now, [total / (1.0 + jnp.exp(-total)) * up])

        def up(now: GroupedGemmTile, done: jax.Array) -> None:
            (total,) = sums(now, done)
            pl.when(done > 0)(lambda: plgpu.barrier_wait(refs.up_read))
            store(refs.up_smem, total, interpret=self.cut.interpret)
            plgpu.barrier_arrive(refs.up_there)

        @pl.when(self.wg == 0)
        def _gate():
            self.each(gate)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.wg == 1)
        def _up():
            done = self.each(up)
            pl.when(done > 0)(lambda: plgpu.barrier_wait(refs.up_read))

    def _store(self, now: GroupedGemmTile, every: list[jax.Array]) -> None:
        cut, out = self.cut, self.refs.out_smem
        for part, result in enumerate(every):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store_transposed(out.at[self.wg], result.astype(out.dtype), interpret=cut.interpret)
            plgpu.commit_smem()
            self._write(now, self.row(now, part))

    def arrived(self, step: jax.Array) -> tuple[jax.Array, Any]:
        """The slot of a step, once it is loaded, and its tokens as columns."""
        slot = lax.rem(step, self.cut.stages)
        plgpu.barrier_wait(self.refs.loaded.at[slot])
        return slot, self.refs.tokens_smem.at[slot].transpose((1, 0))

    @property
    def accumulators(self) -> list[Any]:
        shape = (ROWS, self.cut.columns)
        return [plgpu.ACC(shape, jnp.float32)] * self.cut.product.parts

    def _sums(self, now: GroupedGemmTile, done: jax.Array) -> list[jax.Array]:
        """Of each part over all of K, of 16-bit weights."""
        del now
        cut, refs = self.cut, self.refs

        def accumulate(*accs: Any) -> list[jax.Array]:
            @pl.loop(0, cut.steps)
            def _step(s):
                slot, turned = self.arrived(done + s)
                for part, acc in enumerate(accs):
                    plgpu.wgmma(acc, refs.weights_smem.at[slot, part, self.wg], turned)
                plgpu.wgmma_wait(cut.product.parts)  # all but this step's are done

                @pl.when(s > 0)
                def _before():
                    plgpu.barrier_arrive(refs.read.at[lax.rem(done + s - 1, cut.stages)])

            every = [acc[...] for acc in accs]
            plgpu.barrier_arrive(refs.read.at[lax.rem(done + cut.steps - 1, cut.stages)])
            return every

        return pl.run_scoped(accumulate, *self.accumulators)

    def _write(self, now: GroupedGemmTile, column: jax.Array) -> None:
        """A tile whose first `now.groups` groups of rows are somebody's."""
        for group in range(self.cut.columns // GROUP):

            @pl.when(group < now.groups)
            def _some(group=group):
                row = now.target + group * GROUP
                to = self.cut.results.at(self.refs.target, row, GROUP, column, ROWS)
                of_group = self.refs.out_smem.at[self.wg, pl.ds(group * GROUP, GROUP)]
                plgpu.copy_smem_to_gmem(of_group, to)


class ScaledAccumulators:
    """Sums of a `GroupedGemmCta` with FP8 weights; each step's scale is read a step ahead."""

    def __init__(self, block: GroupedGemmCta):
        self.block = block

    def __call__(self, now: GroupedGemmTile, done: jax.Array) -> list[jax.Array]:
        block, cut, refs = self.block, self.block.cut, self.block.refs
        split = cut.product.split
        parts: Any = [block.wg] if split else range(cut.product.parts)
        first = now.place * cut.piece + (0 if split else block.wg) * ROWS
        of_parts = [
            lax.div(first + (0 if cut.gated else part * cut.apart), BLOCK)
            + (part * (refs.scales.shape[2] // 2) if cut.gated else 0)
            for part in parts
        ]

        def scales(s: Any) -> list[jax.Array]:
            s = jnp.minimum(s, cut.steps - 1)
            return [refs.scales[block.layer, now.expert, rows, s] for rows in of_parts]

        def step(s, carry):
            totals, factors = carry
            slot, turned = block.arrived(done + s)
            following = scales(s + 1)
            every = self._products(slot, turned)
            # wgmma has taken what was loaded. The interpreter does not know, and wants a fence
            # between a load and the next copy to its place.
            if cut.interpret:
                plgpu.commit_smem()
            plgpu.barrier_arrive(refs.read.at[slot])
            totals = [
                total + one * factor
                for total, one, factor in zip(totals, every, factors, strict=True)
            ]
            return totals, following

        zero = plgpu.layout_cast(jnp.zeros((ROWS, cut.columns), jnp.float32), PRODUCT)
        return lax.fori_loop(0, cut.steps, step, ([zero] * len(parts), scales(0)))[0]

    def _products(self, slot: jax.Array, turned: Any) -> list[jax.Array]:
        """A step's, of each part that is the warpgroup's, without its scale."""
        block, refs, product = self.block, self.block.refs, self.block.cut.product
        # (part, which of its 64 rows)
        mine: list[Any] = [(part, block.wg) for part in range(product.parts)]
        if product.split:
            mine = [(block.wg, 0)]
        if block.cut.interpret:
            tokens = refs.tokens_smem[slot]
            return [
                plain_product(refs.weights_smem[slot, part, rows], tokens) for part, rows in mine
            ]

        def products(*accs: Any) -> list[jax.Array]:
            for (part, rows), acc in zip(mine, accs, strict=True):
                tile = refs.weights_smem.at[slot, part, rows]
                plgpu.wgmma(acc, widened(tile, refs.tokens.dtype), turned)
            return [
                plgpu.wgmma_accumulator_load(acc, wait_n=len(mine) - 1 - place)
                for place, acc in enumerate(accs)
            ]

        return pl.run_scoped(products, *block.accumulators[: len(mine)])
