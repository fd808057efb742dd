"""Products of up to 256 tokens with 4-bit matrices of a layer.

CTAs are those of fp8_medium_batch_linear.py: 128 rows of one matrix, or 64 of gate and 64 of up,
with two consumer warpgroups and one that copies. Those of a cluster divide the K numbers. Weights
are stored in tiles with their scales, which a warpgroup widens in registers
(hopper/four_bit_mainloop.py).

Limits: 256 tokens; N a multiple of 64 and at least 128, K whole tiles; bfloat16, and float16 where
scales are not bfloat16.
Reference: `jaxattn.ops.linear.four_bit_linear` (implementation="xla"). Tests:
tests/kernels/linear/test_four_bit_linear.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.dispatch import Refusal
from jaxattn.core.numerics.four_bit_tiles import ROWS, FourBitFormat
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.four_bit_dequantization import LINE, serves
from jaxattn.kernels.hopper.four_bit_mainloop import FourBitMainloop, lines_of_step
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.linear.fp8_medium_batch_linear import (
    CONSUMERS,
    MOST_TOKENS,
    Fp8LargeBatchLinearConfig,
    Fp8LargeBatchLinearCta,
    columns_of,
    divided,
    launch_blocks,
)
from jaxattn.kernels.linear.linear import LinearTileConfig

OP = "linear_four_bit_layer"
DEPTH = 128  # numbers of K per step, if K is a multiple of it
MOST_STAGES = 12
LEAST_ROWS = CONSUMERS * ROWS


def depth_of(form: FourBitFormat, inner: int) -> int:
    """Returns the numbers of K per step."""
    return DEPTH if inner % DEPTH == 0 else form.columns


def choose(
    form: FourBitFormat, *, tiles: int, inner: int, columns: int, gated: bool
) -> LinearTileConfig:
    """Returns the parts of K with which the last CTA ends first, by count of steps."""
    depth = depth_of(form, inner)
    stage = CONSUMERS * lines_of_step(form, depth) * LINE + columns * depth * 2
    return divided(
        stage, MOST_STAGES, tiles=tiles, steps=inner // depth, columns=columns, gated=gated
    )


def refusal(
    x: tuple[int, ...], dtype: Any, weights: Sequence[jax.Array], form: FourBitFormat
) -> str | None:
    """Returns why the kernel does not serve x [T, K] of this dtype and stacks of tiles, or None."""
    if not 0 < x[0] <= MOST_TOKENS:
        return f"the kernel supports 1 to {MOST_TOKENS} tokens; got x {x}"
    if not serves(form, dtype):
        return (
            "the kernel needs x in bfloat16, or in float16 if the scales are not bfloat16; got x "
            f"{jnp.dtype(dtype).name} and {form}"
        )
    rows = [form.matrix(each.shape)[0] for each in weights]
    if min(rows) < LEAST_ROWS:
        return f"the kernel needs matrices with at least {LEAST_ROWS} rows; got {rows}"
    return None


def linears_four_bit_mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    form: FourBitFormat,
    layer: jax.Array | int,
    affine: tuple[int, int] = (1, 0),
    out_dtypes: Sequence[Any],
    gated: bool = False,
    config: LinearTileConfig | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Returns `x @ weight[layer].T` for each stack of tiles, or silu of the first's times the
    second's.

    Args:
        x: [T, K].
        weights: Stacks of tiles, uint8 [L, N / 64, K / C, bytes].
        layer: The layer is `affine[0] * layer + affine[1]`.
    """
    require_hopper(OP, interpret=interpret)
    if why := refusal(x.shape, x.dtype, weights, form):
        raise Refusal(f"{OP}: {why}")
    tokens, inner = x.shape
    columns, turns = columns_of(tokens)
    depth, rows = depth_of(form, inner), ROWS * (1 if gated else CONSUMERS)
    sizes = tuple(form.matrix(each.shape)[0] for each in weights[: 1 if gated else None])
    tiles = turns * sum(-(-size // rows) for size in sizes)
    config = config or choose(form, tiles=tiles, inner=inner, columns=columns, gated=gated)
    cut = FourBitLinearConfig(
        parts=config.parts, stages=config.stages, columns=columns, turns=turns,
        steps=inner // depth, sizes=sizes, affine=affine, gated=gated, interpret=interpret,
        form=form, depth=depth,
    )  # fmt: skip
    pieces = depth // form.columns
    of_tokens = (cut.stages, pieces, columns, form.columns)
    of_weights = (cut.stages, CONSUMERS, lines_of_step(form, depth), LINE)
    return launch_blocks(
        FourBitLinearCta, cut, "linear_four_bit", x,
        [each.reshape(*each.shape[:2], -1, LINE) for each in weights], None, layer=layer,
        x_smem=plgpu.SMEM(of_tokens, x.dtype, transforms=swizzled(x.dtype)),
        w_smem=plgpu.SMEM(of_weights, jnp.uint8), copies=pieces,
        out_dtypes=out_dtypes,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class FourBitLinearConfig(Fp8LargeBatchLinearConfig):
    """The static properties of a launch, known when it is traced.

    Attributes:
        form: The format of the weights.
        depth: Numbers of K per step.
    """

    form: FourBitFormat
    depth: int


class FourBitLinearCta(Fp8LargeBatchLinearCta):
    """A CTA that computes its part of K for its rows and tokens, with weights in tiles."""

    cut: FourBitLinearConfig

    def _source(self, weights: Any, row: Any, step: Any) -> Any:
        count = lines_of_step(self.cut.form, self.cut.depth)
        return weights.at[self.layer, lax.div(row, ROWS), pl.ds(step * count, count)]

    def _copy_tokens(self, slot: Any, step: Any) -> None:
        cut, refs, size = self.cut, self.refs, self.cut.form.columns
        for piece in range(cut.depth // size):
            some = pl.ds(pl.multiple_of(step * cut.depth + piece * size, size), size)
            tokens = refs.x_ref.at[pl.ds(self.token, cut.columns), some]
            plgpu.copy_gmem_to_smem(tokens, refs.x_smem.at[slot, piece], refs.loaded.at[slot])

    def _total(self) -> jax.Array:
        cut, refs = self.cut, self.refs

        def arrived(step: Any) -> Any:
            slot = lax.rem(step, cut.stages)
            plgpu.barrier_wait(refs.loaded.at[slot])
            return slot

        sums = FourBitMainloop(
            form=cut.form, dtype=refs.x_smem.dtype, columns=cut.columns, arrived=arrived,
            tiles=lambda slot: [refs.w_smem.at[slot, self.wg]], tokens=refs.x_smem,
            read=refs.read, interpret=cut.interpret,
        )  # fmt: skip
        return sums(self.mine, 0)[0]
