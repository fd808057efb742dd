"""FP8 tokens, in shared memory as they are stored, as left operands of wgmma in registers.

Widened numbers never go through shared memory, whose bandwidth is nearly used up. One conversion
turns two stored numbers into float16, without their scales. The scales multiply other numbers:
`plus_scaled` multiplies scores, and P is multiplied by `scales_of_keys`. Both need `turn_scales`
first, which puts a page's scales side by side. `halve_queries` converts queries to float16, scaled
by a power of two.

A page's 64 tokens lie there in one of two ways, `Fp8PageLayout`. Block-scaled tokens lie as in the
cache, 656 bytes each, so that the same 16 bytes of eight tokens lie in different banks. Other
caches have tiles of 128 bytes of each token, with swizzled chunks. A thread keeps numbers that are
adjacent in memory in adjacent registers, which permutes them. For warp w, lane 4 g + t, and rows
g + 8 h of a warp's 16:

    keys    token 16 w + g + 8 h; column 16 s + 8 k + 2 t + i of a block is dim 32 t + 4 s + 2 k + i
    values  row 64 j + 16 w + 8 h + g of a block is its dim 32 w + 4 g + 2 j + h; tokens as they
            come

The queries therefore come in the order of `order_queries`, and `store_output` restores the order of
the dims.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BLOCK, BYTES
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.mlir import arith, ir, mgpu, utils, vector
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    asm_word,
    element,
    f32,
    fragmented,
    i32,
    joined,
    load,
    plus,
    reduce_lanes,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.mla.decode.latent_tile import (
    BLOCKS,
    RANK,
    ROPE,
    SCALE_BYTES,
    SWIZZLED,
)

TILE = PAGE * BLOCK  # bytes
ROW_BYTES = RANK + SCALE_BYTES + 2 * ROPE  # of a block-scaled token
# Selectors of `prmt`: bytes 0 and 1 of two words, interleaved, or bytes 2 and 3.
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362
# Byte offset at which the first row of the scores ends: its margin holds each warp's largest scale.
LARGEST = 4 * PAGE
# Float16 keeps a query's numbers down to 2**-33 of the largest of the 512; rope numbers may be 64
# times as large before they determine the exponent.
QUERY_EXPONENT, ROPE_EXCESS = 8, 6
FLOAT_BIAS = 127


@dataclasses.dataclass(frozen=True)
class Fp8PageLayout:
    """The addresses of a page's bytes, counted from its first one.

    Attributes:
        pitch: Bytes from a token to the next.
        block: Bytes from a token's block of 128 numbers to the next block.
        rope: Offset of a token's first rope number.
        swizzled: Whether chunk c of token i is at c ^ (i % 8).
    """

    pitch: int
    block: int
    rope: int
    swizzled: bool

    @classmethod
    def of(cls, dtype: Any) -> "Fp8PageLayout":
        if dtype == BYTES:
            return cls(ROW_BYTES, BLOCK, RANK + SCALE_BYTES, False)
        # The 64 rope numbers come in a tile together with the 64 numbers before them.
        return cls(BLOCK, TILE, BLOCKS * TILE + BLOCK - ROPE, True)


def order_queries(q: jax.Array) -> jax.Array:
    """Returns queries [..., 576] with their columns in the order of the keys' columns."""
    blocks = q[..., :RANK].reshape(*q.shape[:-1], BLOCKS, 4, 8, 2, 2)
    rope = q[..., RANK:].reshape(*q.shape[:-1], 4, 4, 2, 2)
    blocks = jnp.moveaxis(blocks, -4, -2).reshape(*q.shape[:-1], RANK)
    rope = jnp.moveaxis(rope, -4, -2).reshape(*q.shape[:-1], ROPE)
    return jnp.concatenate([blocks, rope], axis=-1)


def _e4m3_to_f16x2(four: Any, half: int) -> Any:
    """Returns two e4m3 numbers, the lower or upper half of a word, as float16."""
    code = "{ .reg .b16 x<2>; mov.b32 {x0, x1}, $1; cvt.rn.f16x2.e4m3x2 $0, "
    return asm_word(code + f"x{half}; }}", four, movable=True)


def _select_bytes(first: Any, second: Any, which: int) -> Any:
    return asm_word(f"prmt.b32 $0, $1, $2, {which};", first, second, movable=True)


def _fragment(words: list[Any], shape: tuple[int, int], dtype: Any) -> Any:
    """Returns an array from words of two numbers each."""
    pair = ir.VectorType.get((2,), dtype)
    return fragmented([vector.bitcast(pair, joined([x])) for x in words], shape, mgpu.WGMMA_LAYOUT)


