"""Rows of an accumulator rescaled, by the warps that have something to rescale.

A softmax that goes page by page multiplies what it has summed whenever a row's reference moves.
That is 128 multiplications a thread of `mla_decode`, a quarter of its instructions, between P and
the product that waits for it; and after a row's first pages nearly all factors are 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, scf
from jaxattn.kernels.hopper.registers import asm_word, element, fragmented, i32, number, word


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
        zero = mgpu.FragmentedArray.splat(number(0.0), acc.shape, acc.layout)
        return (wide < zero).select(zero, acc)

    return _where_any(totals, arith.CmpFPredicate.OLT, 0.0, acc, change)


def _where_any(rows: Any, predicate: Any, bound: float, acc: Any, change: Any) -> Any:
    """change() in the warps of which a thread has a row that compares so with `bound`, else acc.

    A branch and not a select: what a warp's other threads need decides for all of them.
    """
    each = [element(x, 0) for x in rows.registers.flat]
    found = [arith.cmpf(predicate, x, number(bound)) for x in each]
    mine = arith.extui(i32(), functools.reduce(arith.ori, found))
    anyone = asm_word(
        "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; "
        "selp.u32 $0, 1, 0, q; }",
        mine,
    )
    some = arith.cmpi(arith.CmpIPredicate.ne, anyone, word(0))
    branch = scf.IfOp(some, [x.type for x in acc.registers.flat], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(list(change().registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(list(acc.registers.flat))
    return fragmented(branch.results, acc.shape, acc.layout)
