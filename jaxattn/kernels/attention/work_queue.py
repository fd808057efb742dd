"""Blocks that stay on their multiprocessor and draw one item after another, as each gets free.

A block's first item is its own number; for every further one a warpgroup counts on in global
memory, long before the others need it, and passes the number on in shared memory. So the next
item's copies are on their way while the last one ends, and items may differ in length as much as
they like. Which block has which item changes nothing in what is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, llvm, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, asm, i32, plus, pointer, word

POSTED = 2  # numbers in shared memory at a time


def scratch(readers: int) -> list[Any]:
    """What a kernel needs for `WorkQueue`, where so many warpgroups take what one draws."""
    return [
        plgpu.SMEM((POSTED,), jnp.int32),
        plgpu.Barrier(num_arrivals=1, num_barriers=POSTED),  # posted
        plgpu.Barrier(num_arrivals=readers, num_barriers=POSTED),  # taken
    ]


class WorkQueue:
    """The items of a block.

    Args:
        drawn: int32 or uint32 [1] of global memory: how many have been drawn, 0 when the kernel
            starts, and again when it has ended.
        refs: of `scratch`.
        first, blocks, items: the block's number, and how many of both there are.
        in_order: whether a block's first item is drawn as well. Then only blocks that run have
            items, and no item waits for an earlier one of a block that has not begun.
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
        """carry = do(item, carry) for each; one warpgroup draws, and the others take."""

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
            # A thread that waits on a barrier has to see each of its completions.
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
        if self.interpret:  # which has no atomic operations
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
            # Blocks draw until nothing is left, each once too often: 0 follows the last number.
            draw = "atom.global.inc.u32 $0, [$1], $2;"
            given = 0 if self.in_order else self.blocks  # without a draw
            last = word(self.items - given + self.blocks - 1)
            (number,) = asm(draw, [i32()], [place, last], "=r,l,r,~{memory}")
            llvm.store(plus(number, word(given)), pointer(smem, word(0)))
