"""e4m3 keys and values, in shared memory as they are stored, as wgmma operands in registers.

One conversion turns two stored numbers into float16, so both products take float16: queries,
divided by a power of two per packed row, and P. Scales multiply scores, and the outputs once.

A step's 64 tokens lie in shared memory as TMA stores them, in swizzled tiles of 8 tokens of 128
dims (of 64, if a head has only 64). A thread keeps numbers that are adjacent in memory in adjacent
registers, which permutes keys and outputs. For warp w, lane 4 g + t, rows g + 8 h of a warp's 16,
and a block being a tile's dims:

    keys      token 16 w + g + 8 h; column 16 s + 8 k + 2 t + i of a block of 4 n numbers is its
              dim n t + 4 s + 2 k + i
    values    tokens as they come; row 64 j + 16 w + 8 h + g of a block of 128 is its dim
              32 w + 4 g + 2 j + h, and row 16 w + 8 h + g of one of 64 its dim 16 w + 2 g + h
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import FP8
from jaxattn.core.numerics.matmul import EXPONENT_AT, FLOAT_BIAS, power
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm_word,
    element,
    fragmented,
    joined,
    load,
    plus,
    single,
    store,
    times,
    word,
)

# Selectors of `prmt`: bytes 0 and 1 of two words, interleaved, or bytes 2 and 3.
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362
TILE_TOKENS = 8
# A row's largest query is from 2**14 to 2**15: float16 then has its numbers down to 2**-38 of it.
QUERY_EXPONENT = 14
# A float16 P is larger by this power of two, with values of e4m3 and of float16. Their largest
# number times this is not infinite in float32, and float16 keeps numbers down to 2**-38 of a row's
# largest. Smaller numbers become 0: a dim loses them even if the keys of larger weights have values
# of 0 there.
P_EXPONENT = 14


def block_width(head_dim: int) -> int:
    """Returns the dims of a tile."""
    return min(head_dim, 128)


def tiles_of(head_dim: int) -> Any:
    """Returns the transforms of keys and values in shared memory."""
    return swizzled(FP8, block_width(head_dim))


def half_queries(
    q: jax.Array, wide: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns `divided_queries` in float16."""
    return divided_queries(q, wide, QUERY_EXPONENT, jnp.float16)


