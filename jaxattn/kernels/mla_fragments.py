"""FP8 tokens, in shared memory as they are stored, as the left operands of wgmma in registers.

Widened numbers never go through shared memory, which has time for little else. They are what is
stored, in float16, which one conversion makes of two of them; scales meet other numbers:
`plus_scaled` multiplies scores, and P is multiplied by `scales_of_keys`. Queries become float16,
a power of two apart, by `halve_queries`.

A page's 64 tokens lie there in one of two ways, `Lines`: block-scaled ones as in the cache, 656
bytes a token, so that the same 16 bytes of eight tokens lie in banks of their own; others 128
bytes of each token a tile, chunks swizzled. A thread reads its numbers so that what lies together
in memory lies together in its registers, which puts them in an order of their own, warp w, lane
4 g + t, rows g + 8 h of a warp's 16:

    keys    token 16 w + g + 8 h; column 16 s + 8 k + 2 t + i of a block is dim 32 t + 4 s + 2 k + i
    values  row 64 j + 16 w + 8 h + g of a block is its dim 32 w + 4 g + 2 j + h; tokens as they
            come

so the queries come in the order of `order_queries`, and `store_output` puts the dims back.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxattn.kernels.hopper import swizzled
from jaxattn.kernels.mla_body import RANK, ROPE
from jaxattn.kernels.mla_schedule import PAGE
from jaxattn.mla_cache import BLOCK, BYTES

BLOCKS = RANK // BLOCK
SCALE_BYTES = 4 * BLOCKS
TILE = PAGE * BLOCK  # bytes
ROW_BYTES = RANK + SCALE_BYTES + 2 * ROPE  # of a block-scaled token
# Bytes 0 and 1 of two words, taken in turns, or bytes 2 and 3.
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362
# Float16 keeps a query's numbers down to 2**-33 of the largest of the 512; rope numbers may be 64
# times as large before they decide.
QUERY_EXPONENT, ROPE_EXCESS = 8, 6
FLOAT_BIAS = 127

# A tile's rows are as wide as the swizzle. (A tiling would want the cache's rows a multiple of it.)
SWIZZLED = (plgpu.SwizzleTransform(BLOCK),)  # type: ignore[abstract]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Where a page's bytes are, counted from its first one.

    Attributes:
        pitch: from a token to the next.
        block: from a token's block of 128 numbers to the next.
        rope: a token's first rope number.
        swizzled: whether chunk c of token i is at c ^ (i % 8).
    """

    pitch: int
    block: int
    rope: int
    swizzled: bool

    @classmethod
    def of(cls, dtype: Any) -> "Lines":
        if dtype == BYTES:
            return cls(ROW_BYTES, BLOCK, RANK + SCALE_BYTES, False)
        # The 64 rope numbers come in a tile with the 64 before them.
        return cls(BLOCK, TILE, BLOCKS * TILE + BLOCK - ROPE, True)


def order_queries(q: jax.Array) -> jax.Array:
    """Queries [..., 576] with their columns in the order of the keys'."""
    blocks = q[..., :RANK].reshape(*q.shape[:-1], BLOCKS, 4, 8, 2, 2)
    rope = q[..., RANK:].reshape(*q.shape[:-1], 4, 4, 2, 2)
    blocks = jnp.moveaxis(blocks, -4, -2).reshape(*q.shape[:-1], RANK)
    rope = jnp.moveaxis(rope, -4, -2).reshape(*q.shape[:-1], ROPE)
    return jnp.concatenate([blocks, rope], axis=-1)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _word(value: int) -> Any:
    return mgpu.c(value - 2**32 if value >= 2**31 else value, _i32())


def _asm(code: str, *words: Any) -> Any:
    constraints = ",".join(["=r"] + ["r"] * len(words))
    return llvm.inline_asm(_i32(), list(words), code, constraints)


def _wide(word: Any, half: int) -> Any:
    """Two e4m3 numbers, the lower or upper half of a word, as float16."""
    code = "{ .reg .b16 x<2>; mov.b32 {x0, x1}, $1; cvt.rn.f16x2.e4m3x2 $0, "
    return _asm(code + f"x{half}; }}", word)


def _turns(first: Any, second: Any, which: int) -> Any:
    return _asm(f"prmt.b32 $0, $1, $2, {which};", first, second)


