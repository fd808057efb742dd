"""The mean of some of a row's keys, which prefill subtracts from all of them.

A CTA is a warpgroup with a row's KV head. Its warps take two groups of 16 tokens each; a lane has
the same dims as in dequantization.py. Tokens are summed up in registers and between lanes, the sum
is rotated back, and the warps' sums are added in shared memory.

Limits: D 64, 128 or 256, presets that rotate keys, pages of whole groups.
Reference: `jaxattn.ops.turboquant.key_mean.common_key`; tests:
tests/kernels/turboquant/test_key_mean.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant.codec import LARGEST_F16, TurboFormat, key_numbers, rotate
from jaxattn.core.turboquant.slot_layout import GROUP, ungroup, unpack
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.instructions import warpgroup_barrier
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    f32,
    joined,
    load,
    number,
    plus,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.turboquant.cache.dequantization import (
    SHARING,
    GlobalCodeRegisters,
    floats,
    halves,
    long,
    wide_row,
)
from jaxattn.kernels.turboquant.cache.lut_dequantization import key_registers
from jaxattn.kernels.turboquant.query_rotation import lane_butterfly

SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()
WARPS = 4


def turbo_common_mosaic(
    kv_cache: jax.Array,
    block_tables: jax.Array,
    held: jax.Array,
    layer: jax.Array,
    *,
    form: TurboFormat,
    samples: int,
    most: float,
    interpret: bool = False,
    detect_races: bool = False,
) -> jax.Array:
    """Returns float32 [B, Hk, D], the result of `common_key`.

    Args:
        kv_cache: uint8 [L, N, Hk, C * slot_bytes].
        block_tables: int32 [B, M].
        held: int32 [2, B], a row's first token and the end (exclusive) of its tokens, within its
            table.
        layer: int32 [1].
        form: The cache's format.
        samples: The number of groups, a multiple of 4.
        most: The largest number of the result.
    """
    require_hopper("turbo_common", interpret=interpret)
    (batch, width), kv_heads = block_tables.shape, kv_cache.shape[2]
    page, dim = form.page_size(kv_cache), form.head_dim
    of_page = page // GROUP

    def body(
        kv_ref: Any, tables_ref: Any, held_ref: Any, layer_ref: Any, out_ref: Any, sums_smem: Any,
        counts_smem: Any,
    ) -> None:  # fmt: skip
        block = lax.axis_index("block")
        row, head = lax.div(block, kv_heads), lax.rem(block, kv_heads)
        begin, end = held_ref[0, row], held_ref[1, row]
        first = lax.div(begin, GROUP)
        groups = jnp.maximum(lax.div(end + (GROUP - 1), GROUP) - first, 0)
        places = []
        for i in range(samples):
            group = first + lax.div((2 * i + 1) * groups, 2 * samples)
            number = tables_ref[row, jnp.clip(lax.div(group, of_page), 0, width - 1)]
            there = (number >= 0) & (number < kv_cache.shape[1])
            # On a page that does not exist, no token belongs to the row.
            token = jnp.where(there, group * GROUP, jnp.iinfo(jnp.int32).max - GROUP)
            places += [jnp.where(there, number, 0), lax.rem(group, of_page), token]
        at = jnp.clip(layer_ref[0], 0, kv_cache.shape[0] - 1)
        numbers = [jnp.int32(x) for x in (at, row, head, begin, end, groups, *places)]
        if interpret:
            _plain(form, most, numbers, kv_ref, out_ref)
            return
        _inline(KeySum(form), numbers, kv_ref, sums_smem, counts_smem)
        warpgroup_barrier(interpret=False)
        _inline(KeyMean(form, most), numbers[1:3], out_ref, sums_smem, counts_smem)

    return launch(
        body,
        name="turbo_common",
        grid={"block": batch * kv_heads},
        inputs={
            "kv_ref": kv_cache,
            "tables_ref": block_tables,
            "held_ref": held,
            "layer_ref": layer,
        },
        outputs={"out_ref": jax.ShapeDtypeStruct((batch, kv_heads, dim), jnp.float32)},
        scratch={
            "sums_smem": plgpu.SMEM((WARPS, dim), jnp.float32),
            "counts_smem": plgpu.SMEM((WARPS,), jnp.float32),
        },
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        detect_races=detect_races,
    )["out_ref"]


def _plain(
    form: TurboFormat, most: float, numbers: list[jax.Array], kv_ref: Any, out_ref: Any
) -> None:
    """Computes the mean in the interpreter."""
    layer, row, head, begin, end, groups, *places = numbers
    nbytes = GROUP * form.slot_bytes
    total, count = jnp.zeros(form.head_dim, jnp.float32), jnp.float32(0)
    for i in range(0, len(places), 3):
        page, inside, first = places[i : i + 3]
        some = kv_ref[layer, page, head, pl.ds(inside * nbytes, nbytes)]
        codes = unpack(form, ungroup(form, some[None])[0])
        assert codes.norm is not None
        norm, token = codes.norm.astype(jnp.float32), first + jnp.arange(GROUP)
        counts = (token >= begin) & (token < end) & jnp.isfinite(norm)
        counts &= (jnp.sum(counts) > 1) | (groups == 1)
        norm = jnp.minimum(norm, 2 * jnp.min(jnp.where(counts, norm, jnp.inf)))
        weights = jnp.where(counts, norm, 0)
        total += jnp.sum(weights[:, None] * key_numbers(form, codes.keys), axis=0)
        count += jnp.sum(counts)
    mean = rotate(total / jnp.maximum(count, 1))
    out_ref[row, head] = jnp.clip(mean, -most, most)


def _inline(run: Callable[..., None], numbers: list[jax.Array], *refs: Any) -> None:
    def each(ctx: Any, *args: Any) -> None:
        del ctx
        run(*args[: len(refs)], *map(single, args[len(refs) :]))

    plgpu.inline_mgpu(arg_types=(*[PLAIN] * len(refs), *[SPLAT] * len(numbers)))(each)(
        *refs, *numbers
    )


@dataclasses.dataclass(frozen=True)
class KeySum:
    """A warp's sum of its tokens, rotated back, and their number, which go to shared memory."""

    form: TurboFormat

    def __call__(
        self, kv: Any, sums: Any, counts: Any, layer: Any, row: Any, head: Any, begin: Any,
        end: Any, all_groups: Any, *places: Any,
    ) -> None:  # fmt: skip
        del row
        thread, dim = WarpgroupThread(), self.form.head_dim
        total: list[Any] = [number(0.0)] * (dim // SHARING)
        count = number(0.0)
        for first in range(0, len(places), 3 * WARPS):
            of_warps = [places[first + 3 * w : first + 3 * w + 3] for w in range(WARPS)]
            page, inside, token = (_of_warp(thread, x) for x in zip(*of_warps, strict=True))
            of_all = kv, layer, head, begin, end, all_groups
            total, seen = self._group(*of_all, page, inside, token, total)
            count = arith.addf(count, seen)
        # Sums over the lanes that have the same dims.
        for distance in (4, 8, 16):
            total = [arith.addf(x, utils.shfl_bfly(x, distance)) for x in total]
        total = [arith.mulf(x, number(dim**-0.5)) for x in lane_butterfly(total, SHARING)]
        for c in range(dim // 16):
            at = plus(times(thread.warp, 4 * dim), times(thread.t, 16))
            store(joined(total[4 * c : 4 * c + 4]), sums, at, 64 * c)
        store(joined([count]), counts, times(thread.warp, 4))

    def _group(
        self, kv: Any, layer: Any, head: Any, begin: Any, end: Any, all_groups: Any, page: Any,
        inside: Any, token: Any, total: list[Any],
    ) -> tuple[list[Any], Any]:  # fmt: skip
        """Returns the sums with a group of this warp added, and the number of all its tokens that
        count."""
        form = self.form
        _, pages, heads, nbytes = ir.MemRefType(kv.type).shape
        at = wide_row(wide_row(layer, pages, page), heads, head)
        at = arith.muli(at, mgpu.c(nbytes, long()))
        inside = arith.extui(long(), times(inside, GROUP * form.slot_bytes))
        on = GlobalCodeRegisters(kv, arith.addi(at, inside))
        keys = key_registers(on, form, 0)  # a warp has its own beginning
        least, seen, norms, counting = number(float("inf")), number(0.0), [], []
        for h in range(2):
            own = plus(on.g, word(8 * h))
            norm = on.halves(times(own, 2), GROUP * (form.key_bytes + form.value_bytes))
            own = plus(token, own)
            size = arith.maximumf(norm, arith.subf(number(0.0), norm))
            counts = arith.andi(
                arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, own, begin),
                    arith.cmpi(arith.CmpIPredicate.slt, own, end),
                ),
                arith.cmpf(arith.CmpFPredicate.OLE, size, number(LARGEST_F16)),
            )
            norms.append(norm)
            counting.append(counts)
            least = arith.minimumf(least, arith.select(counts, norm, number(float("inf"))))
            seen = arith.addf(seen, arith.select(counts, number(1.0), number(0.0)))
        for distance in (4, 8, 16):
            least = arith.minimumf(least, utils.shfl_bfly(least, distance))
            seen = arith.addf(seen, utils.shfl_bfly(seen, distance))
        # A single token does not count, unless the row has only one group.
        taken = arith.ori(
            arith.cmpf(arith.CmpFPredicate.OGT, seen, number(1.0)),
            arith.cmpi(arith.CmpIPredicate.eq, all_groups, word(1)),
        )
        seen, cap = arith.select(taken, seen, number(0.0)), arith.addf(least, least)
        for h, (norm, counts) in enumerate(zip(norms, counting, strict=True)):
            weight = arith.minimumf(norm, cap)
            weight = arith.select(arith.andi(counts, taken), weight, number(0.0))
            blocks = range(form.head_dim // 16)
            mine = [x for c in blocks for x in floats(halves(keys[2 * c + h]))]
            total = [arith.addf(x, arith.mulf(weight, y)) for x, y in zip(total, mine, strict=True)]
        return total, seen


def _of_warp(thread: WarpgroupThread, values: tuple[Any, ...]) -> Any:
    chosen = values[0]
    for w, value in enumerate(values[1:], 1):
        mine = arith.cmpi(arith.CmpIPredicate.eq, thread.warp, word(w))
        chosen = arith.select(mine, value, chosen)
    return chosen


@dataclasses.dataclass(frozen=True)
class KeyMean:
    """Four neighboring dims of the mean for each thread; several threads have the same dims."""

    form: TurboFormat
    most: float

    def __call__(self, out: Any, sums: Any, counts: Any, row: Any, head: Any) -> None:
        dim = self.form.head_dim
        dims = times(arith.andi(WarpgroupThread().index, word(dim // 4 - 1)), 4)
        total, count = [number(0.0)] * 4, number(0.0)
        for w in range(WARPS):
            some = load(sums, times(dims, 4), 4 * dim * w, 4, f32())
            total = [arith.addf(x, y) for x, y in zip(total, some, strict=True)]
            count = arith.addf(count, load(counts, word(0), 4 * w, 1, f32())[0])
        share = arith.divf(number(1.0), arith.maximumf(count, number(1.0)))
        mean = [arith.mulf(x, share) for x in total]
        low, high = number(-self.most), number(self.most)
        mean = [arith.minimumf(arith.maximumf(x, low), high) for x in mean]
        _, heads, _ = ir.MemRefType(out.type).shape
        at = arith.muli(wide_row(row, heads, head), mgpu.c(4 * dim, long()))
        store(joined(mean), out, arith.addi(at, arith.extui(long(), times(dims, 4))))