def divided_queries(
    q: jax.Array, wide: Callable[[jax.Array], jax.Array], upper: int, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Returns queries [N, D] in `dtype`, and float32 [N], the factors of their scores, which are
    powers of two.

    Args:
        q: float32.
        wide: Broadcasts a number of each row over the row's dims.
        upper: The largest query of a row becomes 2**upper to 2**(upper + 1).
    """
    largest = jnp.max(jnp.abs(q), axis=1)
    exponent = lax.shift_right_logical(lax.bitcast_convert_type(largest, jnp.int32), EXPONENT_AT)
    # Inf and NaN, and float32's largest and smallest numbers, are divided by less.
    exponent = jnp.minimum(jnp.maximum(exponent, upper + 1), 2 * FLOAT_BIAS)
    q = q * wide(power(2 * FLOAT_BIAS + upper - exponent))
    return q.astype(dtype), power(exponent - upper)


def in_order(x: jax.Array) -> jax.Array:
    """Returns [..., D] with the dims in the order of the keys' columns."""
    width = block_width(x.shape[-1])
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // width, 4, width // 16, 2, 2)
    return jnp.moveaxis(blocks, -4, -2).reshape(x.shape)


def order_of(head_dim: int) -> Callable[[Any], tuple[Any, Any]]:
    """Returns, for words, a function of the first of four neighboring columns of queries
    `in_order`. It gives the two dims from which on a thread has two numbers each."""
    width = block_width(head_dim)

    def dims(column: Any) -> tuple[Any, Any]:
        inside = arith.andi(column, word(width - 1))
        step, lane = arith.shrui(inside, word(4)), arith.andi(inside, word(7))
        first = plus(
            arith.subi(column, inside),
            times(arith.shrui(lane, word(1)), width // 4),
            times(step, 4),
            arith.andi(arith.shrui(inside, word(2)), word(2)),
        )
        return first, plus(first, word(width // 4))

    return dims


def _e4m3_to_f16x2(four: Any, half: int) -> Any:
    """Returns two e4m3 numbers, the lower or upper half of a word, as float16."""
    code = "{ .reg .b16 x<2>; mov.b32 {x0, x1}, $1; cvt.rn.f16x2.e4m3x2 $0, "
    return asm_word(code + f"x{half}; }}", four, movable=True)


def _select_bytes(first: Any, second: Any, which: int) -> Any:
    return asm_word(f"prmt.b32 $0, $1, $2, {which};", first, second, movable=True)


def _fragment(words: list[Any], shape: tuple[int, int]) -> Any:
    """Returns an array from words of two float16 numbers each."""
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    return fragmented([vector.bitcast(pair, joined([x])) for x in words], shape, mgpu.WGMMA_LAYOUT)


class GqaFp8Operands:
    """The wgmma operands of a step's keys or values [64, D].

    Args:
        head_dim: D, 64, 128 or 256.
    """

    def __init__(self, head_dim: int):
        self.width = block_width(head_dim)
        self.blocks = head_dim // self.width
        self.tile = TILE_TOKENS * self.width  # bytes
        self.page = plgpu.RefType(tiles_of(head_dim))

    def keys(self, page: Any, block: int) -> jax.Array:
        """float16 [64 tokens, a block's dims], the dims in the order of `in_order`."""
        return self._run(self._keys, (PAGE, self.width), page, block)

    def values(self, page: Any, block: int) -> jax.Array:
        """float16 [a block's dims, 64 tokens], the dims in an order that `store` undoes."""
        return self._run(self._values, (self.width, PAGE), page, block)

    def clear(self, page: Any, begin: jax.Array, end: jax.Array) -> None:
        """Writes zeros over the tokens before `begin` and from `end` on."""

        def run(ctx: Any, begin: Any, end: Any, page: Any) -> None:
            self._clear(page, single(begin), single(end))

        splat = plgpu.Layout.WG_SPLAT
        plgpu.inline_mgpu(arg_types=(splat, splat, self.page))(run)(begin, end, page)

    def store(self, target: Any, out: jax.Array, block: int) -> None:
        """Stores a block's output [dims, N] to its dims of float32 `target` [N, D and a margin]."""
        columns, pitch = out.shape[1], target.shape[-1]
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(
            lambda ctx, to, some: self._store(to, some, block, columns, pitch)
        )(target, out)

    def _run(self, function: Any, shape: tuple[int, int], page: Any, block: int) -> jax.Array:
        out = plgpu.ShapeDtypeStruct(shape, jnp.float16, plgpu.Layout.WGMMA)
        run = plgpu.inline_mgpu(arg_types=(self.page,), return_type=out)
        return run(lambda ctx, x: function(x, shape, block))(page)

    def _chunk(self, chunk: Any, token: Any) -> Any:
        """Returns the byte offset of a 16-byte chunk in a token's row; `token` is the index in its
        tile of 8."""
        if self.width < 128:
            token = arith.shrui(token, word(1))
        return times(arith.xori(chunk, token), 16)

    def _keys(self, page: Any, shape: tuple[int, int], block: int) -> Any:
        place, count = WarpgroupThread(), self.width // 64
        rows = times(place.warp, 2 * self.blocks * self.tile)
        line = plus(rows, times(place.g, self.width))
        words: list[list[Any]] = [[], []]
        for j in range(count):
            chunk = plus(times(place.t, count), word(j))
            at = plus(line, self._chunk(chunk, place.g))
            for row in range(2):
                words[row] += load(page, at, (row * self.blocks + block) * self.tile, 4)
        wide = [
            _e4m3_to_f16x2(words[row][step], half)
            for step in range(4 * count)
            for half in range(2)
            for row in range(2)
        ]
        return _fragment(wide, shape)

    def _values(self, page: Any, shape: tuple[int, int], block: int) -> Any:
        place, wide_block = WarpgroupThread(), self.width == 128
        if wide_block:
            chunk = plus(times(place.warp, 2), arith.shrui(place.g, word(2)))
            inside = times(arith.andi(place.g, word(3)), 4)
        else:
            chunk, inside = place.warp, times(place.g, 2)
        at = []
        for i in range(2):
            token = plus(times(place.t, 2), word(i))
            at.append(plus(times(token, self.width), self._chunk(chunk, token), inside))
        pairs = []
        for pair in range(PAGE // TILE_TOKENS):
            fixed = (pair * self.blocks + block) * self.tile
            if wide_block:
                two = [load(page, here, fixed, 1)[0] for here in at]
                pairs.append(
                    [_select_bytes(two[0], two[1], which) for which in (LOW_BYTES, HIGH_BYTES)]
                )
            else:
                short = ir.IntegerType.get_signless(16)
                two = [arith.extui(word(0).type, *load(page, x, fixed, 1, of=short)) for x in at]
                pairs.append([_select_bytes(two[0], two[1], LOW_BYTES)])
        wide = [
            _e4m3_to_f16x2(pair[j], h)
            for j in range(self.width // 64)
            for pair in pairs
            for h in (0, 1)
        ]
        return _fragment(wide, shape)

    def _clear(self, page: Any, begin: Any, end: Any) -> None:
        """Clears half a token's row per thread."""
        index, zeros = WarpgroupThread().index, joined([word(0)] * 4)
        token, half = arith.shrui(index, word(1)), arith.andi(index, word(1))
        tile, inside = arith.shrui(token, word(3)), arith.andi(token, word(7))
        here = plus(times(tile, self.blocks * self.tile), times(inside, self.width))
        here = plus(here, times(half, self.width // 2))
        less, beyond = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge
        outside = arith.ori(arith.cmpi(less, token, begin), arith.cmpi(beyond, token, end))
        with utils.when(outside):
            for block in range(self.blocks):
                for at in range(0, self.width // 2, 16):
                    store(zeros, page, here, block * self.tile + at)

    def _store(self, target: Any, out: Any, block: int, columns: int, pitch: int) -> None:
        place, halves = WarpgroupThread(), self.width // 64
        registers = out.registers.reshape(halves, columns // 8, 2)
        first = plus(times(place.warp, 16 * halves), times(place.g, 2 * halves))
        first = plus(first, word(block * self.width))
        for n in range(columns // 8):
            for i in range(2):
                numbers = [element(x, i) for x in registers[:, n, :].flat]
                column = plus(times(place.t, 2), word(8 * n + i))
                store(joined(numbers), target, times(plus(times(column, pitch), first), 4))
