"""Dequantization of 4-bit weights, from tiles in shared memory to wgmma's operand registers.

`core.numerics.four_bit_tiles` defines the layout of a tile. A thread loads 64 columns of both its
rows by one load of 16 bytes, and converts each pair of codes to two 16-bit numbers:

    MXFP4    the bits of a code are moved to where the dtype has exponent and mantissa, which makes
             it 2**-126 (float16: 2**-14) times itself, and it is multiplied by the scale and by the
             inverse, which is exact; so that bfloat16 has a number for the product of both, results
             are 2**-64 times as large
    INT4     with bfloat16 scales and no zero points: codes where they lie, or 8 bits below, are
             bfloat16 numbers below 2**-125, and one multiply-add makes (code - 8) * scale of one;
             these too are 2**-64 times as large, and scales are 0 or 2**-57 to 2**58
    INT4     else the code is or-ed to the mantissa of 128 (float16: 1,024); of the sum 128 and the
             zero point are taken off, which is exact, and the difference is multiplied by the scale

A number is thus rounded once, as `four_bit_tiles.dequantize` rounds it. A float16 scale is split
into two bfloat16 numbers; the product with the lower one is exact, and the rounding multiply-add
adds it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    asm_word,
    element,
    fragmented,
    i32,
    joined,
    load,
    mma,
    pairs,
    plus,
    pointer,
    times,
    word,
)

LINE = 128  # bytes; the rows of tiles in shared memory
HALVES = 0x00010001  # multiplied by a 16-bit number: that number twice
SHRUNK = 64


def serves(form: FourBitFormat, dtype: DTypeLike) -> bool:
    """Whether numbers of the format become the dtype's with one rounding."""
    if jnp.dtype(dtype) == jnp.float16:
        return form.scale != "bfloat16"  # whose exponents do not fit float16
    return jnp.dtype(dtype) == jnp.bfloat16


def widened(tile: Any, dtype: DTypeLike, form: FourBitFormat, *, interpret: bool) -> jax.Array:
    """Returns a tile's numbers [64, columns] in `dtype`, as register operands of wgmma; they are
    `shrunk` times the weights.

    Args:
        tile: The tile's bytes in shared memory, [lines, 128].
    """
    if interpret:
        wide = dequantize(tile[...].reshape(1, 1, form.tile_bytes), form, dtype)
        return (wide.astype(jnp.float32) * shrunk(form, dtype)).astype(dtype)
    out = plgpu.ShapeDtypeStruct((ROWS, form.columns), jnp.dtype(dtype), layout=plgpu.Layout.WGMMA)

    def run(_: Any, x: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.F16Type.get() if _is_f16(dtype) else ir.BF16Type.get())
        words = _numbers(_loaded(x, form, 0), form, dtype)
        registers = [vector.bitcast(pair, joined([each])) for each in words]
        return fragmented(registers, (ROWS, form.columns), mgpu.WGMMA_LAYOUT)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)(run)(tile)


def shrunk(form: FourBitFormat, dtype: DTypeLike) -> float:
    """Returns the factor of widened numbers relative to the weights, a power of two."""
    small = form.kind == "mxfp4" or _by_multiply_add(form)
    return 2.0**-SHRUNK if small and not _is_f16(dtype) else 1.0


