"""Weights of 4 bits, in tiles of shared memory, as the left operand of wgmma in registers.

`core.numerics.four_bit_tiles` says how a tile lies. A thread takes 64 columns of both its rows by
one load of 16 bytes, and makes two numbers of 16 bits of each pair of codes:

    MXFP4    the bits of a code are moved to where the dtype has exponent and mantissa, which makes
             it 2**-126 (float16: 2**-14) times itself, and it is multiplied by the inverse and by
             the scale; both are exact, subnormal numbers included
    INT4     the code is or-ed to the mantissa of 128 (float16: 1,024); of the sum 128 and the zero
             point are taken off, which is exact, and the difference is multiplied by the scale

So a number is rounded once, as `four_bit_tiles.dequantize` rounds it. A float16 scale is two
bfloat16 numbers, of which the lower one's product is exact and is added by the rounding one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxattn.core.numerics.four_bit_tiles import (
    ROWS,
    SIGNS,
    UNIT,
    WORD_COLUMNS,
    FourBitFormat,
    dequantize,
)
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    asm_word,
    fragmented,
    i32,
    joined,
    load,
    plus,
    times,
    word,
)

LINE = 128  # bytes; tiles lie in shared memory as rows of so many
HALVES = 0x00010001  # a number of 16 bits, twice


def serves(form: FourBitFormat, dtype: DTypeLike) -> bool:
    """Whether numbers of the format become the dtype's with one rounding."""
    if jnp.dtype(dtype) == jnp.float16:
        return form.scale != "bfloat16"  # whose exponents float16 has not
    return jnp.dtype(dtype) == jnp.bfloat16


def widened(tile: Any, dtype: DTypeLike, form: FourBitFormat, *, interpret: bool) -> jax.Array:
    """A tile's numbers [64, columns] in `dtype`, as wgmma takes them from registers.

    Args:
        tile: its bytes in shared memory, [lines, 128].
    """
    if interpret:
        return dequantize(tile[...].reshape(1, 1, form.tile_bytes), form, dtype)
    out = plgpu.ShapeDtypeStruct((ROWS, form.columns), dtype, layout=plgpu.Layout.WGMMA)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return run(lambda _, x: _widened(x, form, jnp.dtype(dtype) == jnp.float16))(tile)


