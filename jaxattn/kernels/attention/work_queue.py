"""A queue of tiles for persistent CTAs: each CTA draws one item after another as it gets free.

A CTA's first item is its own index. For every further item one warpgroup increments a counter in
global memory, long before the others need it, and passes the number on in shared memory. The next
item's copies are thus in flight while the last item ends, and items may differ in length. The
assignment of items to CTAs does not change the results.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, llvm, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, asm, i32, plus, pointer, word

POSTED = 2  # item numbers in shared memory at a time


def scratch(readers: int) -> list[Any]:
    """Returns the scratch of a `WorkQueue` whose items one warpgroup draws and `readers` warpgroups
    take."""
    return [
        plgpu.SMEM((POSTED,), jnp.int32),
        plgpu.Barrier(num_arrivals=1, num_barriers=POSTED),  # posted
        plgpu.Barrier(num_arrivals=readers, num_barriers=POSTED),  # taken
    ]


class WorkQueue:
    """The items of a CTA.

    Args:
        drawn: int32 or uint32 [1] in global memory, the number of items drawn so far: 0 when the
            kernel starts, and again when it has ended.
        refs: The refs of `scratch`.
        first, blocks, items: The index of the CTA, and the numbers of CTAs and items.
        in_order: Whether a CTA's first item is drawn as well. Then only running CTAs have items,
            and no item waits for an earlier one of a CTA that has not started.
    """

    def __init__(
        self,
        drawn: Any,
        refs: Any,
        first: Any,
        *,
        blocks: int,
        items: int,
        in_order: bool = False,
        interpret: bool,
    ):
        self.drawn, (self.smem, self.posted, self.taken) = drawn, refs
        self.first, self.blocks, self.items, self.interpret = first, blocks, items, interpret
        self.in_order = in_order

    def each(self, draws: bool, do: Any, carry: Any) -> Any:
        """Runs carry = do(item, carry) for each item; one warpgroup draws items, the others take
        them."""

        def step(state: Any) -> Any:
            item, turn, carry = state
            carry = do(item, carry)
            at = lax.rem(turn, jnp.int32(POSTED))
            item = self._draw(item + self.blocks, turn, at) if draws else self._take(at)
            return item, turn + 1, carry

        item = self.first
        if self.in_order:
            item = self._draw(item, jnp.int32(0), 0) if draws else self._take(0)
        state = (item, jnp.int32(self.in_order), carry)
        _, turns, carry = lax.while_loop(lambda state: state[0] < self.items, step, state)
        if draws:
            # A thread that waits on a barrier must observe each of its completions.
            @pl.loop(jnp.maximum(turns - POSTED, 0), turns)
            def _(turn: jax.Array) -> None:
                plgpu.barrier_wait(self.taken.at[lax.rem(turn, jnp.int32(POSTED))])

        return carry

    def _take(self, at: Any) -> jax.Array:
        plgpu.barrier_wait(self.posted.at[at])
        item = self.smem[at]
        plgpu.barrier_arrive(self.taken.at[at])
        return item

    def _draw(self, plain_item: Any, turn: Any, at: Any) -> jax.Array:
        pl.when(turn >= POSTED)(lambda: plgpu.barrier_wait(self.taken.at[at]))
        if self.interpret:  # the interpreter has no atomic operations
            self.smem[at] = plain_item
        else:
            plain = plgpu.RefType()
            draw = plgpu.inline_mgpu(arg_types=(plain, plain))(self._count_on)
            draw(self.drawn, self.smem.at[pl.ds(at, 1)])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.posted.at[at])
        return self.smem[at]

    def _count_on(self, ctx: Any, drawn: Any, smem: Any) -> None:
        del ctx
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            place = utils.memref_ptr(drawn)
            # Each CTA draws until nothing is left, once too often: 0 follows the last number.
            draw = "atom.global.inc.u32 $0, [$1], $2;"
            given = 0 if self.in_order else self.blocks  # without a draw
            last = word(self.items - given + self.blocks - 1)
            (number,) = asm(draw, [i32()], [place, last], "=r,l,r,~{memory}")
            llvm.store(plus(number, word(given)), pointer(smem, word(0)))
