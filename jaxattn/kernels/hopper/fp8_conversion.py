"""Conversion of FP8 numbers to 16 bits, from shared memory to wgmma's operand registers.

A tile [64, 128] has rows of 128 bytes in swizzled chunks of 16: chunk c of row i is at c ^ (i % 8).
In each step of 16 columns, warp w, lane 4 g + t has the rows 16 w + g and 8 below. Its columns are
2 t and 2 t + 1, and those 8 further on. That is two bytes per load, and a warp's loads hit
different banks. Columns stored in pairs (`interleave_columns`) take four bytes per load.

One conversion turns e4m3 into float16. For bfloat16 the bits of an e4m3 number are moved to
bfloat16's positions, which makes it 2**-120 times itself, and it is multiplied by 2**120. Both are
exact, subnormal numbers included. The two NaN of e4m3 become 480, which no other number is.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm_word,
    element,
    fragmented,
    i32,
    joined,
    load,
    plus,
    times,
    word,
)

ROWS = 64  # rows of one wgmma
# A tile's rows are as wide as the swizzle. (A tiling would need a tile of 8 rows of them.)
SWIZZLED = (plgpu.SwizzleTransform(BLOCK),)  # type: ignore[abstract]
HALF_WARP = 8 * BLOCK  # bytes from a row to the one 8 below
# For a word whose lower half has two e4m3 numbers: each goes to the lower byte of a half, with its
# sign in all bits of the upper byte.
SPREAD = (
    "{ .reg .b32 x; prmt.b32 x, $1, 0, 0x9180; shl.b32 x, x, 4; and.b32 x, x, 0x87f087f0; "
    "mul.rn.bf16x2 $0, x, $2; }"
)
# The same for the bytes 0 and 2 of a word, and for its bytes 1 and 3, up to the multiplication.
EVEN = (
    "{ .reg .b32 x, y; shl.b32 x, $1, 8; shl.b32 y, $1, 4; and.b32 y, y, 0x07f007f0; "
    "and.b32 x, x, 0x80008000; or.b32 "
)
ODD = (
    "{ .reg .b32 x, y; shr.u32 y, $1, 4; and.b32 y, y, 0x07f007f0; "
    "and.b32 x, $1, 0x80008000; or.b32 "
)
MOVED, MULTIPLIED = "$0, x, y; }", "x, x, y; mul.rn.bf16x2 $0, x, $2; }"
# Selectors of the bytes 0 and 2, or 1 and 3.
SELECTED = {EVEN: 0x2020, ODD: 0x3131}
TWO_TO_120 = 0x7B807B80  # in bfloat16, twice


def widened(
    tile: Any, dtype: Any, first: int = 0, width: int = BLOCK, *, paired: bool = False
) -> jax.Array:
    """Returns the tile's columns [64, width] from `first` on in `dtype`, as register operands of
    wgmma.

    Args:
        paired: Whether the columns are stored in pairs.
    """
    return _made(_of_pairs if paired else _of_columns, tile, dtype, first, width)


def moved(tile: Any, dtype: Any) -> jax.Array:
    """Returns the tile [64, 128], with columns in pairs, after the first half of `widened`;
    `multiplied` is the rest.

    The operand registers of a wgmma must not be written while it runs. These are other registers.
    """
    return _made(partial(_of_pairs, half_way=True), tile, dtype, 0, BLOCK)


def multiplied(numbers: jax.Array) -> jax.Array:
    """Returns the result of `widened` from `moved` numbers."""
    half, layout = numbers.dtype == jnp.float16, plgpu.Layout.WGMMA

    def run(_: Any, x: Any) -> Any:
        registers = []
        for each in x.registers.flat:
            two = element(vector.bitcast(ir.VectorType.get((1,), i32()), each), 0)
            wide = _as_float16(two) if half else _times_two_to_120(two)
            registers.append(vector.bitcast(each.type, joined([wide])))
        return fragmented(registers, x.shape, mgpu.WGMMA_LAYOUT)

    out = plgpu.ShapeDtypeStruct(numbers.shape, numbers.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(run)(numbers)


def plain_product(weights: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns a step's product in the interpreter, whose wgmma takes no register operand."""
    exact = lax.Precision.HIGHEST
    return jnp.dot(weights.astype(jnp.float32), tokens.astype(jnp.float32).T, precision=exact)


def _made(words: Any, tile: Any, dtype: Any, first: int, width: int) -> jax.Array:
    out = plgpu.ShapeDtypeStruct((ROWS, width), dtype, layout=plgpu.Layout.WGMMA)
    half = jnp.dtype(dtype) == jnp.float16
    steps = range(first // 16, (first + width) // 16)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),), return_type=out)
    return run(lambda _, x: _widened(words, x, half, steps))(tile)


def _widened(words: Any, tile: Any, half: bool, steps: range) -> Any:
    place = WarpgroupThread()
    row = plus(times(place.warp, 16), place.g)
    inside = plus(times(row, BLOCK), times(place.t, 2 if words is _of_columns else 4))
    pair = ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())
    registers = []
    for step in steps:
        at = plus(inside, times(arith.xori(word(step), place.g), 16))
        for wide in words(tile, at, half):
            registers.append(vector.bitcast(pair, joined([wide])))
    return fragmented(registers, (ROWS, 16 * len(steps)), mgpu.WGMMA_LAYOUT)


def _of_columns(tile: Any, at: Any, half: bool) -> Iterator[Any]:
    """Yields the thread's words of a step: two columns of both rows, then those 8 further on."""
    for columns in range(2):
        for rows in range(2):
            two = _two_bytes(tile, at, 8 * columns + HALF_WARP * rows)
            yield _as_float16(two) if half else _as_bfloat16(two)


def _of_pairs(tile: Any, at: Any, half: bool, half_way: bool = False) -> Iterator[Any]:
    """Yields the same words, from columns stored in pairs."""
    both = [load(tile, at, HALF_WARP * rows, 1)[0] for rows in range(2)]
    for code in (EVEN, ODD):
        for four in both:
            if half:
                two = asm_word(f"prmt.b32 $0, $1, 0, {SELECTED[code]};", four, movable=True)
                yield two if half_way else _as_float16(two)
            elif half_way:
                yield asm_word(code + MOVED, four, movable=True)
            else:
                yield asm_word(code + MULTIPLIED, four, word(TWO_TO_120), movable=True)


def _two_bytes(tile: Any, offset: Any, fixed: int) -> Any:
    """Loads two bytes into the lower half of a word."""
    (two,) = load(tile, offset, fixed, 1, ir.IntegerType.get_signless(16))
    return arith.extui(i32(), two)


def _as_bfloat16(two: Any) -> Any:
    return asm_word(SPREAD, two, word(TWO_TO_120), movable=True)


def _times_two_to_120(two: Any) -> Any:
    return asm_word("mul.rn.bf16x2 $0, $1, $2;", two, word(TWO_TO_120), movable=True)


def _as_float16(two: Any) -> Any:
    code = "{ .reg .b16 x, y; mov.b32 {x, y}, $1; cvt.rn.f16x2.e4m3x2 $0, x; }"
    return asm_word(code, two, movable=True)
