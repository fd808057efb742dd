"""Prefetches of the data that a CTA reads before its first page is in flight.

The address of a length depends on the row with which a part begins, and the address of a page
number on both. Each read waits for memory, because caches of a few hundred megabytes have passed
through L2 since the last call. These functions prefetch the lines ahead of use; nothing waits for
them, and a wrong prefetch does no harm.

The lines stay in L2 while there is anything else to evict, above all a cache that streams through.
The calls of a step, one per layer, have the same schedule, lengths and tables.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, asm, pointer, single, times, word

LINE, NUMBERS = 128, 32  # bytes of a cache line, and its int32 numbers
THREADS = 128
PRIORITY = "L2::evict_last"
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()


def prefetch_array(ref: Any, *, interpret: bool) -> None:
    """Prefetches the lines of int32 [..] by one warpgroup, one line per thread: up to 4,096
    numbers."""
    lines = min(-(-math.prod(ref.shape) // NUMBERS), THREADS)
    if interpret:
        return

    def run(ctx: Any, ref: Any) -> None:
        del ctx
        mine = WarpgroupThread().index
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, mine, word(lines))):
            _prefetch_line(ref, times(mine, LINE))

    plgpu.inline_mgpu(arg_types=(PLAIN,))(run)(ref)


def prefetch_element(ref: Any, row: jax.Array, column: jax.Array, *, interpret: bool) -> None:
    """Prefetches the line of one number of int32 [m, n]."""
    if interpret:
        return

    def run(ctx: Any, ref: Any, row: Any, column: Any) -> None:
        del ctx
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, WarpgroupThread().index, word(0))):
            wide, width = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type).shape[1]
            row, column = (arith.extui(wide, single(x)) for x in (row, column))
            place = arith.addi(arith.muli(row, mgpu.c(width, wide)), column)
            _prefetch_line(ref, arith.muli(place, mgpu.c(4, wide)))

    ask = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT))(run)
    ask(ref, jnp.int32(row), jnp.int32(column))


def _prefetch_line(ref: Any, offset: Any) -> None:
    asm(f"prefetch.global.{PRIORITY} [$0];", [], [pointer(ref, offset)], "l")
