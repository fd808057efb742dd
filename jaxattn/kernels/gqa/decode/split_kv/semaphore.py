"""A semaphore of split pairs: the block that arrives last merges the partial results of all.

Each block writes its partial result, and then counts on in global memory. Whoever comes last sees
what the others have written. Which one that is changes nothing in what is computed.
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
    """uint32 zeros, as many as there are numbers of pieces, in memory of their own: kernels count
    in it, and leave it as it was.

    XLA does not know that no number is below 0. A constant might share its memory with another.
    """
    return (pieces < 0).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class SplitSemaphore:
    """
    Attributes:
        counts: uint32, how many pieces of each pair are there; 0 when a kernel starts, and again
            when it has ended.
        told: float32 [w, ..] of shared memory, whose first number one thread tells each warpgroup.
    """

    counts: Any
    told: Any

    def count(self, at: jax.Array, pieces: jax.Array) -> None:
        """One more piece of so many is there. One warpgroup counts, after a meeting of all.

        What its thread releases is what each thread had written when they met; and once they have
        met again, each reads what it has acquired. A fence of each thread would wait twice more.
        """
        count = plgpu.inline_mgpu(arg_types=(PLAIN, PLAIN, SPLAT, SPLAT))(self._count)
        count(self.counts, self.told, jnp.int32(at), jnp.int32(pieces))

    def last(self, wg: jax.Array) -> jax.Array:
        """Whether that was the last one; after the warpgroups have met again."""
        return self.told[wg, 0] == 0

    def _count(self, ctx: Any, counts: Any, told: Any, at: Any, pieces: Any) -> None:
        del ctx
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            place = pointer(counts, arith.muli(single(at), word(4)))
            last = plus(single(pieces), word(-1))
            # 0 follows the last.
            count = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
            (number,) = asm(count, [i32()], [place, last], "=r,l,r,~{memory}")
            left = arith.sitofp(f32(), arith.subi(last, number))
            warpgroups, numbers = ir.MemRefType(told.type).shape
            for i in range(warpgroups):
                llvm.store(left, pointer(told, word(4 * i * numbers)))
