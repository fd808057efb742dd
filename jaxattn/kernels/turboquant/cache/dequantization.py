"""Dequantization of TurboQuant pages to float16 keys and values, which the prefill kernel
multiplies.

A CTA is a warpgroup with 64 tokens of a KV head. As in turbo_decode, codes are loaded to registers,
each thread's in the order of the cache. e4m3 numbers become float32, are multiplied, and are stored
as float16. Keys are rotated back first: rotated keys take so few values that many would be rounded
to float16 in the same way, and such errors add up in a score. Before that the keys' common part in
a row is subtracted. Values have one token per byte, so a warp transposes blocks of eight by eight.

Limits: D 64, 128 or 256, any preset, pages of whole 64 tokens.
Reference: `jaxattn.core.turboquant.code_gather.page_codes`; tests:
tests/kernels/turboquant/test_dequantization.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.turboquant.codec import LARGEST_F16, TurboFormat, dequantize, plain_keys
from jaxattn.core.turboquant.slot_layout import GROUP, ungroup, unpack
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.build.launch import launch
from jaxattn.kernels.hopper.device import require_hopper
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, vector
from jaxattn.kernels.hopper.ptx import (
    asm,
    element,
    f32,
    i32,
    joined,
    load,
    number,
    plus,
    pointer,
    single,
    times,
    word,
)
from jaxattn.kernels.turboquant.cache.lut_dequantization import (
    GROUPS,
    key_registers,
    middle,
    value_registers,
)
from jaxattn.kernels.turboquant.operands import WordRegisters
from jaxattn.kernels.turboquant.query_rotation import lane_butterfly

HALF = jnp.dtype(jnp.float16)
SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()
# Converts a word of four e4m3 numbers to two of two float16 ones.
HALVES = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; "
    "cvt.rn.f16x2.e4m3x2 $1, high; }"
)
SHARING = 4  # lanes that share a token's key, each four dims of every sixteen
TURNED = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"


def takes(page_size: int) -> bool:
    """Whether pages of `page_size` tokens are whole steps."""
    return page_size % PAGE == 0


def turbo_unpack_mosaic(
    kv_cache: jax.Array,
    pages: jax.Array,
    token_range: jax.Array,
    layer: jax.Array,
    common: jax.Array | None = None,
    *,
    form: TurboFormat,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns float16 (keys, values) [B, n C, Hk, D] from pages of codes.

    Args:
        kv_cache: uint8 [L, N, Hk, C * slot_bytes].
        pages: int32 [B, n], each row's pages. One that does not exist gives NaN.
        token_range: int32 [2, B]: the first of the tokens here that belong to a row, and the end
            (exclusive). The others are 0.
        layer: int32 [1].
        common: float32 [B, Hk, D], subtracted from each key of a row, or None.
        form: The cache's format, with pages that `takes` accepts.
    """
    require_hopper("turbo_unpack", interpret=interpret)
    (batch, count), kv_heads = pages.shape, kv_cache.shape[2]
    size = form.page_size(kv_cache)
    out = jax.ShapeDtypeStruct((batch, count * size, kv_heads, form.head_dim), HALF)
    steps = size // PAGE

    def body(
        kv_ref: Any, pages_ref: Any, token_range_ref: Any, layer_ref: Any, common_ref: Any,
        k_ref: Any, v_ref: Any,
    ) -> None:  # fmt: skip
        block = lax.axis_index("block")
        step, head = lax.div(block, kv_heads), lax.rem(block, kv_heads)
        row, token_step = lax.div(step, count * steps), lax.rem(step, count * steps)
        page, inside = pages_ref[row, lax.div(token_step, steps)], lax.rem(token_step, steps)
        page_exists = (page >= 0) & (page < kv_cache.shape[1])
        tile = DequantTile(
            layer=jnp.clip(layer_ref[0], 0, kv_cache.shape[0] - 1), row=row,
            first_token=token_step * PAGE, page=jnp.where(page_exists, page, 0),
            inside=inside, head=head, page_exists=page_exists,
            begin=token_range_ref[0, row], end=token_range_ref[1, row],
        )  # fmt: skip
        (_plain if interpret else _write)(form, tile, kv_ref, common_ref, k_ref, v_ref)

    written = launch(
        body,
        name=f"turbo_unpack_{form.preset}",
        # A single axis, because all except the last have at most 65,535 CTAs.
        grid={"block": batch * count * steps * kv_heads},
        inputs={
            "kv_ref": kv_cache,
            "pages_ref": pages,
            "token_range_ref": token_range,
            "layer_ref": layer,
            "common_ref": common,
        },
        outputs={"k_ref": out, "v_ref": out},
        warpgroups=None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )
    return written["k_ref"], written["v_ref"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantTile:
    """The tile of a CTA.

    Attributes:
        layer, page, head: The location of its codes in the cache, `inside` steps after the page's
            start.
        page_exists: Whether the page exists.
        row, first_token: The destination: tokens of the row from `first_token` on.
        begin, end: The range of tokens that belong to the row.
    """

    layer: Any
    page: Any
    inside: Any
    head: Any
    page_exists: Any
    row: Any
    first_token: Any
    begin: Any
    end: Any


def _plain(
    form: TurboFormat, tile: DequantTile, kv_ref: Any, common_ref: Any, k_ref: Any, v_ref: Any
) -> None:
    """Dequantizes in the interpreter."""
    nbytes = PAGE * form.slot_bytes
    code_bytes = kv_ref[tile.layer, tile.page, tile.head, pl.ds(tile.inside * nbytes, nbytes)]
    slots = ungroup(form, code_bytes.reshape(GROUPS, -1)).reshape(PAGE, -1)
    token = tile.first_token + lax.broadcasted_iota(jnp.int32, (PAGE, 1), 0)
    in_row = (token >= tile.begin) & (token < tile.end)
    codes = unpack(form, slots)
    keys = plain_keys(form, codes)
    if common_ref is not None:
        keys -= common_ref[tile.row, tile.head]
    for ref, x in ((k_ref, keys), (v_ref, dequantize(form, codes)[1])):
        x = jnp.where(tile.page_exists, x, jnp.nan)
        x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -LARGEST_F16, LARGEST_F16))
        ref[tile.row, pl.ds(tile.first_token, PAGE), tile.head] = jnp.where(in_row, x, 0).astype(
            HALF
        )


