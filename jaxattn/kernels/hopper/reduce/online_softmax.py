"""Parts of an online softmax that Pallas has no operation for.

An online softmax rescales its accumulators whenever a row's reference moves. In `mla_decode` that
is 128 multiplications per thread, a quarter of its instructions, between P and the product that
waits for it. So the reference moves only where a row's scores exceed it by SLACK, and a warp
without such a row does nothing. After a row's first steps that is nearly every warp.

A thread of a warpgroup has some columns of a row, and four threads share the row. The running sums
need no number of another thread: each thread keeps its own, and they are added up at the end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, scf
from jaxattn.kernels.hopper.ptx import (
    asm_word,
    element,
    fragmented,
    i32,
    number,
    tree,
    word,
)

# In powers of 2: P stays below 2 ** SLACK, and loses no bit.
SLACK = 8.0
PARTIAL = 8  # sums that are left per row, two per thread


def reference(top: jax.Array, largest: jax.Array) -> jax.Array:
    """Returns the rows' next reference, from the last one and the step's largest scores, in powers
    of 2. A NaN does not move it, but shows in P."""
    return jnp.where(largest > top + SLACK, largest, top)


def partial_sums(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns sums of every eighth column.

    Args:
        x: float32 [64, N] in the layout of products; N is a power of two, at least 32.

    Returns:
        float32 [64, 8] in that layout.
    """
    rows, columns = x.shape
    if interpret:
        return x.reshape(rows, columns // PARTIAL, PARTIAL).sum(axis=1)
    tile, shape = plgpu.Layout.WGMMA, (rows, PARTIAL)

    def add(_: Any, x: Any) -> Any:
        # The axis of tiles of 8 columns: a thread has the same registers of each.
        [axis] = [i for i, n in enumerate(x.registers.shape) if n == columns // PARTIAL]
        pieces = [piece.flat for piece in np.split(x.registers, columns // PARTIAL, axis)]
        sums = [tree(arith.addf, list(each)) for each in zip(*pieces, strict=True)]
        return fragmented(sums, shape, x.layout)

    out = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=tile)
    return plgpu.inline_mgpu(arg_types=(tile,), return_type=out)(add)(x)


def rescaled(acc: jax.Array, factors: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns acc [64, N] with its rows multiplied, in the warps that have a factor other than
    1."""
    if interpret:
        return acc * lax.broadcast_in_dim(factors, acc.shape, [0])
    return _by_warps(_rescaled, acc, factors)


def zero_empty_rows(acc: jax.Array, totals: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns acc [64, N] with 0 in the rows whose total is negative, in the warps that have
    one."""
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
    """Returns change() in the warps where some thread has a row that compares so with `bound`, else
    acc.

    A branch and not a select: one thread's need decides for its whole warp.
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
