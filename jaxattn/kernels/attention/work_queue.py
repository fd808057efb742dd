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
        counter: int32 or uint32 [1] in global memory, the number of items drawn so far: 0 when the
            kernel starts, and again when it has ended.
        refs: The refs of `scratch`.
        first_item, blocks, items: The index of the CTA, and the numbers of CTAs and items.
        in_order: Whether a CTA's first item is drawn as well. Then only running CTAs have items,
            and no item waits for an earlier one of a CTA that has not started.
    """

    def __init__(
        self,
        counter: Any,
        refs: Any,
        first_item: Any,
        *,
        blocks: int,
        items: int,
        in_order: bool = False,
        interpret: bool,
    ):
        self.counter, (self.smem, self.posted, self.taken) = counter, refs
        self.first_item, self.blocks, self.items = first_item, blocks, items
        self.interpret = interpret
        self.in_order = in_order

    def each(self, draws: bool, do: Any, carry: Any) -> Any:
        """Runs carry = do(item, carry) for each item; one warpgroup draws items, the others take
        them."""

        def step(state: Any) -> Any:
            item, draw_index, carry = state
            carry = do(item, carry)
            slot = lax.rem(draw_index, jnp.int32(POSTED))
            item = self._draw(item + self.blocks, draw_index, slot) if draws else self._take(slot)
            return item, draw_index + 1, carry

        item = self.first_item
        if self.in_order:
            item = self._draw(item, jnp.int32(0), 0) if draws else self._take(0)
        state = (item, jnp.int32(self.in_order), carry)
        _, num_draws, carry = lax.while_loop(lambda state: state[0] < self.items, step, state)
        if draws:
            # A thread that waits on a barrier must observe each of its completions.
            @pl.loop(jnp.maximum(num_draws - POSTED, 0), num_draws)
            def _(draw_index: jax.Array) -> None:
                plgpu.barrier_wait(self.taken.at[lax.rem(draw_index, jnp.int32(POSTED))])

        return carry

    def _take(self, slot: Any) -> jax.Array:
        plgpu.barrier_wait(self.posted.at[slot])
        item = self.smem[slot]
        plgpu.barrier_arrive(self.taken.at[slot])
        return item

    def _draw(self, plain_item: Any, draw_index: Any, slot: Any) -> jax.Array:
        pl.when(draw_index >= POSTED)(lambda: plgpu.barrier_wait(self.taken.at[slot]))
        if self.interpret:  # the interpreter has no atomic operations
            self.smem[slot] = plain_item
        else:
            plain = plgpu.RefType()
            draw = plgpu.inline_mgpu(arg_types=(plain, plain))(self._count_on)
            draw(self.counter, self.smem.at[pl.ds(slot, 1)])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.posted.at[slot])
        return self.smem[slot]

    def _count_on(self, ctx: Any, counter: Any, smem: Any) -> None:
        del ctx
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            counter_pointer = utils.memref_ptr(counter)
            # Each CTA draws until nothing is left, once too often: 0 follows the last number.
            draw = "atom.global.inc.u32 $0, [$1], $2;"
            first_drawn = 0 if self.in_order else self.blocks  # without a draw
            last = word(self.items - first_drawn + self.blocks - 1)
            (number,) = asm(draw, [i32()], [counter_pointer, last], "=r,l,r,~{memory}")
            llvm.store(plus(number, word(first_drawn)), pointer(smem, word(0)))