def _widened(tile: Any, form: FourBitFormat, half: bool) -> Any:
    place, registers = WarpgroupThread(), []
    kind = Float16Codes() if half else Bfloat16Codes()
    pair = ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())
    at = times(place.index, 16)
    of_scales = times(plus(times(place.warp, 8), place.g), form.scale_bytes)
    scales = _scales(tile, of_scales, form, kind)
    for unit in range(form.columns // UNIT):
        words = load(tile, at, unit * ROWS * UNIT // 2, 4)
        for more in range(UNIT // WORD_COLUMNS):
            group = (unit * UNIT + more * WORD_COLUMNS) // form.group
            rows = [
                kind.numbers(words[2 * more + row], scales[group][row], form) for row in range(2)
            ]
            registers += [rows[row][j] for j in range(4) for row in range(2)]
    registers = [vector.bitcast(pair, joined([each])) for each in registers]
    return fragmented(registers, (ROWS, form.columns), mgpu.WGMMA_LAYOUT)


def _scales(tile: Any, at: Any, form: FourBitFormat, kind: Any) -> list[list[Any]]:
    """Of each group and row what `numbers` multiplies by, and takes off before."""
    groups, count = form.columns // form.group, form.scale_bytes // 4
    words = load(tile, at, form.code_bytes, count)
    found = []
    for group in range(groups):
        rows = []
        for row in range(2):
            place = 2 * group + row
            if form.scale == "e8m0":
                rows.append(kind.power(words[0], place))
                continue
            each = words[place] if form.zeros else words[place // 2]
            twice = 0x1010 if form.zeros or place % 2 == 0 else 0x3232
            scale = _permuted(each, twice)
            zero = kind.base_and(_permuted(each, 0x3232)) if form.zeros else word(kind.eight)
            rows.append((kind.factors(scale, form), zero))
        found.append(rows)
    return found


class Bfloat16Codes:
    """Two bfloat16 numbers of two codes, a word."""

    place, type = 6, "bf16x2"  # of a code's lowest bit in the number
    up = 0x7E80 * HALVES  # 2**126
    base, eight = 0x4300 * HALVES, 0x4308 * HALVES  # 128 and 136

    def numbers(self, codes: Any, scale: Any, form: FourBitFormat) -> list[Any]:
        """Four pairs, of a word of codes."""
        if form.kind == "mxfp4":
            return [
                self.product(self.product(each, word(self.up)), scale) for each in self.moved(codes)
            ]
        factors, zero = scale
        found = []
        for j in range(4):
            some = _and(_shifted(codes, -4 * j), 0xF * HALVES)
            wide = arith.ori(some, word(self.base))
            less = asm_word(f"sub.rn.{self.type} $0, $1, $2;", wide, zero, movable=True)
            found.append(self.scaled(less, factors))
        return found

    def moved(self, codes: Any) -> list[Any]:
        """MXFP4's bits in the places of this dtype."""
        found = []
        for j in range(4):
            size, sign = self.place - 3 * j, 15 - SIGNS[j]
            mask = (7 << self.place) * HALVES
            if size == sign:
                found.append(_and(_shifted(codes, size), mask | 0x8000 * HALVES))
                continue
            signs = _and(_shifted(codes, sign), 0x8000 * HALVES)
            found.append(arith.ori(_and(_shifted(codes, size), mask), signs))
        return found

    def product(self, x: Any, y: Any) -> Any:
        return asm_word(f"mul.rn.{self.type} $0, $1, $2;", x, y, movable=True)

    def power(self, words: Any, place: int) -> Any:
        """2**(byte - 127), twice."""
        byte = arith.andi(arith.shrui(words, word(8 * place)), word(0xFF))
        # 2**-127 is subnormal.
        bits = arith.maxui(arith.shli(byte, word(7)), word(0x40))
        return times(bits, HALVES)

    def factors(self, scale: Any, form: FourBitFormat) -> tuple[Any, ...]:
        """Of a scale, twice in a word, the numbers that sum up to it."""
        if form.scale == "bfloat16":
            return (scale,)
        code = (
            "{ .reg .b16 x, y; .reg .f32 a, b; mov.b32 {x, y}, $2; cvt.f32.f16 a, x; "
            "cvt.rn.bf16x2.f32 $0, a, a; and.b32 $1, $0, 0xffff0000; mov.b32 b, $1; "
            "sub.f32 a, a, b; cvt.rn.bf16x2.f32 $1, a, a; }"
        )
        return tuple(asm(code, [i32(), i32()], [scale], "=&r,=&r,r", movable=True))

    def scaled(self, x: Any, factors: tuple[Any, ...]) -> Any:
        if len(factors) == 1:
            return self.product(x, factors[0])
        high, low = factors
        least = self.product(x, low)  # a number of 4 bits times one of 3
        return asm_word(f"fma.rn.{self.type} $0, $1, $2, $3;", x, high, least, movable=True)

    def base_and(self, zero: Any) -> Any:
        return arith.ori(zero, word(self.base))


class Float16Codes(Bfloat16Codes):
    """Two float16 numbers of two codes."""

    place, type = 9, "f16x2"
    up = 0x7400 * HALVES  # 2**14
    base, eight = 0x6400 * HALVES, 0x6408 * HALVES  # 1,024 and 1,032

    def power(self, words: Any, place: int) -> Any:
        """2**(byte - 127), twice; 0 and inf where float16 has no such power."""
        byte = arith.andi(arith.shrui(words, word(8 * place)), word(0xFF))
        code = (
            "{ .reg .f32 a; .reg .b16 x; .reg .b32 b; shl.b32 b, $1, 23; max.u32 b, b, 0x400000; "
            "mov.b32 a, b; cvt.rn.f16.f32 x, a; mov.b32 $0, {x, x}; }"
        )
        return asm_word(code, byte, movable=True)

    def factors(self, scale: Any, form: FourBitFormat) -> tuple[Any, ...]:
        return (scale,)


def _shifted(x: Any, by: int) -> Any:
    """To the left, or to the right where it is below 0."""
    if by == 0:
        return x
    return arith.shli(x, word(by)) if by > 0 else arith.shrui(x, word(-by))


def _and(x: Any, mask: int) -> Any:
    return arith.andi(x, word(mask))


def _permuted(x: Any, selected: int) -> Any:
    return asm_word(f"prmt.b32 $0, $1, 0, {selected};", x, movable=True)
