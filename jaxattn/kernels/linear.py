"""Products of a few tokens with matrices of a layer, read where they lie in their stacks.

    y^T [128, T] = W^T x^T          W^T: 128 columns of a matrix [K, N], seen transposed

Weights are the rows of wgmma and tokens its columns, so that a few tokens cost a few columns. The
time is that of reading the weights. So many blocks read at once: `parts` blocks, a cluster, share
the K numbers of 128 columns, and each has `stages` copies under way from the start. Then the blocks
of a cluster add up their sums, each some of the tokens', in the order of the blocks.

Several matrices of one x are one launch: q and kv_a of an attention layer, or gate and up, of which
silu(gate) * up is stored. So are the products of heads that each have numbers of x and a matrix of
their own, [L * heads, K, N]. A token's result does not depend on the other tokens.

Behind its first copies each block asks for its share of what later kernels read (`Ahead`).

A matrix of 64 columns counts as one of 128: TMA takes those behind its end for zeros.

Limits: 32 tokens, 4 of matrices above 32 MiB; K and N multiples of 64; bfloat16 or float16. Heads
have N at least 128.
Reference and tests: `jaxattn.ops.linear` (implementation="xla"), tests/kernels/test_linear.py.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.ahead import Ahead
from jaxattn.core.dispatch import Refusal
from jaxattn.kernels.hopper.cluster import block_of_cluster, meet_in_cluster
from jaxattn.kernels.hopper.launch import launch
from jaxattn.kernels.hopper.machine import (
    NUM_SMS,
    meet,
    require_hopper,
    swizzled,
)
from jaxattn.kernels.hopper.prefetch import Prefetch
from jaxattn.kernels.hopper.turned import store_turned

type Shaped = jax.Array | jax.ShapeDtypeStruct

OP = "linear_layer"
ROWS = 128  # columns of a matrix that a cluster has
STEP = 64  # numbers of K of a copy
MOST_TOKENS = 32  # XLA's product is as fast from here on
# Matrices of more bytes, where XLA's product of so many tokens is faster.
LARGE_BYTES, MOST_LARGE = 32 * 2**20, 4
MOST_PARTS = 8  # blocks of a cluster, on any Hopper GPU
TOGETHER = 4  # tokens whose sums a block reads at a time
BLOCK_BYTES = 72 * 1024  # of copies: three blocks share a multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a launch is cut.

    Attributes:
        parts: blocks that share the K numbers of 128 columns.
        stages: copies that a block has under way.
    """

    parts: int
    stages: int


