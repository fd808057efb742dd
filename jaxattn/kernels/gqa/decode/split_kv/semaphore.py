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
        broadcast_smem: float32 [w, ..] in shared memory; one thread broadcasts through the first
            number of each warpgroup.
    """

    counts: Any
    broadcast_smem: Any

    def count(self, pair: jax.Array, num_pieces: jax.Array) -> None:
        """Counts one more of a pair's pieces. One warpgroup calls it, after a barrier of all.

        One thread's release covers what each thread had written before the barrier. After the next
        barrier, each thread reads what this thread has acquired. A fence in each thread would wait
        twice more.
        """
        count = plgpu.inline_mgpu(arg_types=(PLAIN, PLAIN, SPLAT, SPLAT))(self._count)
        count(self.counts, self.broadcast_smem, jnp.int32(pair), jnp.int32(num_pieces))

    def last(self, wg: jax.Array) -> jax.Array:
        """Whether that piece was the last one; called after the warpgroups' next barrier."""
        return self.broadcast_smem[wg, 0] == 0

    def _count(
        self, ctx: Any, counts: Any, broadcast_smem: Any, pair: Any, num_pieces: Any
    ) -> None:
        del ctx
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            counter = pointer(counts, arith.muli(single(pair), word(4)))
            last = plus(single(num_pieces), word(-1))
            # The counter wraps to 0 after the last piece.
            count = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
            (number,) = asm(count, [i32()], [counter, last], "=r,l,r,~{memory}")
            num_missing = arith.sitofp(f32(), arith.subi(last, number))
            warpgroups, stride = ir.MemRefType(broadcast_smem.type).shape
            for i in range(warpgroups):
                llvm.store(num_missing, pointer(broadcast_smem, word(4 * i * stride)))
