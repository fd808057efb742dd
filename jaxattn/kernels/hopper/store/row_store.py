"""Stores of few numbers: a row's log-sum-exps, or the rows of a tile that somebody reads."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.ptx import WarpgroupThread, single, times

# jax 0.12 refuses a plain store of registers that do not fill whole sectors of 32 bytes.
_SAID = getattr(plgpu, "store", None)


def store(ref: Any, value: jax.Array) -> None:
    """Registers to global memory, whether they fill whole sectors or not."""
    if _SAID is None:
        ref[...] = value
    else:
        _SAID(ref, value, optimized=False)


def store_first_rows(
    refs: Sequence[Any], values: Sequence[jax.Array], used: Any, *, interpret: bool
) -> None:
    """The first `used` rows, and what others the same 16 have, of tiles [64, N] of products.

    A warp has 16 rows, and stores nothing where none of them is used.
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
                value.store_untiled(ref, optimized=False)

    types = [plgpu.RefType()] * len(refs) + [plgpu.Layout.WGMMA] * len(values)
    store_them = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *types))(run)
    store_them(jnp.int32(used), *refs, *values)