def _write(
    form: TurboFormat, tile: DequantTile, kv_ref: Any, common_ref: Any, k_ref: Any, v_ref: Any
) -> None:
    refs = [kv_ref, k_ref, v_ref] + ([] if common_ref is None else [common_ref])

    def run(ctx: Any, *args: Any) -> None:
        del ctx
        names = [field.name for field in dataclasses.fields(DequantTile)]
        thread_tile = DequantTile(**dict(zip(names, map(single, args[len(refs) :]), strict=True)))
        DequantWriter(form, thread_tile, *args[: len(refs)]).run()

    numbers = [jnp.int32(getattr(tile, field.name)) for field in dataclasses.fields(DequantTile)]
    types = (*[PLAIN] * len(refs), *[SPLAT] * len(numbers))
    plgpu.inline_mgpu(arg_types=types)(run)(*refs, *numbers)


class GlobalCodeRegisters(WordRegisters):
    """The registers of codes in global memory, `begin` bytes after the beginning of `ref`."""

    def __init__(self, ref: Any, begin: Any):
        super().__init__(ref)
        self.begin = begin

    def load(self, offset: Any, fixed: int, count: int) -> list[Any]:
        loaded = llvm.load(ir.VectorType.get((count,), i32()), self._pointer(offset, fixed))
        return [element(loaded, i) for i in range(count)]

    def halves(self, offset: Any, fixed: int) -> Any:
        """Returns a float16 number there, as float32."""
        one = ir.VectorType.get((1,), ir.F16Type.get())
        return arith.extf(f32(), element(llvm.load(one, self._pointer(offset, fixed)), 0))

    def _pointer(self, offset: Any, fixed: int) -> Any:
        return pointer(self.ref, arith.addi(self.begin, _zero_extend(offset)), fixed)