def _wide_keys(words: list[list[Any]]) -> list[Any]:
    """Widens two tokens' words, in the order of a fragment's registers."""
    return [
        _e4m3_to_f16x2(words[row][step], half)
        for step in range(len(words[0]))
        for half in range(2)
        for row in range(2)
    ]


def _chunks(
    page: Any, lines: Fp8PageLayout, place: WarpgroupThread, row: int, of_thread: Any, first: int
) -> list[Any]:
    """Loads the words of a 16-byte chunk of the thread's token g + 8 * row. The offset counts from
    the token's byte `first`, where a block or the rope numbers begin."""
    token = plus(times(place.warp, 16), place.g)
    first_chunk = first % BLOCK // 16 if lines.swizzled else 0
    chunk = plus(of_thread, word(first_chunk)) if first_chunk else of_thread
    if lines.swizzled:
        chunk = arith.xori(chunk, place.g)
    at = plus(times(token, lines.pitch), times(chunk, 16))
    return load(page, at, first - 16 * first_chunk + 8 * row * lines.pitch, 4)


def _keys(page: Any, lines: Fp8PageLayout, block: int) -> Any:
    place, first = WarpgroupThread(), block * lines.block
    chunks = [plus(times(place.t, 2), word(j)) for j in range(2)]
    words = [
        sum((_chunks(page, lines, place, row, c, first) for c in chunks), []) for row in range(2)
    ]
    return _fragment(_wide_keys(words), (PAGE, BLOCK), ir.F16Type.get())


def _rope(page: Any, lines: Fp8PageLayout, scaled: bool) -> Any:
    place = WarpgroupThread()
    if not scaled:
        words = [_chunks(page, lines, place, row, place.t, lines.rope) for row in range(2)]
        return _fragment(_wide_keys(words), (PAGE, ROPE), ir.F16Type.get())
    chunks = [plus(times(place.t, 2), word(j)) for j in range(2)]
    words = [
        sum((_chunks(page, lines, place, row, c, lines.rope) for c in chunks), [])
        for row in range(2)
    ]
    in_order = [words[row][i] for i in range(8) for row in range(2)]
    return _fragment(in_order, (PAGE, ROPE), ir.BF16Type.get())


def _compute_scale_offset(warp: Any, block: Any, four: Any) -> Any:
    """The byte offset from a warp's first scale to those of four of its tokens for a block, after
    `_turn_scales`: in the place of its token 4 (block ^ warp) + four. Of lanes that read 16 bytes
    each, the hardware serves eight at a time. These eight are two neighboring warps' reads of one
    block, in different banks."""
    return times(plus(times(arith.xori(block, warp), 4), four), ROW_BYTES)


def _sync_warp() -> None:
    """Makes what a warp's lanes have written visible to all of them."""
    asm("bar.warp.sync 0xffffffff;", [], [], "~{memory}")


def _turn_scales(page: Any, scores: Any) -> None:
    """Transposes the scales of a warp's 16 tokens, which are also those that the warp may have
    cleared. A thread has the scales of block t of tokens g and g + 8."""
    place = WarpgroupThread()
    tokens = times(place.warp, 16 * ROW_BYTES)
    mine = plus(tokens, times(place.g, ROW_BYTES), times(place.t, 4))
    _sync_warp()
    words = [load(page, mine, RANK + 8 * row * ROW_BYTES, 1)[0] for row in range(2)]
    _sync_warp()  # all lanes have read their scales
    to = plus(tokens, _compute_scale_offset(place.warp, place.t, arith.shrui(place.g, word(2))))
    to = plus(to, times(arith.andi(place.g, word(3)), 4))
    for row, x in enumerate(words):
        store(x, page, to, RANK + 2 * row * ROW_BYTES)
    both = [arith.bitcast(f32(), x) for x in words]
    most = reduce_lanes(arith.maxnumf, arith.maxnumf(*both), 32)
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, plus(place.g, place.t), word(0))):
        store(most, scores, times(place.warp, 4), LARGEST)
    _sync_warp()


