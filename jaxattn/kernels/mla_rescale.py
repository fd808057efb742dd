"""Rows of an accumulator rescaled, by the warps that have something to rescale.

A softmax that goes page by page multiplies what it has summed whenever a row's reference moves.
That is 128 multiplications a thread of `mla_decode`, a quarter of its instructions, between P and
the product that waits for it; and after a row's first pages nearly all factors are 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector


def rescaled(acc: jax.Array, factors: jax.Array, *, interpret: bool) -> jax.Array:
    """acc [64, N] with its rows multiplied, by the warps that have a factor other than 1."""
    if interpret:
        return acc * lax.broadcast_in_dim(factors, acc.shape, [0])
    return _by_warps(_rescaled, acc, factors)


def emptied(acc: jax.Array, totals: jax.Array, *, interpret: bool) -> jax.Array:
    """acc [64, N] with 0 in the rows whose total is negative, by the warps that have one."""
    if interpret:
        return jnp.where(lax.broadcast_in_dim(totals, acc.shape, [0]) < 0, 0.0, acc)
    return _by_warps(_emptied, acc, totals)


def _by_warps(change: Any, acc: jax.Array, factors: jax.Array) -> jax.Array:
    tile = plgpu.Layout.WGMMA
    return plgpu.inline_mgpu(
        arg_types=(tile, tile.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=tile),
    )(change)(acc, factors)


def _rescaled(ctx: Any, acc: Any, factors: Any) -> Any:
    del ctx
    change = lambda: acc * factors.broadcast_in_dim(acc.shape, (0,), acc.layout)  # noqa: E731
    return _where_any(factors, arith.CmpFPredicate.UNE, 1.0, acc, change)


def _emptied(ctx: Any, acc: Any, totals: Any) -> Any:
    del ctx

    def change() -> Any:
        wide = totals.broadcast_in_dim(acc.shape, (0,), acc.layout)
        zero = mgpu.c(0.0, ir.F32Type.get())
        zero = mgpu.FragmentedArray.splat(zero, acc.shape, acc.layout)
        return (wide < zero).select(zero, acc)

    return _where_any(totals, arith.CmpFPredicate.OLT, 0.0, acc, change)


def _where_any(rows: Any, predicate: Any, bound: float, acc: Any, change: Any) -> Any:
    """change() in the warps of which a thread has a row that compares so with `bound`, else acc.

    A branch and not a select: what a warp's other threads need decides for all of them.
    """
    limit = mgpu.c(bound, ir.F32Type.get())
    each = [vector.extract(x, [], [0]) for x in rows.registers.flat]
    found = [arith.cmpf(predicate, x, limit) for x in each]
    mine = arith.extui(ir.IntegerType.get_signless(32), functools.reduce(arith.ori, found))
    anyone = llvm.inline_asm(
        mine.type,
        [mine],
        "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; "
        "selp.u32 $0, 1, 0, q; }",
        "=r,r",
        has_side_effects=True,
    )
    some = arith.cmpi(arith.CmpIPredicate.ne, anyone, mgpu.c(0, mine.type))
    branch = scf.IfOp(some, [x.type for x in acc.registers.flat], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(change().registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(list(acc.registers.flat))
    registers = np.array(list(branch.results), dtype=object).reshape(acc.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)