def choose(*, tiles: int, steps: int, columns: int, gated: bool) -> Config:
    """The fewest parts with which all multiprocessors have two blocks, if there are as many."""
    stage = STEP * (ROWS * (1 + gated) + columns) * 2
    parts = 1
    while parts < MOST_PARTS and tiles * parts < 2 * NUM_SMS and steps >= 4 * parts:
        parts *= 2
    return Config(parts=parts, stages=max(2, min(-(-steps // parts), BLOCK_BYTES // stage)))


def refuse(
    x: Shaped,
    weights: Sequence[Shaped],
    *,
    gated: bool = False,
    least: int = STEP,
    interpret: bool = False,
) -> None:
    """Raises `Refusal` with the reason where the kernel does not serve."""
    require_hopper(OP, interpret=interpret)
    if why := refusal(x.shape, x.dtype, weights, gated=gated, least=least):
        raise Refusal(f"{OP}: {why}")


def refusal(
    x: tuple[int, ...],
    dtype: Any,
    weights: Sequence[Shaped],
    *,
    gated: bool = False,
    least: int = STEP,
) -> str | None:
    """Why the kernel does not serve x [T, K] of this dtype, or None.

    Args:
        least: columns of a matrix.
    """
    tokens, inner = x
    large = max(math.prod(each.shape[1:]) * each.dtype.itemsize for each in weights) > LARGE_BYTES
    most = MOST_LARGE if large else MOST_TOKENS
    if not 0 < tokens <= most:
        size = " of so large matrices" if large else ""
        return f"the kernel has 1 to {most} tokens{size}, and got x {x}"
    for weight in weights:
        if inner % STEP or weight.shape[-1] < least or weight.shape[-1] % STEP:
            return (
                f"the kernel has K and N multiples of {STEP}, and N at least {least}; got weights "
                f"{weight.shape}"
            )
        if weight.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != dtype:
            return (
                "the kernel takes x and weights in bfloat16 or both in float16; got "
                f"{dtype.name} and {weight.dtype.name}"
            )
    return None


def linears_mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    out_dtypes: Sequence[Any],
    gated: bool = False,
    heads: int = 1,
    ahead: Sequence[Ahead] = (),
    config: Config | None = None,
    interpret: bool = False,
    detect_races: bool = False,
) -> list[jax.Array]:
    """`x @ weight[layer]` of each stack of weights, or silu of the first's times the second's.

    Args:
        x: [T, K], or with heads [T, heads * K].
        weights: [L, K, N] each; with `gated`, two of one shape; with heads, one [L * heads, K, N].
        affine: (a, b), for the layer `a * layer + b`.
        out_dtypes: of the results, [T, N] or with heads [T, heads * N].
        heads: each multiplies K numbers of x by a matrix of its own.
        ahead: weights that are asked for.
    """
    tokens, inner = x.shape[0], x.shape[1] // heads
    refuse(
        jax.ShapeDtypeStruct((tokens, inner), x.dtype), weights, gated=gated,
        least=ROWS if heads > 1 else STEP, interpret=interpret,
    )  # fmt: skip
    columns = -(-tokens // 8) * 8
    steps = inner // STEP
    widths = [weights[0].shape[-1]] if gated else [each.shape[-1] for each in weights]
    sizes = [max(width, ROWS) for width in widths]
    tiles = [-(-size // ROWS) for size in sizes]
    config = config or choose(tiles=heads * sum(tiles), steps=steps, columns=columns, gated=gated)
    parts, stages = config.parts, config.stages
    prefetch = Prefetch(ahead, interpret=interpret)
    body = _body(
        config, tokens=tokens, steps=steps, sizes=sizes, affine=affine, gated=gated, heads=heads,
        columns=columns, prefetch=prefetch, interpret=interpret,
    )  # fmt: skip
    tiled, many = swizzled(x.dtype), 1 + gated
    apart = None
    if interpret and parts > 1:  # whose blocks have no shared memory in common
        apart = jnp.zeros((parts, heads * sum(tiles), many, columns, ROWS), jnp.float32)
    if interpret:
        narrow = [max(ROWS - each.shape[-1], 0) for each in weights]
        pads = [((0, 0), (0, 0), (0, more)) for more in narrow]
        weights = [jnp.pad(each, pad) for each, pad in zip(weights, pads, strict=True)]
    # TMA steps in the shared memory's tiles of 8 rows. What lies past x's end it takes for zeros.
    if interpret or (tokens > 8 and tokens % 8):
        x = jnp.pad(x, ((0, columns - tokens), (0, 0)))
    out = launch(
        body,
        name="linear_layer",
        grid={"tile": heads * sum(tiles)},
        cluster={"part": parts} if parts > 1 else {},
        inputs={
            "x_ref": x,
            "weights_refs": tuple(weights),
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1),
            "apart_ref": None if apart is None else jax.new_ref(apart),
            **prefetch.inputs(),
        },
        outputs={
            "out_refs": tuple(
                jax.ShapeDtypeStruct((tokens, heads * size), dtype)
                for size, dtype in zip(sizes, out_dtypes, strict=True)
            )
        },
        scratch={
            "x_smem": plgpu.SMEM((stages, columns, STEP), x.dtype, transforms=tiled),
            "w_smem": plgpu.SMEM((stages, many, STEP, ROWS), x.dtype, transforms=tiled),
            "sums_smem": plgpu.SMEM((many, columns, ROWS), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=1 + many, num_barriers=stages),
            "met": None if apart is None else plgpu.ClusterBarrier(collective_axes=("part",)),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        detect_races=detect_races,
    )
    return [
        y if size == width else y[:, :width]
        for y, size, width in zip(out["out_refs"], sizes, widths, strict=True)
    ]


def _body(
    config: Config,
    *,
    tokens: int,
    steps: int,
    sizes: Sequence[int],
    affine: tuple[int, int],
    gated: bool,
    heads: int,
    columns: int,
    prefetch: Prefetch,
    interpret: bool,
) -> Any:
    parts, stages = config.parts, config.stages
    many = 1 + gated
    row_layout = plgpu.Layout.WG_STRIDED((ROWS,), vec_size=1)

    def body(
        x_ref, weights_refs, layer_ref, apart_ref, ahead_refs, ahead_layers, out_refs,
        x_smem, w_smem, sums_smem, loaded, met,
    ):  # fmt: skip
        zero = jnp.minimum(layer_ref[0], 0)
        layer = layer_ref[0] * affine[0] + affine[1]
        block = tile = lax.axis_index("tile")
        first_of_x = first_of_out = jnp.int32(0)
        if heads > 1:
            per_head = -(-sizes[0] // ROWS)
            head, tile = lax.div(tile, per_head), lax.rem(tile, per_head)
            layer = layer * heads + head
            first_of_x, first_of_out = head * (steps * STEP), head * sizes[0]
        part = block_of_cluster(parts, interpret=interpret) if parts > 1 else jnp.int32(0)
        begin, end = (lax.div((part + more) * steps, parts) for more in (0, 1))
        mine = end - begin
        # Of each result the tile's number, and its first column: the last tile ends with N.
        places, before = [], 0
        for size in sizes:
            places.append((tile - before, jnp.minimum((tile - before) * ROWS, size - ROWS)))
            before += -(-size // ROWS)

        def when_in(result: int, function: Any) -> None:
            number, size = places[result][0], sizes[result]
            if len(sizes) == 1:
                function()
            else:
                pl.when((number >= 0) & (number < -(-size // ROWS)))(function)

        def load(step: Any) -> None:
            slot = lax.rem(step, stages)
            some = pl.ds(pl.multiple_of((begin + step) * STEP, STEP), STEP)
            of_x = some
            if heads > 1:
                first = first_of_x + (begin + step) * STEP
                of_x = pl.ds(pl.multiple_of(first, STEP), STEP)
            tokens_of_x = x_ref.at[pl.ds(zero, columns), of_x]
            plgpu.copy_gmem_to_smem(tokens_of_x, x_smem.at[slot], loaded.at[slot])

            def of_matrix(matrix: int, place: int, first: Any) -> None:
                source = weights_refs[matrix].at[layer, some, pl.ds(first, ROWS)]
                plgpu.copy_gmem_to_smem(source, w_smem.at[slot, place], loaded.at[slot])

            for result, (_, first) in enumerate(places):
                when_in(result, partial(of_matrix, result, 0, first))
                if gated:
                    of_matrix(1, 1, first)

        for step in range(stages):
            pl.when(step < mine)(partial(load, step))
        blocks = heads * sum(-(-size // ROWS) for size in sizes)
        prefetch.ask(ahead_refs, ahead_layers, block * parts + part, blocks * parts)

        def accumulate(*accs: Any) -> list[jax.Array]:
            @pl.loop(0, mine)
            def _step(step):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(loaded.at[slot])
                for place, acc in enumerate(accs):
                    weights = w_smem.at[slot, place].transpose((1, 0))
                    plgpu.wgmma(acc, weights, x_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(len(accs))  # all but this step's are done

                @pl.when((step > 0) & (step + stages - 1 < mine))
                def _reload():
                    meet(interpret=interpret)  # all four warps' products have read the slot
                    load(step + stages - 1)

            return [acc[...] for acc in accs]

        sums = pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, columns), jnp.float32)] * many)
        for place, total in enumerate(sums):
            store_turned(sums_smem.at[place], total, interpret=interpret)
        if apart_ref is not None:
            apart_ref[part, block] = sums_smem[...]
        together = partial(meet_in_cluster, met, interpret=interpret)
        if parts > 1:
            together()
        else:
            meet(interpret=interpret)

        def rows_of(place: int, token: Any) -> list[jax.Array]:
            """A token's sums of each block."""
            rows = []
            for other in range(parts):
                if apart_ref is not None:
                    source = apart_ref.at[other, block, place]
                elif parts > 1:
                    source = plgpu.cluster_ref(sums_smem.at[place], {"part": jnp.int32(other)})
                else:
                    source = sums_smem.at[place]
                rows.append(plgpu.load(source.at[token], layout=row_layout, optimized=False))
            return rows

        def store(result: int, first: Any) -> None:
            """The block's tokens, a few at a time: all their rows are on their way together."""
            out = out_refs[result]
            first = first_of_out + first if heads > 1 else first
            for start in range(0, tokens, TOGETHER * parts):
                some = range(start, min(start + TOGETHER * parts, tokens), parts)
                mine = [part + token for token in some]
                rows = [
                    [rows_of(place, jnp.minimum(token, columns - 1)) for place in range(many)]
                    for token in mine
                ]
                for token, parts_of in zip(mine, rows, strict=True):
                    y, *up = (sum(each[1:], each[0]) for each in parts_of)
                    if gated:
                        y = y * (1 / (1 + jnp.exp(-y))) * up[0]

                    @pl.when(token < tokens)
                    def _store(token=token, y=y):
                        out.at[token, pl.ds(first, ROWS)][...] = y.astype(out.dtype)

        for result, (_, first) in enumerate(places):
            when_in(result, partial(store, result, first))
        if parts > 1:
            together()  # no block ends before the others have read its sums

    return body