def accumulated(
    total: jax.Array, tiles: Any, tokens: Sequence[Any], form: FourBitFormat
) -> jax.Array:
    """Returns total [64, N] + the product of tiles and tokens, by mma of single warps.

    wgmma of few columns takes as long as of 32 and more.

    Args:
        total: float32, in wgmma's layout.
        tiles: Consecutive tiles, [lines, 128].
        tokens: The tokens [N, columns] of each tile, swizzled.
    """
    count = len(tokens)
    dtype, columns = tokens[0].dtype, total.shape[1]
    kind = "f16" if _is_f16(dtype) else "bf16"
    product = plgpu.Layout.WGMMA

    def run(_: Any, total: Any, tiles: Any, *tokens: Any) -> Any:
        flat = list(total.registers.flat)
        sums = [[element(each, i) for each in flat[n : n + 2] for i in range(2)]
                for n in range(0, len(flat), 2)]  # fmt: skip
        rows = TokenRows()
        loaded = [_loaded(tiles, form, place * form.tile_bytes) for place in range(count)]
        for place in range(count):
            words = _numbers(loaded[place], form, dtype)
            for unit in range(form.columns // WORD_COLUMNS):
                for group in range(columns // 8):
                    right = rows.load(tokens[place], group, unit, form.columns)
                    for step in range(2):
                        first = 8 * unit + 4 * step
                        left = words[first : first + 4]
                        sums[group] = mma(kind, left, right[2 * step : 2 * step + 2], sums[group])
        registers = pairs([each for four in sums for each in four])
        return fragmented(registers, (ROWS, columns), mgpu.WGMMA_LAYOUT)

    out = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=product)
    refs = [plgpu.RefType(swizzled(dtype))] * count
    return plgpu.inline_mgpu(arg_types=(product, plgpu.RefType(), *refs), return_type=out)(run)(
        total, tiles, *tokens
    )


class TokenRows:
    """The right operand of a warp's mma, from swizzled tokens [N, columns].

    Eight tokens and 64 columns are 1,024 bytes, and chunk c of row i is at c ^ i. Lane 8 m + i
    holds the address of row i, of 8 columns, of the matrix m.
    """

    def __init__(self) -> None:
        lane = arith.andi(WarpgroupThread().index, word(31))
        row, matrix = arith.andi(lane, word(7)), arith.shrui(lane, word(3))
        chunk = arith.xori(matrix, row)
        halves = [arith.xori(chunk, word(4 * half)) for half in range(2)]
        self.places = [plus(times(row, LINE), times(each, 16)) for each in halves]

    def load(self, tokens: Any, group: int, unit: int, columns: int) -> list[Any]:
        """Loads four words: for 8 tokens and 32 columns, those of both steps of 16."""
        tile = group * (columns // UNIT) + unit // 2
        begin = llvm.ptrtoint(i32(), pointer(tokens, self.places[unit % 2], 1024 * tile))
        code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        return asm(code, [i32()] * 4, [begin], "=r,=r,=r,=r,r,~{memory}", convergent=True)


def _by_multiply_add(form: FourBitFormat) -> bool:
    """Whether 8 * scale is a number of the scales' dtype, which is also the tokens' dtype."""
    return form.kind == "int4" and form.scale == "bfloat16" and not form.zeros


def _is_f16(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) == jnp.float16


def _loaded(tiles: Any, form: FourBitFormat, fixed: int) -> tuple[list[Any], list[Any]]:
    """Loads the thread's words of codes, and of scales, of the tile that begins at byte `fixed`."""
    place = WarpgroupThread()
    at = times(place.index, 16)
    codes: list[Any] = []
    for unit in range(form.columns // UNIT):
        codes += load(tiles, at, fixed + unit * ROWS * UNIT // 2, 4)
    of_scales = times(plus(times(place.warp, 8), place.g), form.scale_bytes)
    return codes, load(tiles, of_scales, fixed + form.code_bytes, form.scale_bytes // 4)


def _numbers(
    loaded: tuple[list[Any], list[Any]], form: FourBitFormat, dtype: DTypeLike
) -> list[Any]:
    """Returns words of two numbers, in the order of wgmma's left operand."""
    kind = Float16Codes() if _is_f16(dtype) else Bfloat16Codes()
    codes, words = loaded
    scales, found = _scales(words, form, kind), []
    for unit in range(form.columns // WORD_COLUMNS):
        group = unit * WORD_COLUMNS // form.group
        rows = [kind.numbers(codes[2 * unit + r], scales[group][r], form) for r in range(2)]
        found += [rows[r][j] for j in range(4) for r in range(2)]
    return found


def _scales(words: list[Any], form: FourBitFormat, kind: Any) -> list[list[Any]]:
    """Returns, for each group and row, the factors and the zero points of `numbers`."""
    found = []
    for group in range(form.columns // form.group):
        rows = []
        for row in range(2):
            place = 2 * group + row
            if form.scale == "e8m0":
                rows.append(kind.power(words[0], place))
                continue
            each = words[place] if form.zeros else words[place // 2]
            twice = 0x1010 if form.zeros or place % 2 == 0 else 0x3232
            scale = _permute_bytes(each, twice)
            zero = kind.base_and(_permute_bytes(each, 0x3232)) if form.zeros else word(kind.eight)
            rows.append((kind.factors(scale, form), zero))
        found.append(rows)
    return found


class Bfloat16Codes:
    """The conversion of two codes to two bfloat16 numbers in a word."""

    place, type = 6, "bf16x2"  # of a code's lowest bit in the number
    base, eight = 0x4300 * HALVES, 0x4308 * HALVES  # 128 and 136

    def numbers(self, codes: Any, scale: Any, form: FourBitFormat) -> list[Any]:
        """Returns four pairs of numbers from a word of codes."""
        if form.kind == "mxfp4":
            return [self.powered(each, scale) for each in self.moved(codes)]
        factors, zero = scale
        if _by_multiply_add(form):
            return self.multiplied_and_added(codes, factors)
        found = []
        for j in range(4):
            wide = _and_or(_shifted(codes, -4 * j), 0xF * HALVES, self.base)
            less = asm_word(f"sub.rn.{self.type} $0, $1, $2;", wide, zero, movable=True)
            found.append(self.scaled(less, factors))
        return found

    def multiplied_and_added(self, codes: Any, factors: tuple[Any, ...]) -> list[Any]:
        """A number's eight lowest bits are an integer times 2**-133, whatever its exponent."""
        *powers, eight = factors
        code, found = f"fma.rn.{self.type} $0, $1, $2, $3;", []
        for j in range(4):
            some = _and(_shifted(codes, -8 * (j // 2)), (0xF0 if j % 2 else 0xF) * HALVES)
            found.append(asm_word(code, some, powers[j % 2], eight, movable=True))
        return found

    def moved(self, codes: Any) -> list[Any]:
        """Moves MXFP4's bits to the positions of this dtype."""
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
        """Returns 2**(byte - 127 + 126 - SHRUNK), twice in a word."""
        twice = _permute_bytes(words, (0x4040, 0x4141, 0x4242, 0x4343)[place])
        return plus(times(twice, 128), word((126 - SHRUNK << 7) * HALVES))

    def powered(self, x: Any, power: Any) -> Any:
        """Returns moved codes times the power."""
        return self.product(x, power)

    def factors(self, scale: Any, form: FourBitFormat) -> tuple[Any, ...]:
        """Returns the numbers that sum up to a scale, each twice in a word."""
        if _by_multiply_add(form):  # for codes in the lowest bits and 4 bits above, and their 8
            made = (2.0 ** (133 - SHRUNK), 2.0 ** (129 - SHRUNK), -(2.0 ** (3 - SHRUNK)))
            return tuple(self.product(scale, word(_broadcast_bf16x2(each))) for each in made)
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
        least = self.product(x, low)  # 4 bits times 3 bits
        return asm_word(f"fma.rn.{self.type} $0, $1, $2, $3;", x, high, least, movable=True)

    def base_and(self, zero: Any) -> Any:
        return arith.ori(zero, word(self.base))


class Float16Codes(Bfloat16Codes):
    """The conversion of two codes to two float16 numbers in a word."""

    place, type = 9, "f16x2"
    up = 0x7400 * HALVES  # 2**14
    base, eight = 0x6400 * HALVES, 0x6408 * HALVES  # 1,024 and 1,032

    def power(self, words: Any, place: int) -> Any:
        """Returns 2**(byte - 127), twice; 0 and inf where float16 has no such power."""
        byte = arith.andi(arith.shrui(words, word(8 * place)), word(0xFF))
        code = (
            "{ .reg .f32 a; .reg .b16 x; .reg .b32 b; shl.b32 b, $1, 23; max.u32 b, b, 0x400000; "
            "mov.b32 a, b; cvt.rn.f16.f32 x, a; mov.b32 $0, {x, x}; }"
        )
        return asm_word(code, byte, movable=True)

    def powered(self, x: Any, power: Any) -> Any:
        return self.product(self.product(x, word(self.up)), power)

    def factors(self, scale: Any, form: FourBitFormat) -> tuple[Any, ...]:
        return (scale,)


def _shifted(x: Any, by: int) -> Any:
    """Shifts to the left, or to the right if `by` is negative."""
    if by == 0:
        return x
    return arith.shli(x, word(by)) if by > 0 else arith.shrui(x, word(-by))


def _broadcast_bf16x2(x: float) -> int:
    """Returns a bfloat16 number, twice in a word."""
    return int(np.float32(x).view(np.uint32) >> 16) * HALVES


def _and_or(x: Any, mask: int, base: int) -> Any:
    """Returns (x & mask) | base by one instruction, into which LLVM does not merge its two."""
    return asm_word("lop3.b32 $0, $1, $2, $3, 0xEA;", x, word(mask), word(base), movable=True)


def _and(x: Any, mask: int) -> Any:
    return arith.andi(x, word(mask))


def _permute_bytes(x: Any, selected: int) -> Any:
    return asm_word(f"prmt.b32 $0, $1, 0, {selected};", x, movable=True)
