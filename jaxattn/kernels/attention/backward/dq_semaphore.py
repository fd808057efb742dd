"""The semaphore of dQ: blocks add to its sum in global memory in the same order in every run.

A word of global memory says whose turn it is. Who has waited for its number adds by TMA, and when
its copies have reached global memory it lets the next number in. The word needs no fences: TMA adds
in L2, and who comes next reads nothing.
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
    """Waits until the word int32 [1] is the number. From then on it stays so until who has the
    number passes the turn."""

    def wait(_: Any, turn: Any, number: Any) -> None:
        asm(WAIT, [], [pointer(turn, word(0)), single(number)], "l,r,~{memory}", convergent=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLIT))(wait)(turn, number)


def pass_turn(turn: Any) -> None:
    """Lets the next number in. Each thread of the warpgroup has waited for its copies before, and
    for the others."""

    def give(_: Any, turn: Any) -> None:
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            code = "red.relaxed.gpu.global.add.s32 [$0], $1;"
            asm(code, [], [pointer(turn, word(0)), word(1)], "l,r,~{memory}")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(give)(turn)