class DequantWriter:
    """One thread's share of a CTA."""

    def __init__(
        self, form: TurboFormat, tile: DequantTile, kv: Any, k: Any, v: Any, common: Any = None
    ):
        self.form, self.tile, self.k, self.v, self.common = form, tile, k, v, common
        _, pages, heads, nbytes = ir.MemRefType(kv.type).shape
        begin = wide_row(wide_row(tile.layer, pages, tile.page), heads, tile.head)
        begin = arith.muli(begin, mgpu.c(nbytes, long()))
        inside = times(tile.inside, PAGE * form.slot_bytes)
        self.on = GlobalCodeRegisters(kv, arith.addi(begin, _zero_extend(inside)))
        self.pitch = GROUP * form.slot_bytes

    def run(self) -> None:
        form, on = self.form, self.on
        blocks = form.head_dim // 16
        keys = key_registers(on, form, self.pitch)
        tokens = [plus(times(on.warp, GROUP), on.g, word(8 * h)) for h in range(2)]
        for h, token in enumerate(tokens):
            dims = [x for c in range(blocks) for x in floats(halves(keys[2 * c + h]))]
            scale_factor = self._nan_if_page_missing(number(1.0))
            if form.rotated:
                dims = lane_butterfly(dims, SHARING)
                scale_factor = arith.mulf(self._number(0, token), number(form.head_dim**-0.5))
            for c in range(blocks):
                numbers = [arith.mulf(x, scale_factor) for x in dims[4 * c : 4 * c + 4]]
                dim = plus(times(on.t, 4), word(16 * c))
                if self.common is not None:
                    numbers = list(map(arith.subf, numbers, self._shared(dim)))
                self._store(self.k, token, dim, numbers)
        values = value_registers(on, form, self.pitch)
        kinds = form.meta_bytes // 2
        for n in range(GROUPS):
            # In a transposed block, a lane has two dims of the token that its `g` selects.
            first_token = plus(times(on.right(on.g, 1), 4), on.both(on.g, 1), word(GROUP * n))
            for half, token in enumerate((first_token, plus(first_token, word(2)))):
                scale, minimum = (self._number(kinds - i, token) for i in (2, 1))
                for m in range(form.head_dim // 64):
                    for h in range(2):
                        codes = halves(values[(m * GROUPS + n) * 2 + h])[half]
                        numbers = floats(asm(TURNED, [i32()], [codes], "=r,r", convergent=True))
                        numbers = [arith.addf(x, number(middle(form.value_bits))) for x in numbers]
                        numbers = [arith.addf(minimum, arith.mulf(scale, x)) for x in numbers]
                        dim = plus(times(on.warp, 16), times(on.t, 2), word(64 * m + 8 * h))
                        self._store(self.v, token, dim, numbers)

    def _number(self, kind: int, token: Any) -> Any:
        """Returns a token's norm, scale or minimum."""
        form, on = self.form, self.on
        first = GROUP * (form.key_bytes + form.value_bytes + 2 * kind)
        at = plus(times(on.right(token, 4), self.pitch), times(on.both(token, GROUP - 1), 2))
        return self._nan_if_page_missing(on.halves(at, first))

    def _shared(self, dim: Any) -> list[Any]:
        """Returns four dims of the common part of the row's keys."""
        tile = self.tile
        _, heads, dims = ir.MemRefType(self.common.type).shape
        row = wide_row(tile.row, heads, tile.head)
        offset = arith.addi(arith.muli(row, mgpu.c(dims, long())), _zero_extend(dim))
        return load(self.common, arith.muli(offset, mgpu.c(4, long())), 0, 4, f32())

    def _nan_if_page_missing(self, x: Any) -> Any:
        """Returns NaN if the page does not exist."""
        exists = arith.cmpi(arith.CmpIPredicate.ne, self.tile.page_exists, word(0))
        return arith.select(exists, x, number(float("nan")))

    def _store(self, ref: Any, token: Any, dim: Any, numbers: list[Any]) -> None:
        """Stores float32 numbers of neighboring dims, as float16."""
        tile, half = self.tile, ir.F16Type.get()
        _, tokens, heads, dims = ir.MemRefType(ref.type).shape
        row_token = plus(tile.first_token, token)
        in_row = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, row_token, tile.begin),
            arith.cmpi(arith.CmpIPredicate.slt, row_token, tile.end),
        )
        numbers = [arith.select(in_row, _bounded(x), number(0.0)) for x in numbers]
        row = wide_row(wide_row(tile.row, tokens, row_token), heads, tile.head)
        offset = arith.addi(arith.muli(row, mgpu.c(dims, long())), _zero_extend(dim))
        offset = arith.muli(offset, mgpu.c(HALF.itemsize, long()))
        llvm.store(joined([arith.truncf(half, x) for x in numbers]), pointer(ref, offset))


def long() -> Any:
    return ir.IntegerType.get_signless(64)


def _zero_extend(x: Any) -> Any:
    return x if x.type == long() else arith.extui(long(), x)


def wide_row(x: Any, count: int, y: Any) -> Any:
    """Returns x * count + y, with 64 bits."""
    return arith.addi(arith.muli(_zero_extend(x), mgpu.c(count, long())), _zero_extend(y))


def halves(codes: Any) -> list[Any]:
    """Returns four e4m3 numbers as two words of two float16 ones."""
    return asm(HALVES, [i32(), i32()], [codes], "=r,=r,r", movable=True)


def floats(words: list[Any]) -> list[Any]:
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    both = [vector.bitcast(pair, joined([x])) for x in words]
    return [arith.extf(f32(), element(x, i)) for x in both for i in range(2)]


def _bounded(x: Any) -> Any:
    """Returns the largest number of float16 instead of greater finite ones; infinity and NaN
    stay."""
    low = arith.maximumf(x, number(-LARGEST_F16))
    within = arith.minimumf(low, number(LARGEST_F16))
    sizes = arith.andi(arith.bitcast(i32(), x), word(0x7FFFFFFF))
    infinite = arith.cmpi(arith.CmpIPredicate.eq, sizes, word(0x7F800000))
    return arith.select(infinite, x, within)
