"""Products of up to 256 tokens with FP8 matrices of a layer; each block of weights has a scale.

    y^T [64, C] = sum over steps of K    scale * (W x^T)      W [64, 128] of a matrix [N, K]

Up to 32 tokens fp8_linear.py is faster: it reads with more CTAs. With more tokens a multiplication
takes as long as a read. So a CTA has two consumer warpgroups, each with 64 rows of W, and a third
whose copies run ahead. A step is as deep as a block of scales: its product is finished before it is
multiplied by the scale and added, in float32. While the product runs, the warpgroup widens its
numbers of the next step (hopper/fp8_conversion.py).

A CTA has 128 rows of one matrix, or 64 of gate and 64 of up, and up to 128 tokens. With more
tokens, two consecutive CTAs have the same rows, which the second finds in L2. If there are few
CTAs, those of a cluster divide the K numbers. Each then adds up some tokens' sums, in the order of
the CTAs. A token's result does not depend on the other tokens.

Limits: 256 tokens; matrices, pairs of columns and dtypes as in fp8_linear.py. Tokens that are not a
multiple of 8, or of 16 above 128, are copied to one.
Reference: `jaxattn.ops.linear.fp8_linear` (implementation="xla"). Tests:
tests/kernels/linear/test_fp8_medium_batch_linear.py.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import (
    CLUSTERS_AT_A_TIME,
    RESERVED_BYTES,
    SHARED_BYTES,
    require_hopper,
)
from jaxattn.kernels.hopper.fp8_conversion import SWIZZLED, moved, multiplied, plain_product
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.reduce.cluster_reduction import cluster_barrier, cluster_block_index
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.hopper.store.unoptimized_store import store
from jaxattn.kernels.hopper.wgmma_accumulator_storage import (
    GROUP,
    NUMBERS,
    PRODUCT,
    ROWS,
    by_thread,
    load_of_block,
    product_of,
    threads,
)
from jaxattn.kernels.linear import fp8_linear
from jaxattn.kernels.linear.fp8_linear import FP8, OP
from jaxattn.kernels.linear.linear import LinearTileConfig, Shaped

MOST_TOKENS = 256
COLUMNS = 128  # most tokens of a CTA
CONSUMERS = 2  # consumer warpgroups
MOST_STAGES = 8
BARRIER_BYTES = 2048  # left for barriers and alignment
MOST_SHARING = 4  # CTAs of a cluster
# The cost of a CTA beyond its steps, and of a cluster's sums, in steps.
BEGINNING, SUMMING = 5, 4


def columns_of(tokens: int) -> tuple[int, int]:
    """Returns (tokens of a CTA, a multiple of 8; CTAs for all of them)."""
    blocks = -(-tokens // COLUMNS)
    return -(-tokens // (blocks * GROUP)) * GROUP, blocks


def sums_bytes(columns: int) -> int:
    """Returns the bytes of shared memory for a CTA's sums."""
    return CONSUMERS * ROWS * columns * 4


def choose(*, tiles: int, steps: int, columns: int, gated: bool) -> LinearTileConfig:
    """Returns the parts of K with which the last CTA ends first, by count of steps.

    Args:
        tiles: CTAs that each have all of K.
        steps: Steps of K.
    """

    stage = BLOCK * (CONSUMERS * ROWS + 2 * columns)
    return divided(stage, MOST_STAGES, tiles=tiles, steps=steps, columns=columns, gated=gated)