def _plus_scaled(scores: Any, product: Any, page: Any, block: int) -> Any:
    place = WarpgroupThread()
    two, contract = ir.VectorType.get((2,), f32()), arith.FastMathFlags.contract
    token = plus(times(place.warp, 16 * ROW_BYTES), times(arith.andi(place.g, word(3)), 4))
    token = plus(
        token, _compute_scale_offset(place.warp, word(block), arith.shrui(place.g, word(2)))
    )
    of_rows = []
    for row in range(2):
        (scale,) = load(page, token, RANK + 2 * row * ROW_BYTES, 1)
        of_rows.append(vector.broadcast(two, arith.bitcast(f32(), scale)))
    total = scores.registers.reshape(-1, 2).copy()
    for at, x in np.ndenumerate(product.registers.reshape(-1, 2)):
        x = arith.mulf(x, of_rows[at[1]], fastmath=contract)
        total[at] = arith.addf(total[at], x, fastmath=contract)
    return fragmented(total.flat, scores.shape, scores.layout)


def _scales_of_keys(page: Any, scores: Any, tokens: Any, largest: Any) -> Any:
    """A thread has the same four tokens in each row: 4 `four` and on of the 16 of `warp`."""
    first = element(tokens.registers.flat[0], 0)
    warp, four = arith.shrui(first, word(4)), arith.andi(arith.shrui(first, word(2)), word(3))
    of_blocks = []
    for block in range(BLOCKS):
        at = plus(times(warp, 16 * ROW_BYTES), _compute_scale_offset(warp, word(block), four))
        of_blocks.append([arith.bitcast(f32(), x) for x in load(page, at, RANK, 4)])
    most, *others = (arith.bitcast(f32(), x) for x in load(scores, word(0), LARGEST, 4))
    for x in others:
        most = arith.maxnumf(most, x)

    def same(x: Any, like: Any) -> Any:
        return fragmented([x] * like.registers.size, like.shape, like.layout)

    return *(same(joined(x), tokens) for x in of_blocks), same(joined([most]), largest)


