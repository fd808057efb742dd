"""Stores of few numbers: a row's log-sum-exps, or those rows of a tile that somebody reads."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, ir, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    element,
    joined,
    plus,
    single,
    times,
    word,
)
from jaxattn.kernels.hopper.ptx import (
    store as store_at,
)

# jax 0.12 refuses a plain store of registers that do not fill whole sectors of 32 bytes.
_SAID = getattr(plgpu, "store", None)


def store(ref: Any, value: jax.Array) -> None:
    """Stores registers to global memory, whether they fill whole sectors or not."""
    if _SAID is None:
        ref[...] = value
    else:
        _SAID(ref, value, optimized=False)


def store_first_rows(
    refs: Sequence[Any], values: Sequence[jax.Array], used: Any, *, interpret: bool
) -> None:
    """Stores the first `used` rows, and the rest of their groups of 16, of float32 products
    [64, N].

    A warp has 16 rows, and stores nothing if none of them is used. Lanes exchange the numbers of
    two neighboring groups of 8 columns, so that each stores 16 bytes of one.
    """
    if interpret:
        for ref, value in zip(refs, values, strict=True):
            ref[...] = value
        return

    def run(ctx: Any, used: Any, *given: Any) -> None:
        del ctx
        some = arith.cmpi(arith.CmpIPredicate.slt, times(WarpgroupThread().warp, 16), single(used))
        with utils.when(some):
            for ref, value in zip(given[: len(refs)], given[len(refs) :], strict=True):
                _store_products(ref, value)

    types = [plgpu.RefType()] * len(refs) + [plgpu.Layout.WGMMA] * len(values)
    store_them = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *types))(run)
    store_them(jnp.int32(used), *refs, *values)


def _store_products(ref: Any, value: Any) -> None:
    place, (strides, _) = WarpgroupThread(), ir.MemRefType(ref.type).get_strides_and_offset()
    odd = arith.andi(place.t, word(1))
    is_odd = arith.cmpi(arith.CmpIPredicate.ne, odd, word(0))
    row = plus(times(place.warp, 16), place.g)
    # A column of the first group for an even lane, of the second for an odd one.
    column = plus(times(odd, 8), times(arith.subi(place.t, odd), 2))
    at = plus(times(row, 4 * strides[0]), times(column, 4))
    groups = value.registers.reshape(-1, 2, 2)  # two groups of columns, each with rows 8 apart
    for pair, (first, second) in enumerate(groups):
        for half in range(2):
            own = arith.select(is_odd, second[half], first[half])
            sent = arith.select(is_odd, first[half], second[half])
            given = [utils.shfl_bfly(element(sent, i), 1) for i in range(2)]
            kept = [element(own, i) for i in range(2)]
            low = [arith.select(is_odd, x, y) for x, y in zip(given, kept, strict=True)]
            high = [arith.select(is_odd, x, y) for x, y in zip(kept, given, strict=True)]
            store_at(joined(low + high), ref, at, 32 * half * strides[0] + 64 * pair)
