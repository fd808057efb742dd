"""FP8 weights, in shared memory as they are stored, as the left operand of wgmma in registers.

A tile [64, 128] has rows of 128 bytes, chunks of 16 swizzled: chunk c of row i is at c ^ (i % 8).
Warp w, lane 4 g + t has of each step of 16 columns the rows 16 w + g and 8 below, and columns 2 t
and 2 t + 1, and 8 behind: two bytes a load, of which the warp's lie in banks of their own. Columns
that are stored in pairs (`core.fp8_blocks.in_pairs`) are four bytes a load.

float16 has e4m3's numbers by one conversion. For bfloat16 the bits of an e4m3 number are moved to
where bfloat16 has them, which makes it 2**-120 times itself, and it is multiplied by 2**120: both
are exact, subnormal numbers included. The two NaN of e4m3 become 480, which no other number is.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.fp8_blocks import BLOCK
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, vector
from jaxattn.kernels.hopper.registers import (
    Thread,
    asm_word,
    fragmented,
    i32,
    joined,
    load,
    plus,
    times,
    word,
)

ROWS = 64  # that one wgmma multiplies
# A tile's rows are as wide as the swizzle. (A tiling would want a tile of 8 rows of them.)
SWIZZLED = (plgpu.SwizzleTransform(BLOCK),)  # type: ignore[abstract]
HALF_WARP = 8 * BLOCK  # bytes from a row to that 8 below
# Of a word whose lower half has two e4m3 numbers: each in the upper byte of a half.
SPREAD = (
    "{ .reg .b32 x, y; prmt.b32 x, $1, 0, 0x1404; shr.u32 y, x, 4; and.b32 y, y, 0x07f007f0; "
    "and.b32 x, x, 0x80008000; or.b32 x, x, y; mul.rn.bf16x2 $0, x, $2; }"
)
# The same of the bytes 0 and 2 of a word, and of its bytes 1 and 3.
EVEN = (
    "{ .reg .b32 x, y; shl.b32 x, $1, 8; shl.b32 y, $1, 4; and.b32 y, y, 0x07f007f0; "
    "and.b32 x, x, 0x80008000; or.b32 x, x, y; mul.rn.bf16x2 $0, x, $2; }"
)
ODD = (
    "{ .reg .b32 x, y; shr.u32 y, $1, 4; and.b32 y, y, 0x07f007f0; "
    "and.b32 x, $1, 0x80008000; or.b32 x, x, y; mul.rn.bf16x2 $0, x, $2; }"
)
# Of the bytes 0 and 2, or 1 and 3.
SELECTED = {EVEN: 0x2020, ODD: 0x3131}
TWO_TO_120 = 0x7B807B80  # as bfloat16, twice


def widened(
    tile: Any, dtype: Any, first: int = 0, width: int = BLOCK, *, paired: bool = False
) -> jax.Array:
    """The tile's columns [64, width] from `first` on in `dtype`, as wgmma takes them from
    registers.

    Args:
        paired: the columns are stored in pairs.
    """
    out = plgpu.ShapeDtypeStruct((ROWS, width), dtype, layout=plgpu.Layout.WGMMA)
    half = jnp.dtype(dtype) == jnp.float16
    steps = range(first // 16, (first + width) // 16)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),), return_type=out)
    return run(lambda _, x: _widened(x, half, steps, paired))(tile)


def plain_product(weights: jax.Array, tokens: jax.Array) -> jax.Array:
    """A step's product in the interpreter, whose wgmma takes nothing from registers."""
    exact = lax.Precision.HIGHEST
    return jnp.dot(weights.astype(jnp.float32), tokens.astype(jnp.float32).T, precision=exact)


def _widened(tile: Any, half: bool, steps: range, paired: bool) -> Any:
    place = Thread()
    row = plus(times(place.warp, 16), place.g)
    inside = plus(times(row, BLOCK), times(place.t, 4 if paired else 2))
    pair = ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())
    words = _of_pairs if paired else _of_columns
    registers = []
    for step in steps:
        at = plus(inside, times(arith.xori(word(step), place.g), 16))
        for wide in words(tile, at, half):
            registers.append(vector.bitcast(pair, joined([wide])))
    return fragmented(registers, (ROWS, 16 * len(steps)), mgpu.WGMMA_LAYOUT)


def _of_columns(tile: Any, at: Any, half: bool) -> Iterator[Any]:
    """The thread's words of a step: two columns of both rows, then those 8 behind."""
    for columns in range(2):
        for rows in range(2):
            two = _two_bytes(tile, at, 8 * columns + HALF_WARP * rows)
            yield _as_float16(two) if half else _as_bfloat16(two)


def _of_pairs(tile: Any, at: Any, half: bool) -> Iterator[Any]:
    """The same words of columns in pairs."""
    both = [load(tile, at, HALF_WARP * rows, 1)[0] for rows in range(2)]
    for code in (EVEN, ODD):
        for four in both:
            if half:
                two = asm_word(f"prmt.b32 $0, $1, 0, {SELECTED[code]};", four, movable=True)
                yield _as_float16(two)
            else:
                yield asm_word(code, four, word(TWO_TO_120), movable=True)


def _two_bytes(tile: Any, offset: Any, fixed: int) -> Any:
    """In the lower half of a word."""
    (two,) = load(tile, offset, fixed, 1, ir.IntegerType.get_signless(16))
    return arith.extui(i32(), two)


def _as_bfloat16(two: Any) -> Any:
    return asm_word(SPREAD, two, word(TWO_TO_120), movable=True)


def _as_float16(two: Any) -> Any:
    code = "{ .reg .b16 x, y; mov.b32 {x, y}, $1; cvt.rn.f16x2.e4m3x2 $0, x; }"
    return asm_word(code, two, movable=True)
