"""The semaphore of dQ: CTAs add to dQ in global memory in the same order in every run.

A word in global memory holds the number of the tile whose turn it is. The CTA that has waited for
its number adds by TMA, and passes the turn when its copies have reached global memory. The word
needs no fences, because TMA adds in L2 and the next CTA reads nothing.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, asm, pointer, single, word

SPLIT = plgpu.Layout.WG_SPLAT
WAIT = (
    "{ .reg .pred early; .reg .b32 now; again: ld.relaxed.gpu.global.b32 now, [$0]; "
    "setp.ne.s32 early, now, $1; @early bra again; }"
)


def await_turn(turn: Any, number: jax.Array) -> None:
    """Waits until the word int32 [1] equals the number. The word then keeps this value until the
    holder of the number passes the turn."""

    def wait(_: Any, turn: Any, number: Any) -> None:
        asm(WAIT, [], [pointer(turn, word(0)), single(number)], "l,r,~{memory}", convergent=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLIT))(wait)(turn, number)


def pass_turn(turn: Any) -> None:
    """Passes the turn to the next number. Before that, each thread of the warpgroup must have
    waited for its own copies and for the other threads."""

    def give(_: Any, turn: Any) -> None:
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            code = "red.relaxed.gpu.global.add.s32 [$0], $1;"
            asm(code, [], [pointer(turn, word(0)), word(1)], "l,r,~{memory}")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(give)(turn)