def divided(
    stage: int, most_stages: int, *, tiles: int, steps: int, columns: int, gated: bool
) -> LinearTileConfig:
    """Returns `choose` for stages of `stage` bytes each, and at most `most_stages`."""

    def time(parts: int) -> int:
        turns = -(-tiles // CLUSTERS_AT_A_TIME[parts])
        return turns * (-(-steps // parts) + BEGINNING) + SUMMING * (parts > 1)

    parts = min(range(1, min(MOST_SHARING, steps) + 1), key=time)
    room = SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES
    room -= sums_bytes(columns) * (gated or parts > 1)
    return LinearTileConfig(
        parts=parts, stages=max(2, min(most_stages, steps // parts, room // stage))
    )


def refusal(x: tuple[int, ...], dtype: Any, weights: Sequence[Shaped]) -> str | None:
    """Returns why the kernel does not serve x [T, K] of this dtype, or None."""
    tokens, inner = x
    if not 0 < tokens <= MOST_TOKENS:
        return f"the kernels support 1 to {MOST_TOKENS} tokens; got x {x}"
    return fp8_linear.refusal((1, inner), dtype, weights)


def many_linears_fp8_mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    *,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    out_dtypes: Sequence[Any],
    gated: bool = False,
    config: LinearTileConfig | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns `x @ weight[layer].T` for each stack of weights, or silu of the first's times the
    second's.

    The arguments are those of `jaxattn.kernels.linear.fp8_linear.linears_fp8_mosaic`.
    """
    require_hopper(OP, interpret=interpret)
    if why := refusal(x.shape, x.dtype, weights):
        raise Refusal(f"{OP}: {why}")
    tokens, inner = x.shape
    columns, turns = columns_of(tokens)
    steps, rows = inner // BLOCK, ROWS * (1 if gated else CONSUMERS)
    sizes = tuple(each.shape[-2] for each in weights[: 1 if gated else None])
    tiles = turns * sum(-(-size // rows) for size in sizes)
    config = config or choose(tiles=tiles, steps=steps, columns=columns, gated=gated)
    cut = Fp8LargeBatchLinearConfig(
        parts=config.parts, stages=config.stages, columns=columns, turns=turns, steps=steps,
        sizes=sizes, affine=affine, gated=gated, interpret=interpret,
    )  # fmt: skip
    return launch_blocks(
        Fp8LargeBatchLinearCta, cut, "linear_fp8_many", x, weights, scales, layer=layer,
        x_smem=plgpu.SMEM((cut.stages, columns, BLOCK), x.dtype, transforms=swizzled(x.dtype)),
        w_smem=plgpu.SMEM((cut.stages, CONSUMERS, ROWS, BLOCK), FP8, transforms=SWIZZLED),
        out_dtypes=out_dtypes,
    )  # fmt: skip


def launch_blocks(
    cta: type["Fp8LargeBatchLinearCta"],
    cut: "Fp8LargeBatchLinearConfig",
    name: str,
    x: jax.Array,
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array] | None,
    *,
    layer: jax.Array | int,
    x_smem: Any,
    w_smem: Any,
    copies: int = 1,
    out_dtypes: Sequence[Any],
) -> list[jax.Array]:
    """Returns the results of a kernel whose CTAs are `cta(cut, refs)`.

    Args:
        weights: The weights in the form that the CTAs read.
        x_smem, w_smem: The ring's scratch for tokens and for weights.
        copies: Copies of tokens per step.
    """
    tokens, columns, tiles = x.shape[0], cut.columns, cut.turns * sum(cut.tiles)
    padded, interpret = cut.turns * columns, cut.interpret
    apart = None
    if interpret and cut.parts > 1:  # whose CTAs share no shared memory
        shape = (cut.parts, tiles, CONSUMERS, ROWS * columns)
        apart = jax.new_ref(jnp.zeros(shape, jnp.float32))
    found = launch(
        lambda **refs: cta(cut, Fp8LargeBatchLinearRefs(**refs)).run(),
        name=name,
        grid={"tile": tiles},
        cluster={"part": cut.parts} if cut.parts > 1 else {},
        inputs={
            "x_ref": jnp.pad(x, ((0, padded - tokens), (0, 0))),
            "weights_refs": tuple(weights),
            "scales_refs": None if scales is None else tuple(scales),
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1),
            "cluster_sums_ref": apart,
        },
        outputs={
            "out_refs": tuple(
                jax.ShapeDtypeStruct((padded, size), dtype)
                for size, dtype in zip(cut.sizes, out_dtypes, strict=True)
            )
        },
        scratch={
            "x_smem": x_smem,
            "w_smem": w_smem,
            "sums_smem": plgpu.SMEM((CONSUMERS, ROWS * columns), jnp.float32)
            if cut.summed
            else None,
            "loaded": plgpu.Barrier(num_arrivals=copies + CONSUMERS, num_barriers=cut.stages),
            "read": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=cut.stages),
            "gate_up_barrier": plgpu.Barrier(num_arrivals=CONSUMERS)
            if cut.gated and cut.parts == 1
            else None,
            "cluster_barrier": None
            if apart is None
            else plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=CONSUMERS + 1),
        },
        warpgroups=CONSUMERS + 1,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )["out_refs"]
    return [each[:tokens] for each in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8LargeBatchLinearConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        parts: CTAs that divide the K numbers of a tile.
        stages: Stages of the ring, at least 2.
        columns: Tokens of a CTA.
        turns: CTAs with the same rows and different tokens.
        steps: Steps of K.
        sizes: N of each result.
    """

    parts: int
    stages: int
    columns: int
    turns: int
    steps: int
    sizes: tuple[int, ...]
    affine: tuple[int, int]
    gated: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """The rows of a result per CTA."""
        return ROWS * (1 if self.gated else CONSUMERS)

    @property
    def tiles(self) -> tuple[int, ...]:
        """The tiles of rows of each result."""
        return tuple(-(-size // self.rows) for size in self.sizes)

    @property
    def summed(self) -> bool:
        """Whether sums go through shared memory."""
        return self.gated or self.parts > 1

    @property
    def many_registers(self) -> bool:
        """232 + 232 + 40 = 504, the most that three warpgroups may have."""
        return self.columns > 64

    @property
    def shares(self) -> tuple[int, int, int]:
        """Returns (sharers of a tile's tokens, tokens that one adds up at a time, how often)."""
        sharers, groups = self.parts * (1 + self.gated), self.columns // GROUP
        some = next((n for n in (4, 2) if groups % n == 0 and groups >= sharers * n), 1)
        return sharers, some * GROUP, -(-groups // (sharers * some))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8LargeBatchLinearRefs:
    """The refs of a CTA: operands, then its shared memory and barriers."""

    x_ref: Any  # [turns * columns, K]
    weights_refs: Any
    scales_refs: Any
    layer_ref: Any
    cluster_sums_ref: Any  # the interpreter's, for the sums of a cluster
    out_refs: Any
    x_smem: Any  # [stage, columns, 128]
    w_smem: Any  # [stage, warpgroup, 64, 128]
    sums_smem: Any  # [warpgroup, columns / 8 * 512], see hopper/wgmma_accumulator_storage.py
    loaded: Any  # full barriers
    read: Any  # empty barriers, arrived at by both consumers
    gate_up_barrier: Any  # arrived at by gate's and up's warpgroups
    cluster_barrier: Any  # the interpreter's


class Fp8LargeBatchLinearCta:
    """A CTA that computes its part of K for its rows and tokens."""

    def __init__(self, cut: Fp8LargeBatchLinearConfig, refs: Fp8LargeBatchLinearRefs):
        self.cut, self.refs = cut, refs
        self.wg, self.number = lax.axis_index("wg"), lax.axis_index("tile")
        self.layer = refs.layer_ref[0] * cut.affine[0] + cut.affine[1]
        tile = lax.div(self.number, cut.turns)
        self.token = pl.multiple_of(lax.rem(self.number, cut.turns) * cut.columns, GROUP)
        one = cut.parts == 1
        self.part = jnp.int32(0) if one else cluster_block_index(cut.parts, interpret=cut.interpret)
        self.begin, end = (lax.div((self.part + more) * cut.steps, cut.parts) for more in (0, 1))
        self.mine = end - self.begin
        # For each result, whether the tile is its, and the first row: the last tile ends with N.
        self.places, before = [], 0
        for size, tiles in zip(cut.sizes, cut.tiles, strict=True):
            number = tile - before
            here = (number >= 0) & (number < tiles)
            first = jnp.minimum(number * cut.rows, size - cut.rows)
            self.places.append((here, jnp.where(here, first, 0)))
            before += tiles

    def run(self) -> None:
        pl.when(self.wg == CONSUMERS)(self._load)
        pl.when(self.wg < CONSUMERS)(self._multiply)
        if self.cut.parts > 1:
            self._sync_cluster()  # no CTA exits before the others have read its sums

    def _load(self) -> None:
        """Loads steps of K into the ring, as its stages become free, in the producer warpgroup."""
        cut, refs = self.cut, self.refs
        if cut.many_registers:
            plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, self.mine)
        def _step(s):
            slot = lax.rem(s, cut.stages)
            pl.when(s >= cut.stages)(lambda: plgpu.barrier_wait(refs.read.at[slot]))
            step = self.begin + s

            def of_tile(result: int, first: Any) -> None:
                for half in range(CONSUMERS):
                    matrix, further = (half, 0) if cut.gated else (result, half * ROWS)
                    row = pl.multiple_of(first + further, ROWS)
                    source = self._source(refs.weights_refs[matrix], row, step)
                    to = refs.w_smem.at[slot, half]
                    plgpu.copy_gmem_to_smem(source, to, refs.loaded.at[slot])

            for result, (_, first) in enumerate(self.places):
                self._when_in_result(result, partial(of_tile, result, first))
            self._copy_tokens(slot, step)

        @pl.loop(jnp.maximum(self.mine - cut.stages, 0), self.mine)
        def _drain(s):
            plgpu.barrier_wait(refs.read.at[lax.rem(s, cut.stages)])

        if cut.parts > 1:
            self._sync_cluster()

    def _source(self, weights: Any, row: Any, step: Any) -> Any:
        """Returns 64 rows of a step of K."""
        some = pl.ds(pl.multiple_of(step * BLOCK, BLOCK), BLOCK)
        return weights.at[self.layer, pl.ds(row, ROWS), some]

    def _copy_tokens(self, slot: Any, step: Any) -> None:
        some = pl.ds(pl.multiple_of(step * BLOCK, BLOCK), BLOCK)
        tokens = self.refs.x_ref.at[pl.ds(self.token, self.cut.columns), some]
        plgpu.copy_gmem_to_smem(tokens, self.refs.x_smem.at[slot], self.refs.loaded.at[slot])

    def _multiply(self) -> None:
        """Computes a consumer warpgroup's 64 rows."""
        cut = self.cut
        if cut.many_registers:
            plgpu.set_max_registers(232, action="increase")
        total = self._total()
        if cut.summed:
            self._reduce_and_store(total)
        else:
            self._store(0, total)

    def _total(self) -> jax.Array:
        """Returns the warpgroup's sums over the CTA's steps, [64, columns]."""
        cut, refs = self.cut, self.refs

        def step(s: Any, carry: Any) -> Any:
            total, factor, weights = carry
            slot, following = lax.rem(s, cut.stages), jnp.minimum(s + 1, self.mine - 1)
            scale = self._scale(following)
            one, weights = self._product(slot, weights, following)
            # wgmma has read the loaded numbers. The interpreter does not know this, and needs a
            # fence between a load and the next copy to the same stage.
            if cut.interpret:
                plgpu.commit_smem()
            plgpu.barrier_arrive(refs.read.at[slot])
            return total + one * factor, scale, weights

        plgpu.barrier_wait(refs.loaded.at[0])
        zero = plgpu.layout_cast(jnp.zeros((ROWS, cut.columns), jnp.float32), PRODUCT)
        first = zero, self._scale(jnp.int32(0)), self._weights(0)
        return lax.fori_loop(0, self.mine, step, first)[0]

    def _scale(self, step: Any) -> jax.Array:
        """Returns the scale of the warpgroup's rows."""
        refs, place = self.refs, self.begin + step
        if self.cut.gated:
            row = lax.div(self.places[0][1], BLOCK)
            gate, up = (each[self.layer, row, place] for each in refs.scales_refs)
            return jnp.where(self.wg == 0, gate, up)
        found: Any = None
        for (here, first), scales in zip(self.places, refs.scales_refs, strict=True):
            one = scales[self.layer, lax.div(first + self.wg * ROWS, BLOCK), place]
            found = one if found is None else jnp.where(here, one, found)
        return found

    def _weights(self, slot: Any) -> jax.Array:
        """Returns the warpgroup's weights of a step, `moved`; in the interpreter as stored."""
        tile, dtype = self.refs.w_smem.at[slot, self.wg], self.refs.x_smem.dtype
        if self.cut.interpret:
            return deinterleave_columns(tile[...].astype(jnp.float32)).astype(dtype)
        return moved(tile, dtype)

    def _product(
        self, slot: Any, weights: jax.Array, following: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a step's product, without its scale, and the weights of the following step."""
        cut, tokens = self.cut, self.refs.x_smem.at[slot]

        def next_weights() -> jax.Array:
            other = lax.rem(following, cut.stages)
            wait = partial(plgpu.barrier_wait, self.refs.loaded.at[other])
            pl.when(other != slot)(wait)  # not after the last step
            return self._weights(other)

        if cut.interpret:
            return plain_product(weights, tokens[...]), next_weights()

        def products(acc: Any) -> tuple[jax.Array, jax.Array]:
            plgpu.wgmma(acc, multiplied(weights), tokens.transpose((1, 0)))
            later = next_weights()
            return plgpu.wgmma_accumulator_load(acc, wait_n=0), later

        return pl.run_scoped(products, plgpu.ACC((ROWS, cut.columns), jnp.float32))

    def _reduce_and_store(self, total: jax.Array) -> None:
        """Adds up the sums of a cluster's CTAs, or multiplies gate's by up's; then stores."""
        cut, refs = self.cut, self.refs
        store(
            refs.sums_smem.at[self.wg],
            by_thread(total, interpret=cut.interpret),
            interpret=cut.interpret,
        )
        if refs.cluster_sums_ref is not None:
            refs.cluster_sums_ref[self.part, self.number, self.wg] = refs.sums_smem[self.wg]
        if cut.parts > 1:
            self._sync_cluster()
        else:
            plgpu.barrier_arrive(refs.gate_up_barrier)
            plgpu.barrier_wait(refs.gate_up_barrier)
        sharers, some, often = cut.shares
        mine = self.part * (1 + cut.gated) + (self.wg if cut.gated else 0)
        for turn in range(often):
            first = pl.multiple_of((turn * sharers + mine) * some, GROUP)
            one = partial(self._reduce_tokens, first, some)
            if (turn + 1) * sharers * some > cut.columns:
                pl.when(first < cut.columns)(one)
            else:
                one()

    def _reduce_tokens(self, first: Any, num_tokens: int) -> None:
        """Adds up and stores the sums of some tokens."""
        if not self.cut.gated:
            y = self._reduce_split_k(self.wg, first, num_tokens)
        else:
            gate, up = (self._reduce_split_k(half, first, num_tokens) for half in range(CONSUMERS))
            y = gate / (1.0 + jnp.exp(-gate)) * up
        self._store(first, product_of(y, interpret=self.cut.interpret))

    def _reduce_split_k(self, half: Any, first: Any, num_tokens: int) -> jax.Array:
        cut, refs = self.cut, self.refs
        begin, found = pl.multiple_of(first * ROWS, NUMBERS), []
        for other in range(cut.parts):
            if cut.parts > 1 and refs.cluster_sums_ref is None:
                found.append(load_of_block(refs.sums_smem.at[half], begin, num_tokens, other))
                continue
            source = refs.sums_smem.at[half]
            if refs.cluster_sums_ref is not None:
                source = refs.cluster_sums_ref.at[other, self.number, half]
            numbers = source.at[pl.ds(begin, num_tokens * ROWS)]
            found.append(plgpu.load(numbers, layout=threads(num_tokens), optimized=False))
        return sum(found[1:], found[0])

    def _store(self, column: Any, y: jax.Array) -> None:
        """Stores sums [64, tokens] to the results, from one of the CTA's tokens on."""
        tokens = pl.ds(self.token + column, y.shape[1])
        further = 0 if self.cut.gated else self.wg * ROWS

        def to(out: Any, first: Any) -> None:
            rows = pl.ds(first + further, ROWS)
            store_transposed(
                out.at[tokens, rows], y.astype(out.dtype), interpret=self.cut.interpret
            )

        for result, (_, first) in enumerate(self.places):
            self._when_in_result(result, partial(to, self.refs.out_refs[result], first))

    def _sync_cluster(self) -> None:
        cluster_barrier(self.refs.cluster_barrier, interpret=self.cut.interpret)

    def _when_in_result(self, result: int, function: Any) -> None:
        """Runs `function` if the tile is the result's."""
        if len(self.places) == 1:
            function()
        else:
            pl.when(self.places[result][0])(function)