def _values(page: Any, lines: Fp8PageLayout, block: int) -> Any:
    """The values [128, 64] of a block, as words."""
    place = WarpgroupThread()
    chunk = plus(times(place.warp, 2), arith.shrui(place.g, word(2)))
    inside = times(arith.andi(place.g, word(3)), 4)
    pairs = []
    for pair in range(PAGE // 8):
        words = []
        for i in range(2):
            here = chunk
            if lines.swizzled:
                here = arith.xori(chunk, arith.ori(times(place.t, 2), word(i)))
            at = plus(inside, times(here, 16), times(place.t, 2 * lines.pitch))
            fixed = block * lines.block + (8 * pair + i) * lines.pitch
            words += load(page, at, fixed, 1)
        pairs.append(
            [_select_bytes(words[0], words[1], which) for which in (LOW_BYTES, HIGH_BYTES)]
        )
    wide = [
        _e4m3_to_f16x2(pairs[pair][j], h)
        for j in range(2)
        for pair in range(PAGE // 8)
        for h in range(2)
    ]  # fmt: skip
    return _fragment(wide, (BLOCK, PAGE), ir.F16Type.get())


def _clear(page: Any, lines: Fp8PageLayout, left: Any) -> None:
    """Writes zeros over the tokens after the first `left`. A thread clears every other chunk, and a
    warp 16 tokens: those that it reads as keys and whose scales it transposes."""
    index = WarpgroupThread().index
    token, half = arith.shrui(index, word(1)), arith.andi(index, word(1))
    here = plus(times(token, lines.pitch), times(half, 16))
    zeros = joined([word(0)] * 4)
    # The last block of a block-scaled token includes its scales, and so a chunk of its rope
    # numbers.
    last = 0 if lines.swizzled else 2 * SCALE_BYTES
    with utils.when(arith.cmpi(arith.CmpIPredicate.sge, token, left)):
        for block in range(BLOCKS):
            for at in range(0, BLOCK + (last if block == BLOCKS - 1 else 0), 32):
                store(zeros, page, here, block * lines.block + at)


def _store(target: Any, out: Any, block: int, columns: int, pitch: int) -> None:
    place = WarpgroupThread()
    registers = out.registers.reshape(2, columns // 8, 2)
    first = plus(word(BLOCK * block), times(place.warp, 32), times(place.g, 4))
    for n in range(columns // 8):
        for i in range(2):
            numbers = [element(x, i) for x in registers[:, n, :].flat]
            column = plus(times(place.t, 2), word(8 * n + i))
            at = times(plus(times(column, pitch), first), 4)
            store(joined(numbers), target, at)


class MlaFp8Operands:
    """The wgmma operands of a page.

    Args:
        dtype: The dtype of the cache, float8_e4m3fn or uint8 (block-scaled).
    """

    def __init__(self, dtype: Any):
        self.scaled = dtype == BYTES
        self.lines = Fp8PageLayout.of(dtype)
        self.plain = plgpu.RefType()
        self.page = plgpu.RefType(SWIZZLED) if self.lines.swizzled else self.plain

    def _run(self, function: Any, types: tuple[Any, ...], shape: Any, *args: Any) -> Any:
        out = plgpu.ShapeDtypeStruct(shape, jnp.float16, plgpu.Layout.WGMMA)
        return plgpu.inline_mgpu(arg_types=types, return_type=out)(function)(*args)

    def keys(self, page: Any, block: int) -> jax.Array:
        """float16 [64 tokens, 128], the keys of a block."""
        run = lambda ctx, x: _keys(x, self.lines, block)  # noqa: E731
        return self._run(run, (self.page,), (PAGE, BLOCK), page)

    def rope(self, page: Any) -> jax.Array:
        """The rope numbers [64 tokens, 64]: float16, or bfloat16 as block-scaled caches store
        them."""
        dtype = jnp.bfloat16 if self.scaled else jnp.float16
        out = plgpu.ShapeDtypeStruct((PAGE, ROPE), dtype, plgpu.Layout.WGMMA)
        run = plgpu.inline_mgpu(arg_types=(self.page,), return_type=out)
        return run(lambda ctx, x: _rope(x, self.lines, self.scaled))(page)

    def halve_queries(self, queries: Any, rope: Any, factors: Any, wg: jax.Array) -> None:
        """Applies `half_queries` to bfloat16 [N, 512] and [N, 64] in place, for this warpgroup's
        half.

        Args:
            factors: float32 [N], to be written.
            wg: 0 or 1.
        """
        columns = queries.shape[0]
        tiles = plgpu.RefType(swizzled(jnp.bfloat16))

        def run(ctx: Any, queries: Any, rope: Any, factors: Any, wg: Any) -> None:
            _half_queries(queries, rope, factors, single(wg), columns, self.scaled)

        types = (tiles, tiles, self.plain, plgpu.Layout.WG_SPLAT)
        plgpu.inline_mgpu(arg_types=types)(run)(queries, rope, factors, wg)

    def values(self, page: Any, block: int) -> jax.Array:
        """float16 [128, 64 tokens], the values of a block."""
        run = lambda ctx, x: _values(x, self.lines, block)  # noqa: E731
        return self._run(run, (self.page,), (BLOCK, PAGE), page)

    def plus_scaled(
        self, scores: jax.Array, product: jax.Array, page: Any, block: int
    ) -> jax.Array:
        """Returns `scores` + a block's product [64 tokens, N] times the block's scale of each
        token.

        Args:
            page: The page after `turn_scales`.
        """
        layout = plgpu.Layout.WGMMA
        out = plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout)
        run = plgpu.inline_mgpu(arg_types=(layout, layout, self.page), return_type=out)
        return run(lambda ctx, x, y, s: _plus_scaled(x, y, s, block))(scores, product, page)

    def turn_scales(self, page: Any, scores: Any) -> None:
        """Puts a page's scales of each block side by side, in place; once a page, after `clear`.

        `plus_scaled` reads the scales of the warp's own tokens. `scales_of_keys` reads all: the
        four warps must synchronize before it, and after it before the next page's scales are
        turned.

        Args:
            page: uint8 [64, 656].
            scores: float32 [N, 64 and a margin of 4]. The margin of the first row receives the
                largest scale of each warp's 16 tokens, NaN only if all are NaN.
        """
        run = lambda ctx, *args: _turn_scales(*args)  # noqa: E731
        plgpu.inline_mgpu(arg_types=(self.page, self.plain))(run)(page, scores)

    def scales_of_keys(
        self, page: Any, scores: Any, tokens: jax.Array, unit: jax.Array, layout: Any
    ) -> Any:
        """Returns, for each block, the tokens' scales [N, 64], and the largest scale of all [N].

        Args:
            page, scores: As `turn_scales` has left them.
            tokens: int32 [N, 64], the token of each score.
            unit: Any numbers [N].
            layout: The layout of `tokens`: a thread has four neighbors, the same in each row.
        """
        by_row = layout.reduce(1)
        wide = plgpu.ShapeDtypeStruct(tokens.shape, jnp.float32, layout)
        most = plgpu.ShapeDtypeStruct(unit.shape, jnp.float32, by_row)
        run = plgpu.inline_mgpu(
            arg_types=(self.page, self.plain, layout, by_row),
            return_type=(wide,) * BLOCKS + (most,),
        )
        args = (page, scores, tokens, unit)
        *found, most = run(lambda ctx, *args: _scales_of_keys(*args))(*args)
        return found, most

    def clear(self, page: Any, left: jax.Array) -> None:
        """Writes zeros over the tokens after the first `left`, except their rope numbers."""

        def run(ctx: Any, left: Any, page: Any) -> None:
            _clear(page, self.lines, single(left))

        plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, self.page))(run)(left, page)


def _row_exponent(words: list[Any]) -> Any:
    """The biased exponent of the largest of a warp's bfloat16 numbers."""
    most = word(0)
    for pair in words:
        for x in (pair, arith.shli(pair, word(16))):
            most = arith.maxui(most, arith.andi(x, word(0x7FFFFFFF)))
    return arith.shrui(reduce_lanes(arith.maxui, most, 32), word(23))


def _power(biased: Any) -> Any:
    return arith.bitcast(f32(), arith.shli(biased, word(23)))


def _narrowed(pair: Any, by: Any, kind: str) -> Any:
    """Returns two bfloat16 numbers times a float32 number, as two of another type."""
    both = (arith.shli(pair, word(16)), arith.andi(pair, word(0xFFFF0000)))
    low, high = (arith.mulf(arith.bitcast(f32(), x), by) for x in both)
    code = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
    return asm(code, [i32()], [low, high], "=r,f,f", movable=True)[0]


def _half_queries(
    queries: Any, rope: Any, factors: Any, wg: Any, columns: int, scaled: bool
) -> None:
    """Scales queries, a row per warp and half of the rows per warpgroup; 16-byte chunks may lie in
    any order in a row."""
    thread = WarpgroupThread()
    warp, lane = thread.warp, arith.andi(thread.index, word(31))
    # Tiles have 8 rows of 128 bytes: four lanes have a row of one tile, and there are eight tiles.
    tile = arith.shrui(lane, word(2))
    inside = times(arith.andi(lane, word(3)), 32)
    for i in range(columns // 8):
        row = plus(times(wg, columns // 2), warp, word(4 * i))
        line = times(arith.andi(row, word(7)), BLOCK)
        row_tile = arith.shrui(row, word(3))
        at = plus(times(row_tile, 8 * 1024), times(tile, 1024), line, inside)
        of_rope = plus(times(row_tile, 1024), line, times(lane, 4))
        words = load(queries, at, 0, 4) + load(queries, at, 16, 4)
        rope_words = load(rope, of_rope, 0, 1)

        found = arith.subi(_row_exponent(rope_words), word(ROPE_EXCESS))
        found = arith.maxsi(_row_exponent(words), found)
        found = arith.maxsi(found, word(QUERY_EXPONENT + 1))
        found = arith.minsi(found, word(2 * FLOAT_BIAS))

        by = _power(arith.subi(word(2 * FLOAT_BIAS + QUERY_EXPONENT), found))

        halves = [_narrowed(pair, by, "f16") for pair in words]
        for k in range(2):
            store(joined(halves[4 * k : 4 * k + 4]), queries, at, 16 * k)
        of_row = _narrowed(rope_words[0], by, "bf16" if scaled else "f16")
        store(of_row, rope, of_rope)
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, word(0))):
            factor = _power(arith.subi(found, word(QUERY_EXPONENT)))
            store(factor, factors, times(row, 4))


def unknown_zero() -> jax.Array:
    """Returns 0 (int32), which the compiler does not know, in a register that all lanes of a warp
    share; each call returns a new one.

    The compiler then computes the descriptors of data at this index where they are needed. With a
    known index it would keep them in registers, 36 for the tiles of the queries.
    """
    splat = plgpu.Layout.WG_SPLAT

    def run(ctx: Any) -> Any:
        zero = asm_word("mov.b32 $0, 0;")
        return mgpu.FragmentedArray.splat(zero, (), is_signed=True)

    out = plgpu.ShapeDtypeStruct((), jnp.int32, splat)
    return plgpu.inline_mgpu(return_type=out)(run)()


def store_output(target: Any, out: jax.Array, block: int) -> None:
    """Writes a block of the output [128, N], ordered as `values`, to its dims of `target`
    [N, > 512]."""
    columns, pitch = out.shape[1], target.shape[-1]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(
        lambda ctx, to, some: _store(to, some, block, columns, pitch)
    )(target, out)
