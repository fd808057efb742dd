"""Masks of pairs of tokens whose smallest common block has halves of 2**level tokens, as operands.

Rows and columns of [64, 64] are tokens. A register holds both numbers of a pair of columns, so that
its mask is a word. The smallest block with both tokens depends only on row ^ column, so half of a
thread's words are the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK, TILE, iota
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    fragmented,
    i32,
    plus,
    single,
    times,
    word,
)

SPLAT = plgpu.Layout.WG_SPLAT
LOW, HIGH = 0xFFFF, 0xFFFF0000  # the first column of a pair, and the second
ONES = 0x3F803F80  # 1 and 1 in bfloat16


def up_to_each(level: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Returns 1, else 0, for the columns of a row's own half: columns up to the row in a second
    half, columns after it in a first half.

    zero: a `register_constant`; None means the interpreter.
    """
    if zero is None:
        row, column = (iota((CHUNK, CHUNK), axis) for axis in (0, 1))
        of_row, of_column = (_shifted(x, level) for x in (row, column))
        chosen = (of_row == of_column) & (lax.rem(of_row, 2) == (column <= row).astype(jnp.int32))
        return jnp.where(chosen, 1.0, 0.0).astype(jnp.bfloat16)

    def run(_: Any, level: Any, zero: Any) -> Any:
        place = TokenPairs(single(level))
        same, ones = place.apart(0), arith.ori(word(ONES), single(zero))

        def register(column: int, row: int) -> Any:
            # The bits of columns in the same half: a second half if and only if the column is up to
            # the row.
            alike = arith.xori(arith.xori(place.up_to(column, row), place.second(row)), word(-1))
            return arith.andi(arith.andi(same[column ^ row], alike), ones)

        return place.tile(register)

    out = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.bfloat16, layout=TILE)
    return plgpu.inline_mgpu(arg_types=(SPLAT, SPLAT), return_type=out)(run)(level, zero)


def across_halves(
    x: jax.Array, level: jax.Array, zero: jax.Array | None, *, second: bool
) -> jax.Array:
    """Returns x, else 0, for rows in second halves and columns in the first halves before them; or
    for rows in first halves and columns in the second halves after them."""
    if zero is None:
        of_row, of_column = (_shifted(iota((CHUNK, CHUNK), axis), level) for axis in (0, 1))
        step = 1 if second else -1
        met = (lax.rem(of_row, 2) == int(second)) & (of_column == of_row - step)
        return jnp.where(met, x, jnp.zeros((), x.dtype))

    def run(_: Any, x: Any, level: Any, zero: Any) -> Any:
        place = TokenPairs(single(level))
        neighbors, values = place.apart(1), list(x.registers.flat)

        def register(column: int, row: int) -> Any:
            bits = llvm.bitcast(i32(), values[2 * column + row])
            rows = place.second(row) if second else arith.xori(place.second(row), word(-1))
            kept = arith.andi(arith.andi(neighbors[column ^ row], rows), bits)
            return arith.ori(kept, single(zero))

        return place.tile(register)

    out = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.bfloat16, layout=TILE)
    types = (TILE, SPLAT, SPLAT)
    return plgpu.inline_mgpu(arg_types=types, return_type=out)(run)(x, level, zero)


def _shifted(x: jax.Array, level: jax.Array) -> jax.Array:
    return lax.shift_right_logical(x, jnp.broadcast_to(level, x.shape))


class TokenPairs:
    """A thread's pairs of columns: 8 column + 2 t and the next, in rows 16 warp + g + 8 row."""

    def __init__(self, level: Any):
        thread = WarpgroupThread()
        self.level = level
        self.first_row = plus(times(thread.warp, 16), thread.g)
        self.first_column = times(thread.t, 2)

    def _both(self, first: Any, second: Any) -> Any:
        zero = word(0)
        return arith.ori(
            arith.select(first, word(LOW), zero), arith.select(second, word(HIGH), zero)
        )

    def apart(self, blocks: int) -> list[Any]:
        """Returns masks by `column ^ row`: whether row and column are in the same block of 2**level
        tokens, or in the two blocks of one pair."""
        lead, words = arith.xori(self.first_row, self.first_column), []
        for at in range(8):
            either = arith.xori(lead, word(8 * at))
            equal = [
                arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(x, self.level), word(blocks))
                for x in (either, arith.xori(either, word(1)))
            ]
            words.append(self._both(*equal))
        return words

    def up_to(self, column: int, row: int) -> Any:
        """Returns the mask of columns that are at most the row."""
        lead, at = arith.subi(self.first_row, self.first_column), 8 * (column - row)
        return self._both(
            *(arith.cmpi(arith.CmpIPredicate.sge, lead, word(at + i)) for i in range(2))
        )

    def second(self, row: int) -> Any:
        """Returns all ones if the row is in a second half."""
        half = arith.shrui(plus(self.first_row, word(8 * row)), self.level)
        return arith.subi(word(0), arith.andi(half, word(1)))

    def tile(self, register: Any) -> Any:
        """Returns the bfloat16 array of words by column and row."""
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        words = [register(i // 2, i % 2) for i in range(16)]
        return fragmented([llvm.bitcast(pair, x) for x in words], (CHUNK, CHUNK), mgpu.WGMMA_LAYOUT)
