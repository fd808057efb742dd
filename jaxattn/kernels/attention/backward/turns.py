"""The order in which blocks add to one sum in global memory: the same in every run.

A word of global memory says whose turn it is. Who has waited for its number adds by TMA, and when
its copies have reached global memory it lets the next number in. The word needs no fences: TMA adds
in L2, and who comes next reads nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, mgpu, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, asm, i32, pointer, single, word

SPLIT = plgpu.Layout.WG_SPLAT
WAIT = (
    "{ .reg .pred early; .reg .b32 now; again: ld.relaxed.gpu.global.b32 now, [$0]; "
    "setp.ne.s32 early, now, $1; @early bra again; }"
)


def look_at_turn(turn: Any, number: jax.Array, *, interpret: bool) -> jax.Array:
    """What the word int32 [1] is now, long before it matters: a load of L2 takes its time. In the
    interpreter one block has all turns."""
    if interpret:
        return number

    def look(_: Any, turn: Any) -> Any:
        code = "ld.relaxed.gpu.global.b32 $0, [$1];"
        (now,) = asm(code, [i32()], [pointer(turn, word(0))], "=r,l,~{memory}")
        return mgpu.FragmentedArray.splat(now, (), is_signed=True)

    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLIT)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)(look)(turn)


def await_turn(turn: Any, number: jax.Array, seen: jax.Array) -> None:
    """Waits until the word is the number, if it was not when `look_at_turn` has seen it. From then
    on it stays so until who has the number passes the turn."""

    def wait(_: Any, turn: Any, number: Any) -> None:
        asm(WAIT, [], [pointer(turn, word(0)), single(number)], "l,r,~{memory}", convergent=True)

    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLIT))(wait)
    pl.when(seen != number)(lambda: run(turn, number))


def pass_turn(turn: Any) -> None:
    """Lets the next number in. Each thread of the warpgroup has waited for its copies before, and
    for the others."""

    def give(_: Any, turn: Any) -> None:
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            code = "red.relaxed.gpu.global.add.s32 [$0], $1;"
            asm(code, [], [pointer(turn, word(0)), word(1)], "l,r,~{memory}")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(give)(turn)
