"""Sums over vectors with one element per thread, without a barrier of their own.

Each warp adds up its elements and stores the sum. If the warps synchronize anyway, for example for
the vectors themselves, every thread then adds up only the warps' sums, not the vectors.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, mgpu, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, element, f32, load, store, times, tree, word
from jaxattn.kernels.hopper.reduce.cluster_reduction import WARPS


class BlockReduction:
    """The sums of `count` vectors [128] of one warpgroup, used once.

    Args:
        layout: The layout of the vectors, one element per thread.
    """

    def __init__(self, count: int, layout: Any, *, interpret: bool) -> None:
        self.count, self.layout, self.interpret = count, layout, interpret

    def scratch_type(self) -> Any:
        return plgpu.SMEM((self.count * WARPS,), jnp.float32)

    def put(self, scratch: Any, vectors: list[jax.Array]) -> None:
        """Stores the warps' sums; called before the warps synchronize."""
        if self.interpret:
            for i, x in enumerate(vectors):
                scratch[i * WARPS] = jnp.sum(x)
            return
        types = (plgpu.RefType(), *[self.layout] * self.count)
        plgpu.inline_mgpu(arg_types=types)(self._put)(scratch, *vectors)

    def _put(self, ctx: Any, scratch: Any, *vectors: Any) -> None:
        del ctx
        totals = [element(x.registers.item(), 0) for x in vectors]
        for distance in (1, 2, 4, 8, 16):  # interleaved: a shuffle takes as long as 20 additions
            others = [utils.shfl_bfly(total, distance) for total in totals]
            totals = [arith.addf(x, y) for x, y in zip(totals, others, strict=True)]
        thread, lane = WarpgroupThread(), arith.andi(utils.thread_idx(), word(31))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, word(0))):
            for i, total in enumerate(totals):
                store(total, scratch, times(thread.warp, 4), 4 * WARPS * i)

    def get(self, scratch: Any) -> list[jax.Array]:
        """Returns the sums; called after the warps have synchronized."""
        if self.interpret:
            return [scratch[i * WARPS] for i in range(self.count)]
        number = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)
        get = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[number] * self.count)
        return get(self._get)(scratch)

    def _get(self, ctx: Any, scratch: Any) -> list[Any]:
        del ctx
        each = (load(scratch, word(0), 4 * WARPS * i, WARPS, f32()) for i in range(self.count))
        return [mgpu.FragmentedArray.splat(tree(arith.addf, shares), ()) for shares in each]
