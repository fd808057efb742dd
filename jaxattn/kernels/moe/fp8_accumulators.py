"""Accumulators over K with FP8 weights, for `GroupedGemmCta` (grouped_gemm.py).

Each step's product, of 128 of K, has a scale, which multiplies it as it is added to the sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.fp8_conversion import plain_product, widened
from jaxattn.kernels.moe.routing.token_alignment import GroupedGemmTile
from jaxattn.kernels.moe.tile_config import BLOCK, ROWS

PRODUCT = plgpu.Layout.WGMMA


class ScaledAccumulators:
    """The accumulators of a `GroupedGemmCta` with FP8 weights; each scale is loaded a step
    ahead."""

    def __init__(self, block: Any):  # a `GroupedGemmCta`
        self.block = block

    def __call__(self, work_tile: GroupedGemmTile, done: jax.Array) -> list[jax.Array]:
        block, cut, refs = self.block, self.block.cut, self.block.refs
        split = cut.product.split
        parts: Any = [block.wg] if split else range(cut.product.parts)
        first = work_tile.piece_index * cut.piece + (0 if split else block.wg) * ROWS
        scale_rows = [
            lax.div(first + (0 if cut.gated else part * cut.part_stride), BLOCK)
            + (part * (refs.scales.shape[2] // 2) if cut.gated else 0)
            for part in parts
        ]

        def scales(s: Any) -> list[jax.Array]:
            s = jnp.minimum(s, cut.steps - 1)
            return [refs.scales[block.layer, work_tile.expert, rows, s] for rows in scale_rows]

        def step(s, carry):
            totals, factors = carry
            slot, tokens_t = block.arrived(done + s)
            following = scales(s + 1)
            step_products = self._products(slot, tokens_t)
            # wgmma has read the loaded numbers. The interpreter does not know this, and needs a
            # fence between a load and the next copy to the same stage.
            if cut.interpret:
                plgpu.commit_smem()
            plgpu.barrier_arrive(refs.read.at[slot])
            totals = [
                total + product * factor
                for total, product, factor in zip(totals, step_products, factors, strict=True)
            ]
            return totals, following

        zero = plgpu.layout_cast(jnp.zeros((ROWS, cut.columns), jnp.float32), PRODUCT)
        return lax.fori_loop(0, cut.steps, step, ([zero] * len(parts), scales(0)))[0]

    def _products(self, slot: jax.Array, tokens_t: Any) -> list[jax.Array]:
        """Returns a step's product for each of the warpgroup's parts, without its scale."""
        block, refs, product = self.block, self.block.refs, self.block.cut.product
        # (part, its group of 64 rows)
        part_groups: list[Any] = [(part, block.wg) for part in range(product.parts)]
        if product.split:
            part_groups = [(block.wg, 0)]
        if block.cut.interpret:
            tokens = refs.tokens_smem[slot, 0]
            return [
                plain_product(refs.weights_smem[slot, part, rows], tokens)
                for part, rows in part_groups
            ]

        def products(*accs: Any) -> list[jax.Array]:
            for (part, rows), acc in zip(part_groups, accs, strict=True):
                tile = refs.weights_smem.at[slot, part, rows]
                plgpu.wgmma(acc, widened(tile, refs.tokens.dtype), tokens_t)
            return [
                plgpu.wgmma_accumulator_load(acc, wait_n=len(part_groups) - 1 - index)
                for index, acc in enumerate(accs)
            ]

        return pl.run_scoped(products, *block.accumulators[: len(part_groups)])
