"""One of the two products of a mixture of experts, over the items of a work list.

Weights are the 64-row side of wgmma, as they are published, and tokens its columns, so that a few
of them cost a few columns:

    gate_up    h^T [64, N] = silu(gate x^T) * (up x^T)      gate, up [64, K = F] of an expert
    down       y^T [64, N] = down h^T                       down     [64, K = I]

An item is a tile of N tokens of one expert and 64 or 128 rows of its weights. A block of each
multiprocessor takes many, item b, b + blocks and so on. Its last warpgroup issues the TMA copies
into a ring of `stages` steps of K, the next item's too. One or two warpgroups multiply, each its
own 64 rows (of gate and up, or of `parts` tiles of down). A sum over K has one order whatever the
cut, so a token's result does not depend on the other tokens.

FP8 weights are widened on their way through registers (fp8.py). Each step's product, of 128 of K,
has a scale of its own, by which it is multiplied as it is added to the sum, in float32.

Results leave turned round, tokens as rows, in panels: [width / w, R, w] for w columns of each.

Limits: K a multiple of 64, rows of weights of `Product.rows` * parts; bfloat16 or float16. Of FP8
weights K is a multiple of 128.
Reference and tests: `jaxattn.ops.moe` (implementation="xla"), tests/kernels/moe/test_kernel.py.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.machine import interpret_mode, swizzled
from jaxattn.kernels.hopper.turned import store_turned
from jaxattn.kernels.moe.config import BLOCK, GROUP, ROWS, Product, stages_of
from jaxattn.kernels.moe.fp8 import SWIZZLED, widened
from jaxattn.kernels.moe.work import EXPERT, FROM, GROUPS, TO, Work

PRODUCT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Panels:
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


class Item(NamedTuple):
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
    work: Work,
    target: Any,
    *,
    layer: jax.Array,
    affine: tuple[int, int],
    source: Panels,
    results: Panels,
    columns: int,
    product: Product,
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
        target: a reference to a 2-D array: rows of h in the tokens' dtype, of y in float32.
        layer: int32 [1]; the layer is `affine[0] * layer + affine[1]`.
        results: where they go in `target`.
        columns: N.
        gated: whether this is gate_up, and its result h.
    """
    height, depth = weights.shape[-2:]
    dtype, out_dtype = tokens.dtype, jnp.dtype(target.dtype)
    stages = stages_of(product, columns, dtype.name, out_dtype.name, weights.dtype.name)
    # Rows of weights from a part to the next, and how many pieces there are of each.
    apart = height // 2 if gated else product.rows
    pieces = height // (product.rows * product.parts)
    blocks = min(product.blocks, work.tiles.shape[1] * pieces)
    body = _body(
        product, columns=columns, stages=stages, steps=depth // product.depth, apart=apart,
        pieces=pieces, blocks=blocks, affine=affine, gated=gated, quantized=scales is not None,
        source=source, results=results, interpret=interpret,
    )  # fmt: skip
    tiled = swizzled(dtype)
    of_weights = tiled if scales is None else SWIZZLED
    consumers, parts = product.consumers, product.parts
    kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((stages, parts, consumers, ROWS, product.depth), weights.dtype,
                       transforms=of_weights),
            plgpu.SMEM((stages, columns, product.depth), dtype, transforms=tiled),
            plgpu.SMEM((consumers, columns, ROWS), out_dtype, transforms=swizzled(out_dtype)),
            plgpu.Barrier(num_arrivals=parts * consumers + 1, num_barriers=stages),  # loaded
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),  # read
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )  # fmt: skip
    with jax.enable_x64(False):  # the kernel's integers are int32
        some = () if scales is None else (scales,)
        kernel(tokens, weights, work.tiles, work.total, layer, *some, target)


