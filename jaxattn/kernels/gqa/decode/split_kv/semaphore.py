"""A semaphore of split pairs: the CTA that arrives last merges the partial results of all.

Each CTA writes its partial result, and then increments a counter in global memory. The last CTA to
arrive sees what the others have written. Which CTA is last does not change the results.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, llvm, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, asm, f32, i32, plus, pointer, single, word

SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()


def zero_counts(pieces: jax.Array) -> jax.Array:
    """Returns uint32 zeros, one per entry of `pieces`, in memory of their own: kernels count in it,
    and leave it as it was.

    XLA does not know that no entry is below 0. A constant might share its memory with another.
    """
    return (pieces < 0).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class SplitSemaphore:
    """The arrival counters of split pairs.

    Attributes:
        counts: uint32, the pieces of each pair that have arrived; 0 when a kernel starts, and again
            when it has ended.
        told: float32 [w, ..] in shared memory; one thread broadcasts through the first number of
            each warpgroup.
    """

    counts: Any
    told: Any

    def count(self, at: jax.Array, pieces: jax.Array) -> None:
        """Counts one more of `pieces` pieces. One warpgroup calls it, after a barrier of all.

        One thread's release covers what each thread had written before the barrier. After the next
        barrier, each thread reads what this thread has acquired. A fence in each thread would wait
        twice more.
        """
        count = plgpu.inline_mgpu(arg_types=(PLAIN, PLAIN, SPLAT, SPLAT))(self._count)
        count(self.counts, self.told, jnp.int32(at), jnp.int32(pieces))

    def last(self, wg: jax.Array) -> jax.Array:
        """Whether that piece was the last one; called after the warpgroups' next barrier."""
        return self.told[wg, 0] == 0

    def _count(self, ctx: Any, counts: Any, told: Any, at: Any, pieces: Any) -> None:
        del ctx
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            place = pointer(counts, arith.muli(single(at), word(4)))
            last = plus(single(pieces), word(-1))
            # The counter wraps to 0 after the last piece.
            count = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
            (number,) = asm(count, [i32()], [place, last], "=r,l,r,~{memory}")
            left = arith.sitofp(f32(), arith.subi(last, number))
            warpgroups, numbers = ir.MemRefType(told.type).shape
            for i in range(warpgroups):
                llvm.store(left, pointer(told, word(4 * i * numbers)))
