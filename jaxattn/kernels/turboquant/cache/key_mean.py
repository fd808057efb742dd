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
    token_range: jax.Array,
    layer: jax.Array,
    *,
    form: TurboFormat,
    samples: int,
    max_abs: float,
    interpret: bool = False,
) -> jax.Array:
    """Returns float32 [B, Hk, D], the result of `common_key`.

    Args:
        kv_cache: uint8 [L, N, Hk, C * slot_bytes].
        block_tables: int32 [B, M].
        token_range: int32 [2, B], a row's first token and the end (exclusive) of its tokens, within
            its table.
        layer: int32 [1].
        form: The cache's format.
        samples: The number of groups, a multiple of 4.
        max_abs: The largest number of the result.
    """
    require_hopper("turbo_common", interpret=interpret)
    (batch, width), kv_heads = block_tables.shape, kv_cache.shape[2]
    page, dim = form.page_size(kv_cache), form.head_dim
    of_page = page // GROUP

    def body(
        kv_ref: Any, tables_ref: Any, token_range_ref: Any, layer_ref: Any, out_ref: Any,
        sums_smem: Any, counts_smem: Any,
    ) -> None:  # fmt: skip
        block = lax.axis_index("block")
        row, head = lax.div(block, kv_heads), lax.rem(block, kv_heads)
        begin, end = token_range_ref[0, row], token_range_ref[1, row]
        first = lax.div(begin, GROUP)
        groups = jnp.maximum(lax.div(end + (GROUP - 1), GROUP) - first, 0)
        group_locations = []
        for i in range(samples):
            group = first + lax.div((2 * i + 1) * groups, 2 * samples)
            number = tables_ref[row, jnp.clip(lax.div(group, of_page), 0, width - 1)]
            page_exists = (number >= 0) & (number < kv_cache.shape[1])
            # On a page that does not exist, no token belongs to the row.
            token = jnp.where(page_exists, group * GROUP, jnp.iinfo(jnp.int32).max - GROUP)
            group_locations += [jnp.where(page_exists, number, 0), lax.rem(group, of_page), token]
        layer_index = jnp.clip(layer_ref[0], 0, kv_cache.shape[0] - 1)
        numbers = [
            jnp.int32(x) for x in (layer_index, row, head, begin, end, groups, *group_locations)
        ]
        if interpret:
            _plain(form, max_abs, numbers, kv_ref, out_ref)
            return
        _inline(KeySum(form), numbers, kv_ref, sums_smem, counts_smem)
        warpgroup_barrier(interpret=False)
        _inline(KeyMean(form, max_abs), numbers[1:3], out_ref, sums_smem, counts_smem)

    return launch(
        body,
        name="turbo_common",
        grid={"block": batch * kv_heads},
        inputs={
            "kv_ref": kv_cache,
            "tables_ref": block_tables,
            "token_range_ref": token_range,
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
    )["out_ref"]


def _plain(
    form: TurboFormat, max_abs: float, numbers: list[jax.Array], kv_ref: Any, out_ref: Any
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
    out_ref[row, head] = jnp.clip(mean, -max_abs, max_abs)


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
        self, kv: Any, layer: Any, head: Any, begin: Any, end: Any, num_groups: Any, page: Any,
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
        min_norm, num_tokens, norms, token_masks = number(float("inf")), number(0.0), [], []
        for h in range(2):
            token_index = plus(on.g, word(8 * h))
            norm = on.halves(times(token_index, 2), GROUP * (form.key_bytes + form.value_bytes))
            token_index = plus(token, token_index)
            size = arith.maximumf(norm, arith.subf(number(0.0), norm))
            is_counted = arith.andi(
                arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, token_index, begin),
                    arith.cmpi(arith.CmpIPredicate.slt, token_index, end),
                ),
                arith.cmpf(arith.CmpFPredicate.OLE, size, number(LARGEST_F16)),
            )
            norms.append(norm)
            token_masks.append(is_counted)
            min_norm = arith.minimumf(
                min_norm, arith.select(is_counted, norm, number(float("inf")))
            )
            num_tokens = arith.addf(num_tokens, arith.select(is_counted, number(1.0), number(0.0)))
        for distance in (4, 8, 16):
            min_norm = arith.minimumf(min_norm, utils.shfl_bfly(min_norm, distance))
            num_tokens = arith.addf(num_tokens, utils.shfl_bfly(num_tokens, distance))
        # A single token does not count, unless the row has only one group.
        is_used = arith.ori(
            arith.cmpf(arith.CmpFPredicate.OGT, num_tokens, number(1.0)),
            arith.cmpi(arith.CmpIPredicate.eq, num_groups, word(1)),
        )
        num_tokens, cap = (
            arith.select(is_used, num_tokens, number(0.0)),
            arith.addf(min_norm, min_norm),
        )
        for h, (norm, is_counted) in enumerate(zip(norms, token_masks, strict=True)):
            weight = arith.minimumf(norm, cap)
            weight = arith.select(arith.andi(is_counted, is_used), weight, number(0.0))
            blocks = range(form.head_dim // 16)
            dims = [x for c in blocks for x in floats(halves(keys[2 * c + h]))]
            total = [arith.addf(x, arith.mulf(weight, y)) for x, y in zip(total, dims, strict=True)]
        return total, num_tokens


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
    max_abs: float

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
        low, high = number(-self.max_abs), number(self.max_abs)
        mean = [arith.minimumf(arith.maximumf(x, low), high) for x in mean]
        _, heads, _ = ir.MemRefType(out.type).shape
        at = arith.muli(wide_row(row, heads, head), mgpu.c(4 * dim, long()))
        store(joined(mean), out, arith.addi(at, arith.extui(long(), times(dims, 4))))