def _body(
    product: Product,
    *,
    columns: int,
    stages: int,
    steps: int,
    apart: int,
    pieces: int,
    blocks: int,
    affine: tuple[int, int],
    gated: bool,
    quantized: bool,
    source: Panels,
    results: Panels,
    interpret: bool,
) -> Any:
    consumers, parts, depth = product.consumers, product.parts, product.depth
    # An item's rows of a part follow one another, and so do down's parts.
    piece = product.rows * (1 if gated else parts)
    # 232 + 232 + 40 = 504, the most that three warpgroups may have. Two have enough as they are.
    many_registers = columns >= 64 and consumers == 2

    def body(tokens_ref, weights_ref, tiles_ref, total_ref, layer_ref, *others):
        scales_ref: Any = others[0] if quantized else None
        target_ref, weights_smem, tokens_smem, out_smem, loaded, read = others[quantized:]
        layer = layer_ref[0] * affine[0] + affine[1]
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        last = total_ref[0] * pieces
        mine = lax.div(last - block + (blocks - 1), blocks)

        def item(i: Any) -> Item:
            """The block's i-th, of which it may have none: then any. How many there are is not
            waited for."""
            number = jnp.minimum(block + i * blocks, tiles_ref.shape[1] * pieces - 1)
            tile = lax.div(number, pieces)
            # h lies where it was written, and x may have stayed where it was.
            source = tiles_ref[FROM if gated else TO, tile]
            expert, target, groups = (tiles_ref[j, tile] for j in (EXPERT, TO, GROUPS))
            return Item(expert, source, target, groups, number - tile * pieces)

        def each(function: Any) -> jax.Array:
            """`function(item, steps before it)` for each item, the next one's numbers read ahead;
            the steps of all."""

            def one(i, carry):
                done, now = carry
                following = item(i + 1)
                function(now, done)
                return done + steps, following

            return lax.fori_loop(0, mine, one, (jnp.int32(0), item(0)))[0]

        @pl.when(wg == consumers)
        def _load():
            if many_registers:
                plgpu.set_max_registers(40, action="decrease")

            def load(now: Item, done: jax.Array) -> None:
                of_expert = weights_ref.at[layer, now.expert]

                @pl.loop(0, steps)
                def _step(s):
                    slot = lax.rem(done + s, stages)
                    pl.when(done + s >= stages)(lambda: plgpu.barrier_wait(read.at[slot]))
                    there = loaded.at[slot]
                    some = pl.ds(pl.multiple_of(s * depth, depth), depth)
                    for part in range(parts):
                        for warpgroup in range(consumers):
                            row = now.place * piece + (part * apart + warpgroup * ROWS)
                            rows = of_expert.at[pl.ds(pl.multiple_of(row, ROWS), ROWS), some]
                            to = weights_smem.at[slot, part, warpgroup]
                            plgpu.copy_gmem_to_smem(rows, to, there)
                    rows = source.at(tokens_ref, now.source, columns, s * depth, depth)
                    plgpu.copy_gmem_to_smem(rows, tokens_smem.at[slot], there)

            done = each(load)

            @pl.loop(jnp.maximum(done - stages, 0), done)
            def _drain(s):
                plgpu.barrier_wait(read.at[lax.rem(s, stages)])

        @pl.when(wg < consumers)
        def _multiply():
            if many_registers:
                plgpu.set_max_registers(232, action="increase")

            def arrived(step: jax.Array) -> tuple[jax.Array, Any]:
                """The slot of a step, once it is loaded, and its tokens as columns."""
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(loaded.at[slot])
                return slot, tokens_smem.at[slot].transpose((1, 0))

            def sums(done: jax.Array) -> list[jax.Array]:
                """Of each part over all of K."""

                def accumulate(*accs: Any) -> list[jax.Array]:
                    @pl.loop(0, steps)
                    def _step(s):
                        slot, turned = arrived(done + s)
                        for part, acc in enumerate(accs):
                            plgpu.wgmma(acc, weights_smem.at[slot, part, wg], turned)
                        plgpu.wgmma_wait(parts)  # all but this step's are done

                        @pl.when(s > 0)
                        def _before():
                            plgpu.barrier_arrive(read.at[lax.rem(done + s - 1, stages)])

                    every = [acc[...] for acc in accs]
                    plgpu.barrier_arrive(read.at[lax.rem(done + steps - 1, stages)])
                    return every

                return pl.run_scoped(accumulate, *accumulators)

            accumulators = [plgpu.ACC((ROWS, columns), jnp.float32)] * parts

            def scaled_sums(now: Item, done: jax.Array) -> list[jax.Array]:
                """The same of FP8 weights; a step's scales are read a step ahead."""
                first = now.place * piece + wg * ROWS
                blocks = [
                    lax.div(first + (0 if gated else part * apart), BLOCK)
                    + (part * (scales_ref.shape[2] // 2) if gated else 0)
                    for part in range(parts)
                ]

                def scales(s: Any) -> list[jax.Array]:
                    s = jnp.minimum(s, steps - 1)
                    return [scales_ref[layer, now.expert, of_rows, s] for of_rows in blocks]

                def step(s, carry):
                    totals, factors = carry
                    slot, turned = arrived(done + s)
                    following = scales(s + 1)

                    def products(*accs: Any) -> list[jax.Array]:
                        for part, acc in enumerate(accs):
                            tile = weights_smem.at[slot, part, wg]
                            plgpu.wgmma(acc, widened(tile, tokens_ref.dtype), turned)
                        return [
                            plgpu.wgmma_accumulator_load(acc, wait_n=parts - 1 - part)
                            for part, acc in enumerate(accs)
                        ]

                    if interpret:
                        every = [
                            _plain(weights_smem[slot, part, wg], tokens_smem[slot])
                            for part in range(parts)
                        ]
                    else:
                        every = pl.run_scoped(products, *accumulators)
                    plgpu.barrier_arrive(read.at[slot])
                    totals = [
                        total + one * factor
                        for total, one, factor in zip(totals, every, factors, strict=True)
                    ]
                    return totals, following

                zero = plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), PRODUCT)
                return lax.fori_loop(0, steps, step, ([zero] * parts, scales(0)))[0]

            def multiply(now: Item, done: jax.Array) -> None:
                every = scaled_sums(now, done) if quantized else sums(done)
                if gated:
                    gate, up = every
                    every = [gate / (1.0 + jnp.exp(-gate)) * up]
                for part, result in enumerate(every):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    result = result.astype(out_smem.dtype)
                    store_turned(out_smem.at[wg], result, interpret=interpret)
                    plgpu.commit_smem()
                    write(now, now.place * piece + part * apart + wg * ROWS)

            def write(now: Item, column: jax.Array) -> None:
                """A tile whose first `now.groups` groups of rows are somebody's."""
                for group in range(columns // GROUP):

                    @pl.when(group < now.groups)
                    def _some(group=group):
                        to = results.at(target_ref, now.target + group * GROUP, GROUP, column, ROWS)
                        of_group = out_smem.at[wg, pl.ds(group * GROUP, GROUP)]
                        plgpu.copy_smem_to_gmem(of_group, to)

            each(multiply)
            plgpu.wait_smem_to_gmem(0)

    return body


def _plain(weights: jax.Array, tokens: jax.Array) -> jax.Array:
    """A step's product in the interpreter, whose wgmma takes nothing from registers."""
    exact = lax.Precision.HIGHEST
    return jnp.dot(weights.astype(jnp.float32), tokens.astype(jnp.float32).T, precision=exact)
