"""Products of a few tokens with FP8 matrices of a layer; each block of weights has a scale.

    y^T [128, T] = sum over steps of K    scale * (W x^T)      W [128, 128] of a matrix [N, K]

The tiling, the cluster's sums and the store are those of `linear_layer` (cta.py). Matrices have the
layout of checkpoints, [N, K], with K in pairs (`interleave_columns`): four contiguous bytes become
two operand registers of wgmma (hopper/fp8_conversion.py). A step is as deep as a block of scales.
Its product is finished before it is multiplied by the scale and added, in float32.

Limits: 32 tokens (fp8_medium_batch_linear.py serves more); K a multiple of 128; N a multiple of 64,
at least 128; tokens in bfloat16 or float16. With a norm before it (reduce/rms_norm_prologue.py):
one token. There are no heads.
Reference: `jaxattn.ops.linear.fp8_linear` (implementation="xla"). Tests:
tests/kernels/linear/test_fp8_linear.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.core.numerics.fp8_block_scaling import BLOCK, block_counts
from jaxattn.core.numerics.fp8_weight_layout import deinterleave_columns
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import NUM_SMS, require_hopper
from jaxattn.kernels.hopper.fp8_conversion import ROWS as HALF
from jaxattn.kernels.hopper.fp8_conversion import SWIZZLED, plain_product, widened
from jaxattn.kernels.hopper.instructions import swizzled, warpgroup_barrier
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import STEP, RmsNormPrologueParams, smem
from jaxattn.kernels.hopper.reduce.rms_norm_prologue import refusal as refusal_of_norm
from jaxattn.kernels.hopper.store.transposed_store import store_transposed
from jaxattn.kernels.linear.cta import ROWS, LinearConfig, LinearCta, LinearRefs
from jaxattn.kernels.linear.linear import (
    MOST_PARTS,
    MOST_SUMMED,
    MOST_TOKENS,
    LinearTileConfig,
    Shaped,
)

OP = "linear_fp8_layer"
FP8 = jnp.float8_e4m3fn
HALVES = ROWS // HALF


def choose(
    *, tiles: int, steps: int, columns: int, gated: bool, normed: bool = False
) -> LinearTileConfig:
    """Returns the fewest parts with which all multiprocessors have a CTA, or two with up to 8
    tokens.

    Parts are a power of two, unless a norm of K needs other ones. If several CTAs share a
    multiprocessor, each has two copies in flight, otherwise four. In a sweep of Qwen3-Next's shapes
    on an H200, with 1 and 32 tokens, these were the fastest or within 3% of them.
    """
    parts, least = 1, (2 if columns == 8 else 1) * NUM_SMS
    while parts < MOST_PARTS and tiles * parts < least and steps >= 4 * parts:
        parts *= 2
    if normed:
        others = (*range(parts, MOST_PARTS + 1), *range(parts - 1, 0, -1))
        parts = next((each for each in others if not refusal_of_norm(1, 2 * steps, each)), parts)
    stages = 2 if tiles * parts > NUM_SMS or gated else 4
    return LinearTileConfig(parts=parts, stages=max(2, min(stages, steps // parts)))


def refusal(x: tuple[int, ...], dtype: Any, weights: Sequence[Shaped]) -> str | None:
    """Returns why the kernel does not serve x [T, K] of this dtype, or None."""
    tokens, inner = x
    if not 0 < tokens <= MOST_TOKENS:
        return f"the kernel supports 1 to {MOST_TOKENS} tokens; got x {x}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel needs x in bfloat16 or float16; got {jnp.dtype(dtype).name}"
    for weight in weights:
        size = weight.shape[-2]
        if inner % BLOCK or size < ROWS or size % HALF:
            return (
                f"the kernel needs K a multiple of {BLOCK}, and N a multiple of {HALF} and at "
                f"least {ROWS}; got weights {weight.shape}"
            )
    return None


def refusal_with_norm(inner: int, weights: Sequence[Shaped]) -> str | None:
    """Returns why one launch cannot compute a norm of K numbers and these products; None if it
    can."""
    if why := refusal((1, inner), jnp.bfloat16, weights):
        return why
    return refusal_of_norm(1, inner // STEP, _with_norm(inner, weights).parts)


def sums_parts(weights: Sequence[Shaped], rows: int) -> bool:
    """Whether the launch should sum up `rows` rows, see `sums_parts` of linear/linear.py."""
    inner = weights[0].shape[-1]
    return rows * (inner // (_with_norm(inner, weights).parts * ROWS)) <= MOST_SUMMED


def _with_norm(inner: int, weights: Sequence[Shaped]) -> LinearTileConfig:
    tiles = sum(block_counts(*(each.shape[-2] for each in weights)))
    return choose(tiles=tiles, steps=inner // BLOCK, columns=8, gated=False, normed=True)


def linears_fp8_mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    *,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    out_dtypes: Sequence[Any],
    gated: bool = False,
    norm: RmsNormPrologueParams | None = None,
    config: LinearTileConfig | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns `x @ weight[layer].T` for each stack of weights, or silu of the first's times the
    second's.

    Args:
        x: bfloat16 or float16 [T, K].
        weights: float8_e4m3fn [L, N, K] each, K in pairs; with `gated`, two of one shape.
        scales: float32 [L, ceil(N / 128), K / 128] each.
        affine: (a, b), for the layer `a * layer + b`.
        out_dtypes: The dtypes of the results [T, N].
        norm: The norm of x + added, which comes before the products, in bfloat16. x is then float32
            [1, K]. After the products the list has x + added, float32 [1, K]. With `norm.gives` it
            also has the normed token.
    """
    require_hopper(OP, interpret=interpret)
    dtype = x.dtype if norm is None else jnp.bfloat16
    if why := refusal(x.shape, dtype, weights):
        raise Refusal(f"{OP}: {why}")
    tokens, inner = x.shape
    columns, steps, many = -(-tokens // 8) * 8, inner // BLOCK, 1 + gated
    sizes = [each.shape[-2] for each in weights][: 1 if gated else None]
    tiles = sum(block_counts(*sizes))
    config = config or choose(
        tiles=tiles, steps=steps, columns=columns, gated=gated, normed=norm is not None
    )
    parts, stages = config.parts, config.stages
    if norm is not None and (why := refusal_of_norm(tokens, 2 * steps, parts)):
        raise Refusal(f"{OP}: {why}")
    cut = LinearConfig(
        parts=parts, stages=stages, tokens=tokens, columns=columns, steps=steps,
        sizes=tuple(sizes), affine=affine, gated=gated, heads=1, split=False, num_rotated_dims=0,
        interpret=interpret,
    )  # fmt: skip
    apart = None
    if interpret and parts > 1:  # whose CTAs share no shared memory
        apart = jnp.zeros((parts, tiles, many, columns, ROWS), jnp.float32)
    # TMA steps in the shared memory's tiles of 8 rows, and reads zeros past x's end.
    if norm is None and (interpret or (tokens > 8 and tokens % 8)):
        x = jnp.pad(x, ((0, columns - tokens), (0, 0)))
    norms = None if norm is None else norm.constants
    out = launch(
        lambda **refs: Fp8LinearCta(cut, None, norms, LinearRefs(**refs)).run(),
        name=OP,
        grid={"tile": tiles},
        cluster={"part": parts} if parts > 1 else {},
        inputs={
            "x_ref": x,
            "weights_refs": tuple(weights),
            "scales_refs": tuple(scales),
            "layer_ref": jnp.asarray(layer, jnp.int32).reshape(1),
            "cluster_sums_ref": None if apart is None else jax.new_ref(apart),
            "angles_ref": None,
            **({} if norm is None else norm.operands),
        },
        outputs={
            "out_refs": tuple(
                jax.ShapeDtypeStruct((tokens, size), dtype)
                for size, dtype in zip(sizes, out_dtypes, strict=True)
            ),
            "total_ref": None if norm is None else jax.ShapeDtypeStruct(x.shape, jnp.float32),
            "normed_ref": jax.ShapeDtypeStruct(x.shape, dtype) if norm and norm.gives else None,
        },
        scratch={
            "x_smem": plgpu.SMEM((stages, columns, BLOCK), dtype, transforms=swizzled(dtype))
            if norm is None
            else smem(2 * steps // parts, dtype, interpret=interpret),
            "w_smem": plgpu.SMEM((stages, many, HALVES, HALF, BLOCK), FP8, transforms=SWIZZLED),
            "sums_smem": plgpu.SMEM((many, columns, ROWS), jnp.float32),
            "turn_smem": None,
            "loaded": plgpu.Barrier(
                num_arrivals=(norm is None) + many * HALVES, num_barriers=stages
            ),
            "cluster_barrier": None
            if apart is None
            else plgpu.ClusterBarrier(collective_axes=("part",)),
        },
        warpgroups=1 if norm is None else None,  # reductions over a warpgroup need no such axis
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    return [*out["out_refs"], *(out[each] for each in ("total_ref", "normed_ref") if each in out)]


class Fp8LinearCta(LinearCta):
    """The CTA of `linear_layer`, with steps of 128 of K, whose products have scales."""

    depth = BLOCK

    def _load(self, step: Any) -> None:
        cut, refs = self.cut, self.refs
        slot = lax.rem(step, cut.stages)
        some = pl.ds(pl.multiple_of((self.begin + step) * BLOCK, BLOCK), BLOCK)
        there = refs.loaded.at[slot]
        if not self.norm:
            tokens = refs.x_ref.at[pl.ds(self.zero, cut.columns), some]
            plgpu.copy_gmem_to_smem(tokens, refs.x_smem.at[slot], there)

        def of_matrix(matrix: int, place: int, first: Any) -> None:
            for half in range(HALVES):
                row = pl.multiple_of(first + half * HALF, HALF)
                source = refs.weights_refs[matrix].at[self.layer, pl.ds(row, HALF), some]
                plgpu.copy_gmem_to_smem(source, refs.w_smem.at[slot, place, half], there)

        for result, (_, first) in enumerate(self.places):
            self._when_in_result(result, partial(of_matrix, result, 0, first))
            if cut.gated:
                of_matrix(1, 1, first)

    def _reduce_and_store(self) -> None:
        cut, refs = self.cut, self.refs
        shape, many = (HALF, cut.columns), HALVES * (1 + cut.gated)
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

        def step(s: Any, carry: Any) -> Any:
            totals, factors = carry
            slot = lax.rem(s, cut.stages)
            plgpu.barrier_wait(refs.loaded.at[slot])
            following = self._scales(jnp.minimum(s + 1, self.mine - 1))
            every = self._products(s, slot)

            @pl.when(s + cut.stages < self.mine)
            def _reload():
                warpgroup_barrier(interpret=cut.interpret)  # all four warps have read the stage
                self._load(s + cut.stages)

            sums = zip(totals, every, factors, strict=True)
            return [total + one * factor for total, one, factor in sums], following

        carry = ([zero] * many, self._scales(jnp.int32(0)))
        totals, _ = lax.fori_loop(0, self.mine, step, carry)
        for number, total in enumerate(totals):
            place, half = divmod(number, HALVES)
            some = pl.ds(half * HALF, HALF)
            target = refs.sums_smem.at[place, pl.ds(0, cut.columns), some]
            store_transposed(target, total, interpret=cut.interpret)

    def _scales(self, step: Any) -> list[jax.Array]:
        """Returns the scale of each 64 rows of each matrix: those of the tile's result, or of gate
        and up."""
        cut, refs = self.cut, self.refs
        found: list[jax.Array] = []
        for place in range(1 + cut.gated):
            for half in range(HALVES):
                scale: Any = None
                for result, (number, first) in enumerate(self.places):
                    scales = refs.scales_refs[place if cut.gated else result]
                    here = (number >= 0) & (number < cut.tiles[result])
                    row = lax.div(jnp.where(here, first, 0) + half * HALF, BLOCK)
                    one = scales[self.layer, row, self.begin + step]
                    scale = one if scale is None else jnp.where(here, one, scale)
                found.append(scale)
        return found

    def _products(self, step: Any, slot: Any) -> list[jax.Array]:
        """Returns a step's products for each 64 rows, without their scales.

        Up's weights are widened after gate's products: both would not fit in the registers.
        """
        return [
            y
            for place in range(1 + self.cut.gated)
            for y in self._multiply_matrix(step, slot, place)
        ]

    def _multiply_matrix(self, step: Any, slot: Any, place: int) -> list[jax.Array]:
        cut = self.cut
        tiles = [self.refs.w_smem.at[slot, place, half] for half in range(HALVES)]
        tokens = self._tokens(step, slot)
        if cut.interpret:
            row = jnp.concatenate([each[...] for each in tokens], axis=-1)
            return [
                plain_product(deinterleave_columns(tile[...].astype(jnp.float32)), row)
                for tile in tiles
            ]
        width = BLOCK // len(tokens)

        def products(*accs: Any) -> list[jax.Array]:
            for tile, acc in zip(tiles, accs, strict=True):
                for number, some in enumerate(tokens):
                    weights = widened(tile, some.dtype, number * width, width, paired=True)
                    plgpu.wgmma(acc, weights, some.transpose((1, 0)))
            last = len(tokens) * (HALVES - 1)
            return [
                plgpu.wgmma_accumulator_load(acc, wait_n=last - len(tokens) * half)
                for half, acc in enumerate(accs)
            ]

        accumulators = [plgpu.ACC((HALF, cut.columns), jnp.float32)] * HALVES
        return pl.run_scoped(products, *accumulators)

    def _tokens(self, step: Any, slot: Any) -> list[Any]:
        """Returns a step's tokens, [columns, 128]; with a norm two of [8, 64]."""
        if not self.norm:
            return [self.refs.x_smem.at[slot]]
        many = BLOCK // STEP
        return [self.norm.operand.at[many * step + number] for number in range(many)]