class _Thread:
    """The thread's place: warp of its warpgroup, and lane 4 g + t."""

    def __init__(self) -> None:
        index = utils.thread_idx()
        self.warp = arith.andi(arith.shrui(index, _word(5)), _word(3))
        self.g = arith.andi(arith.shrui(index, _word(2)), _word(7))
        self.t = arith.andi(index, _word(3))


def _sum(*terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _scaled(x: Any, by: int) -> Any:
    return arith.muli(x, _word(by))


def _at(base: Any, offset: Any, fixed: int = 0) -> Any:
    """`offset` + `fixed` bytes behind `base`."""
    byte = ir.IntegerType.get_signless(8)
    for dynamic, static in (([offset], -(2**31)), ([], fixed)):
        flags = llvm.GEPNoWrapFlags.none
        base = llvm.getelementptr(base.type, base, dynamic, [static], byte, flags)
    return base


def _load(ref: Any, offset: Any, fixed: int, words: int) -> list[Any]:
    """Words of shared memory, that many bytes behind the beginning of `ref`."""
    at = _at(utils.memref_ptr(ref), offset, fixed)
    loaded = llvm.load(ir.VectorType.get((words,), _i32()), at)
    return [vector.extract(loaded, [], [i]) for i in range(words)]


def _fragment(words: list[Any], shape: tuple[int, int], dtype: Any) -> Any:
    layout = mgpu.WGMMA_LAYOUT
    pair, one = ir.VectorType.get((2,), dtype), ir.VectorType.get((1,), _i32())
    registers = np.array(
        [vector.bitcast(pair, vector.broadcast(one, word)) for word in words], dtype=object
    ).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _wide_keys(words: list[list[Any]]) -> list[Any]:
    """Of two tokens' words, in the order of a fragment's registers."""
    return [
        _wide(words[row][step], half)
        for step in range(len(words[0]))
        for half in range(2)
        for row in range(2)
    ]


def _chunks(
    page: Any, lines: Lines, place: _Thread, row: int, of_thread: Any, first: int
) -> list[Any]:
    """The words of a 16-byte chunk of the thread's token g + 8 * row, counted from the token's byte
    `first`, where a block or the rope numbers begin."""
    token = arith.addi(_scaled(place.warp, 16), place.g)
    first_chunk = first % BLOCK // 16 if lines.swizzled else 0
    chunk = arith.addi(of_thread, _word(first_chunk)) if first_chunk else of_thread
    if lines.swizzled:
        chunk = arith.xori(chunk, place.g)
    at = arith.addi(_scaled(token, lines.pitch), _scaled(chunk, 16))
    return _load(page, at, first - 16 * first_chunk + 8 * row * lines.pitch, 4)


def _keys(page: Any, lines: Lines, block: int) -> Any:
    place, first = _Thread(), block * lines.block
    chunks = [arith.addi(_scaled(place.t, 2), _word(j)) for j in range(2)]
    words = [
        sum((_chunks(page, lines, place, row, c, first) for c in chunks), []) for row in range(2)
    ]
    return _fragment(_wide_keys(words), (PAGE, BLOCK), ir.F16Type.get())


def _rope(page: Any, lines: Lines, scaled: bool) -> Any:
    place = _Thread()
    if not scaled:
        words = [_chunks(page, lines, place, row, place.t, lines.rope) for row in range(2)]
        return _fragment(_wide_keys(words), (PAGE, ROPE), ir.F16Type.get())
    chunks = [arith.addi(_scaled(place.t, 2), _word(j)) for j in range(2)]
    words = [
        sum((_chunks(page, lines, place, row, c, lines.rope) for c in chunks), [])
        for row in range(2)
    ]
    in_order = [words[row][i] for i in range(8) for row in range(2)]
    return _fragment(in_order, (PAGE, ROPE), ir.BF16Type.get())


def _plus_scaled(scores: Any, product: Any, page: Any, block: int) -> Any:
    place, f32 = _Thread(), ir.F32Type.get()
    two, contract = ir.VectorType.get((2,), f32), arith.FastMathFlags.contract
    token = _scaled(arith.addi(_scaled(place.warp, 16), place.g), ROW_BYTES)
    of_rows = []
    for row in range(2):
        (word,) = _load(page, token, RANK + 8 * row * ROW_BYTES + 4 * block, 1)
        of_rows.append(vector.broadcast(two, arith.bitcast(f32, word)))
    total = scores.registers.reshape(-1, 2).copy()
    for at, x in np.ndenumerate(product.registers.reshape(-1, 2)):
        x = arith.mulf(x, of_rows[at[1]], fastmath=contract)
        total[at] = arith.addf(total[at], x, fastmath=contract)
    registers = total.reshape(scores.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=None)


def _scales_of_keys(page: Any, tokens: Any, largest: Any) -> Any:
    """A thread has the same four tokens of each row, and half a warp all of them."""
    f32, four = ir.F32Type.get(), ir.VectorType.get((4,), ir.F32Type.get())
    first = vector.extract(tokens.registers.flat[0], [], [0])
    of_tokens = []
    for i in range(4):
        words = _load(page, _scaled(first, ROW_BYTES), RANK + i * ROW_BYTES, BLOCKS)
        of_tokens.append([arith.bitcast(f32, word) for word in words])
    most = of_tokens[0][0]
    for x in sum(of_tokens, [])[1:]:
        most = arith.maxnumf(most, x)
    for distance in (1, 2, 4, 8):
        most = arith.maxnumf(most, utils.shfl_bfly(most, distance))

    def same(x: Any, like: Any) -> Any:
        registers = np.full(like.registers.shape, x, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)

    of_blocks = [
        same(vector.from_elements(four, [x[block] for x in of_tokens]), tokens)
        for block in range(BLOCKS)
    ]
    return *of_blocks, same(vector.broadcast(ir.VectorType.get((1,), f32), most), largest)


def _values(page: Any, lines: Lines, block: int) -> Any:
    """[128, 64]"""
    place = _Thread()
    chunk = arith.addi(_scaled(place.warp, 2), arith.shrui(place.g, _word(2)))
    inside = _scaled(arith.andi(place.g, _word(3)), 4)
    pairs = []
    for pair in range(PAGE // 8):
        words = []
        for i in range(2):
            here = chunk
            if lines.swizzled:
                here = arith.xori(chunk, arith.ori(_scaled(place.t, 2), _word(i)))
            at = _sum(inside, _scaled(here, 16), _scaled(place.t, 2 * lines.pitch))
            fixed = block * lines.block + (8 * pair + i) * lines.pitch
            words += _load(page, at, fixed, 1)
        pairs.append([_turns(words[0], words[1], which) for which in (LOW_BYTES, HIGH_BYTES)])
    wide = [
        _wide(pairs[pair][j], h)
        for j in range(2)
        for pair in range(PAGE // 8)
        for h in range(2)
    ]  # fmt: skip
    return _fragment(wide, (BLOCK, PAGE), ir.F16Type.get())


def _clear(page: Any, lines: Lines, left: Any) -> None:
    """Zeros in place of the tokens behind the first `left`, every other chunk a thread."""
    index = arith.andi(utils.thread_idx(), _word(127))
    token, half = arith.shrui(index, _word(1)), arith.andi(index, _word(1))
    here = arith.addi(_scaled(token, lines.pitch), _scaled(half, 16))
    zero = vector.broadcast(ir.VectorType.get((4,), _i32()), _word(0))
    # With a block-scaled token's last block its scales, and so a chunk of its rope numbers.
    last = 0 if lines.swizzled else 2 * SCALE_BYTES
    with utils.when(arith.cmpi(arith.CmpIPredicate.sge, token, left)):
        for block in range(BLOCKS):
            for at in range(0, BLOCK + (last if block == BLOCKS - 1 else 0), 32):
                base = utils.memref_ptr(page)
                llvm.store(zero, _at(base, here, block * lines.block + at))


def _store(target: Any, out: Any, block: int, columns: int, pitch: int) -> None:
    place = _Thread()
    base = utils.memref_ptr(target)
    registers = out.registers.reshape(2, columns // 8, 2)
    four = ir.VectorType.get((4,), ir.F32Type.get())
    first = _sum(_word(BLOCK * block), _scaled(place.warp, 32), _scaled(place.g, 4))
    for n in range(columns // 8):
        for i in range(2):
            numbers = [vector.extract(x, [], [i]) for x in registers[:, n, :].flat]
            column = arith.addi(_scaled(place.t, 2), _word(8 * n + i))
            at = _scaled(arith.addi(_scaled(column, pitch), first), 4)
            llvm.store(vector.from_elements(four, numbers), _at(base, at))


class Fragments:
    """A page's operands.

    Args:
        dtype: of the cache, float8_e4m3fn or uint8 (block-scaled).
    """

    def __init__(self, dtype: Any):
        self.scaled = dtype == BYTES
        self.lines = Lines.of(dtype)
        self.plain = plgpu.RefType()
        self.page = plgpu.RefType(SWIZZLED) if self.lines.swizzled else self.plain

    def _run(self, function: Any, types: tuple[Any, ...], shape: Any, *args: Any) -> Any:
        out = plgpu.ShapeDtypeStruct(shape, jnp.float16, plgpu.Layout.WGMMA)
        return plgpu.inline_mgpu(arg_types=types, return_type=out)(function)(*args)

    def keys(self, page: Any, block: int) -> jax.Array:
        """float16 [64 tokens, 128] of a block."""
        run = lambda ctx, x: _keys(x, self.lines, block)  # noqa: E731
        return self._run(run, (self.page,), (PAGE, BLOCK), page)

    def rope(self, page: Any) -> jax.Array:
        """[64 tokens, 64], float16, or bfloat16 as block-scaled caches have it."""
        dtype = jnp.bfloat16 if self.scaled else jnp.float16
        out = plgpu.ShapeDtypeStruct((PAGE, ROPE), dtype, plgpu.Layout.WGMMA)
        run = plgpu.inline_mgpu(arg_types=(self.page,), return_type=out)
        return run(lambda ctx, x: _rope(x, self.lines, self.scaled))(page)

    def halve_queries(self, queries: Any, rope: Any, factors: Any, wg: jax.Array) -> None:
        """`half_queries` of bfloat16 [N, 512] and [N, 64], in their place: this warpgroup's half.

        Args:
            factors: float32 [N], to be written.
            wg: 0 or 1.
        """
        columns = queries.shape[0]
        wide = plgpu.layout_cast(jnp.full((PAGE, 8), wg, jnp.int32), plgpu.Layout.WGMMA)
        tiles = plgpu.RefType(swizzled(jnp.bfloat16))

        def run(ctx: Any, queries: Any, rope: Any, factors: Any, wide: Any) -> None:
            wg = vector.extract(wide.registers.flat[0], [], [0])
            _half_queries(queries, rope, factors, wg, columns, self.scaled)

        types = (tiles, tiles, self.plain, plgpu.Layout.WGMMA)
        plgpu.inline_mgpu(arg_types=types)(run)(queries, rope, factors, wide)

    def values(self, page: Any, block: int) -> jax.Array:
        """float16 [128, 64 tokens] of a block."""
        run = lambda ctx, x: _values(x, self.lines, block)  # noqa: E731
        return self._run(run, (self.page,), (BLOCK, PAGE), page)

    def plus_scaled(
        self, scores: jax.Array, product: jax.Array, page: Any, block: int
    ) -> jax.Array:
        """`scores` + a block's product [64 tokens, N] times its scale of each token."""
        layout = plgpu.Layout.WGMMA
        out = plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout)
        run = plgpu.inline_mgpu(arg_types=(layout, layout, self.page), return_type=out)
        return run(lambda ctx, x, y, s: _plus_scaled(x, y, s, block))(scores, product, page)

    def scales_of_keys(self, page: Any, tokens: jax.Array, unit: jax.Array, layout: Any) -> Any:
        """Of each block the tokens' scales [N, 64], and the largest of all [N].

        Args:
            tokens: of each score, int32 [N, 64].
            unit: any numbers [N].
            layout: of `tokens`, four of them a thread and all of a row in half a warp.
        """
        by_row = layout.reduce(1)
        wide = plgpu.ShapeDtypeStruct(tokens.shape, jnp.float32, layout)
        most = plgpu.ShapeDtypeStruct(unit.shape, jnp.float32, by_row)
        run = plgpu.inline_mgpu(
            arg_types=(self.page, layout, by_row), return_type=(wide,) * BLOCKS + (most,)
        )
        *found, most = run(lambda ctx, *args: _scales_of_keys(*args))(page, tokens, unit)
        return found, most

    def clear(self, page: Any, left: jax.Array) -> None:
        """Zeros in place of what follows the first `left` tokens, rope numbers apart."""
        wide = plgpu.layout_cast(jnp.full((PAGE, 8), left, jnp.int32), plgpu.Layout.WGMMA)

        def run(ctx: Any, wide: Any, page: Any) -> None:
            _clear(page, self.lines, vector.extract(wide.registers.flat[0], [], [0]))

        plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, self.page))(run)(wide, page)


def _row_exponent(words: list[Any]) -> Any:
    """Biased, of the largest of a warp's bfloat16 numbers."""
    most = _word(0)
    for word in words:
        for x in (word, arith.shli(word, _word(16))):
            most = arith.maxui(most, arith.andi(x, _word(0x7FFFFFFF)))
    for distance in (1, 2, 4, 8, 16):
        most = arith.maxui(most, utils.shfl_bfly(most, distance))
    return arith.shrui(most, _word(23))


def _power(biased: Any) -> Any:
    return arith.bitcast(ir.F32Type.get(), arith.shli(biased, _word(23)))


def _times(word: Any, by: Any, kind: str) -> Any:
    """Two bfloat16 numbers times a float32 one, as two of another kind."""
    pair = (arith.shli(word, _word(16)), arith.andi(word, _word(0xFFFF0000)))
    low, high = (arith.mulf(arith.bitcast(ir.F32Type.get(), x), by) for x in pair)
    return llvm.inline_asm(_i32(), [low, high], f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "=r,f,f")


def _half_queries(
    queries: Any, rope: Any, factors: Any, wg: Any, columns: int, scaled: bool
) -> None:
    """A row a warp, half of the rows a warpgroup; 16-byte chunks may lie in any order in a row."""
    index = utils.thread_idx()
    warp, lane = _Thread().warp, arith.andi(index, _word(31))
    # Tiles of 8 rows of 128 bytes: four lanes have a row of one, and there are eight of them.
    tile = arith.shrui(lane, _word(2))
    inside = _scaled(arith.andi(lane, _word(3)), 32)
    for i in range(columns // 8):
        row = _sum(_scaled(wg, columns // 2), warp, _word(4 * i))
        line = _scaled(arith.andi(row, _word(7)), BLOCK)
        row_tile = arith.shrui(row, _word(3))
        at = _sum(_scaled(row_tile, 8 * 1024), _scaled(tile, 1024), line, inside)
        of_rope = _sum(_scaled(row_tile, 1024), line, _scaled(lane, 4))
        words = _load(queries, at, 0, 4) + _load(queries, at, 16, 4)
        rope_words = _load(rope, of_rope, 0, 1)

        found = arith.subi(_row_exponent(rope_words), _word(ROPE_EXCESS))
        found = arith.maxsi(_row_exponent(words), found)
        found = arith.maxsi(found, _word(QUERY_EXPONENT + 1))
        found = arith.minsi(found, _word(2 * FLOAT_BIAS))

        by = _power(arith.subi(_word(2 * FLOAT_BIAS + QUERY_EXPONENT), found))

        halves = [_times(word, by, "f16") for word in words]
        four = ir.VectorType.get((4,), _i32())
        for k in range(2):
            chunk = vector.from_elements(four, halves[4 * k : 4 * k + 4])
            llvm.store(chunk, _at(utils.memref_ptr(queries), at, 16 * k))
        of_row = _times(rope_words[0], by, "bf16" if scaled else "f16")
        llvm.store(of_row, _at(utils.memref_ptr(rope), of_rope))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _word(0))):
            factor = _power(arith.subi(found, _word(QUERY_EXPONENT)))
            llvm.store(factor, _at(utils.memref_ptr(factors), _scaled(row, 4)))


def unknown_zero() -> jax.Array:
    """0, int32, anew at each call for the compiler, in a register that all of a warp share.

    Descriptors of what lies at such an index are found when they are wanted. Were the index known,
    they would be kept in registers, 36 of the queries' tiles alone.
    """
    splat = plgpu.Layout.WG_SPLAT

    def run(ctx: Any) -> Any:
        zero = llvm.inline_asm(_i32(), [], "mov.b32 $0, 0;", "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(zero, (), is_signed=True)

    out = plgpu.ShapeDtypeStruct((), jnp.int32, splat)
    return plgpu.inline_mgpu(return_type=out)(run)()


def store_output(target: Any, out: jax.Array, block: int) -> None:
    """A block of the output [128, N], ordered as `values`, to its dims of `target` [N, > 512]."""
    columns, pitch = out.shape[1], target.shape[-1]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(
        lambda ctx, to, some: _store(to, some, block, columns, pitch)
    )(target, out)
