"""FP8 tokens, in shared memory as they are stored, as the left operands of wgmma in registers.

Widened numbers never go through shared memory, which has time for little else. A page's 64 tokens
lie there as TMA brings them, 128 bytes of each token a tile, 16-byte chunks swizzled. A thread
reads its numbers so that what lies together in memory lies together in its registers, which puts
them in an order of their own, warp w, lane 4 g + t, rows g + 8 h of a warp's 16:

    keys    token 16 w + g + 8 h; column 16 s + 8 k + 2 t + i of a block is dim 32 t + 4 s + 2 k + i
    values  row 64 j + 16 w + 8 h + g of quarter c is dim 128 w + 32 c + 4 g + 2 j + h; tokens as
            they come

so the queries come in the order of `order_queries`, and `store_output` puts the dims back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxattn.kernels.mla_body import RANK, ROPE
from jaxattn.kernels.mla_schedule import PAGE
from jaxattn.mla_cache import BLOCK, BYTES

BLOCKS = RANK // BLOCK
SCALE_BYTES = 4 * BLOCKS
TILE = PAGE * BLOCK  # bytes
# Two bytes of a word, each in the low byte of a lane of 16 bits, their signs in its high byte; or
# byte b of two words.
LOW_BYTES, HIGH_BYTES = 0x9180, 0xB3A2
BYTE_OF_TWO = [0xC480, 0xD591, 0xE6A2, 0xF7B3]
# An e4m3 number's bits, put where bfloat16 has its own, are the number times 2**-120.
REBIAS = 0x7B807B80  # the bits of 2**120, twice

# A tile's rows are as wide as the swizzle. (A tiling would want the cache's rows a multiple of it.)
SWIZZLED = (plgpu.SwizzleTransform(BLOCK),)  # type: ignore[abstract]


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


def _bits(first: Any, second: Any, which: int) -> Any:
    """Two e4m3 numbers, bytes `which` of two words, as bfloat16 numbers times 2**-120."""
    code = f"{{ .reg .b32 x; prmt.b32 x, $1, $2, {which}; shl.b32 x, x, 4; "
    return _asm(code + "and.b32 $0, x, 0x87f087f0; }", first, second)


def _times(pair: Any, factor: Any) -> Any:
    """A product of pairs of bfloat16 that keeps numbers below the normal ones."""
    return _asm("mul.rn.bf16x2 $0, $1, $2;", pair, factor)


def _wide(bits: Any, factor: Any, scaled: bool) -> Any:
    """Widened and times a scale; 2**120 and a large scale in one factor would be infinite."""
    return _times(_times(bits, _word(REBIAS)) if scaled else bits, factor)


def _carried(some: Any, x: Any, one: int) -> Any:
    """Sets the sign bits of those parts of x, bytes or halves, whose other bits `one` overflows."""
    return arith.ori(some, arith.xori(x, arith.addi(x, _word(one))))


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


def _fragment(words: list[Any], shape: tuple[int, int]) -> Any:
    layout = mgpu.WGMMA_LAYOUT
    pair, one = ir.VectorType.get((2,), ir.BF16Type.get()), ir.VectorType.get((1,), _i32())
    registers = np.array(
        [vector.bitcast(pair, vector.broadcast(one, word)) for word in words], dtype=object
    ).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _pair_of(low: Any, high: Any) -> Any:
    """bfloat16 of two words that are float32 numbers."""
    return _asm("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)


def _wide_keys(words: list[list[Any]], scales: list[Any] | None) -> list[Any]:
    """Of two tokens' words, in the order of a fragment's registers."""
    factors = []
    for row in range(2):
        nan = _word(0)
        for word in words[row]:
            nan = _carried(nan, word, 0x01010101)
        is_nan = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(nan, _word(0x80808080)), _word(0))
        factor = _word(REBIAS) if scales is None else scales[row]
        factors.append(arith.select(is_nan, _word(0x7FFF7FFF), factor))
    return [
        _wide(_bits(words[row][step], words[row][step], which), factors[row], scales is not None)
        for step in range(len(words[0]))
        for which in (LOW_BYTES, HIGH_BYTES)
        for row in range(2)
    ]


def _chunks(tile: Any, place: _Thread, row: int, of_thread: Any) -> list[Any]:
    """The words of a 16-byte chunk of the thread's token g + 8 * row of a tile."""
    token = arith.addi(_scaled(place.warp, 16), place.g)
    chunk = _scaled(arith.xori(of_thread, place.g), 16)
    return _load(tile, arith.addi(_scaled(token, BLOCK), chunk), 8 * row * BLOCK, 4)


def _keys(tile: Any, scales: Any, block: int) -> Any:
    place = _Thread()
    chunks = [arith.addi(_scaled(place.t, 2), _word(j)) for j in range(2)]
    words = [sum((_chunks(tile, place, row, c) for c in chunks), []) for row in range(2)]
    of_tokens = None
    if scales is not None:
        of_tokens = []
        for row in range(2):
            token = arith.addi(_scaled(place.warp, 16), place.g)
            fixed = 8 * row * SCALE_BYTES + 4 * block
            (scale,) = _load(scales, _scaled(token, SCALE_BYTES), fixed, 1)
            of_tokens.append(_pair_of(scale, scale))
    return _fragment(_wide_keys(words, of_tokens), (PAGE, BLOCK))


def _rope(tile: Any, scaled: bool) -> Any:
    place = _Thread()
    if not scaled:
        chunk = arith.addi(place.t, _word((BLOCK - ROPE) // 16))
        words = [_chunks(tile, place, row, chunk) for row in range(2)]
        return _fragment(_wide_keys(words, None), (PAGE, ROPE))
    chunks = [arith.addi(_scaled(place.t, 2), _word(j)) for j in range(2)]
    words = [sum((_chunks(tile, place, row, c) for c in chunks), []) for row in range(2)]
    return _fragment([words[row][i] for i in range(8) for row in range(2)], (PAGE, ROPE))


def _value_scales(scales: Any, left: Any) -> Any:
    """[64, 64]: a thread's scales of its pairs of tokens."""
    place = _Thread()
    words = []
    for pair in range(PAGE // 8):
        both = []
        for i in range(2):
            at = arith.addi(_scaled(place.t, 2 * SCALE_BYTES), _scaled(place.warp, 4))
            (scale,) = _load(scales, at, (8 * pair + i) * SCALE_BYTES, 1)
            token = arith.addi(_scaled(place.t, 2), _word(8 * pair + i))
            # What lies past the end of the sequence may have a scale of NaN.
            inside = arith.cmpi(arith.CmpIPredicate.slt, token, left)
            both.append(arith.select(inside, scale, _word(0)))
        words += [_pair_of(*both)] * 2
    return _fragment(words, (64, PAGE))


def _values(tiles: Any, scales: Any, quarter: int) -> Any:
    """[128, 64]. NaN is no number here: that of a key has made NaN of P."""
    place = _Thread()
    chunk = arith.addi(arith.shrui(place.g, _word(2)), _word(2 * quarter))
    inside = arith.addi(_scaled(place.warp, TILE), _scaled(arith.andi(place.g, _word(3)), 4))
    words = []
    for pair in range(PAGE // 8):
        for i in range(2):
            swizzle = arith.ori(_scaled(place.t, 2), _word(i))
            at = _scaled(arith.xori(chunk, swizzle), 16)
            at = _sum(inside, at, _scaled(place.t, 2 * BLOCK))
            words += _load(tiles, at, (8 * pair + i) * BLOCK, 1)

    one = ir.VectorType.get((1,), _i32())
    factors = [_word(REBIAS)] * (PAGE // 8)
    if scales is not None:
        factors = [
            vector.extract(vector.bitcast(one, x), [], [0]) for x in scales.registers.flat[::2]
        ]
    wide = [
        _wide(
            _bits(words[2 * pair], words[2 * pair + 1], BYTE_OF_TWO[byte + half]),
            factors[pair], scales is not None,
        )
        for byte in (0, 2)
        for pair in range(PAGE // 8)
        for half in range(2)
    ]  # fmt: skip
    return _fragment(wide, (BLOCK, PAGE))


def _store(target: Any, out: Any, quarter: int, columns: int, pitch: int) -> None:
    place = _Thread()
    base = utils.memref_ptr(target)
    registers = out.registers.reshape(2, columns // 8, 2)
    four = ir.VectorType.get((4,), ir.F32Type.get())
    first = _sum(_scaled(place.warp, BLOCK), _word(32 * quarter), _scaled(place.g, 4))
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
        self.tiles = plgpu.RefType(SWIZZLED)
        self.plain = plgpu.RefType()

    def _run(self, function: Any, types: tuple[Any, ...], shape: Any, *args: Any) -> Any:
        out = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, plgpu.Layout.WGMMA)
        return plgpu.inline_mgpu(arg_types=types, return_type=out)(function)(*args)

    def keys(self, tile: Any, scales: Any, block: int) -> jax.Array:
        """bfloat16 [64 tokens, 128] of a tile [64, 128] and the page's scales [64, 16]."""
        shape = (PAGE, BLOCK)
        if not self.scaled:
            return self._run(lambda ctx, x: _keys(x, None, block), (self.tiles,), shape, tile)
        types = (self.tiles, self.plain)
        return self._run(lambda ctx, x, s: _keys(x, s, block), types, shape, tile, scales)

    def rope(self, tile: Any) -> jax.Array:
        """bfloat16 [64 tokens, 64]."""
        run = lambda ctx, x: _rope(x, self.scaled)  # noqa: E731
        return self._run(run, (self.tiles,), (PAGE, ROPE), tile)

    def value_scales(self, scales: Any, left: jax.Array) -> Any:
        """What `values` wants of the scales, those of the first `left` tokens; None for none."""
        if not self.scaled:
            return None
        wide = plgpu.layout_cast(jnp.full((PAGE, 8), left, jnp.int32), plgpu.Layout.WGMMA)
        run = lambda ctx, s, n: _value_scales(  # noqa: E731
            s, vector.extract(n.registers.flat[0], [], [0])
        )
        types = (self.plain, plgpu.Layout.WGMMA)
        return self._run(run, types, (64, PAGE), scales, wide)

    def values(self, tiles: Any, scales: Any, quarter: int) -> jax.Array:
        """bfloat16 [128, 64 tokens] of tiles [4, 64, 128]."""
        shape = (BLOCK, PAGE)
        if scales is None:
            return self._run(lambda ctx, x: _values(x, None, quarter), (self.tiles,), shape, tiles)
        types = (self.tiles, plgpu.Layout.WGMMA)
        return self._run(lambda ctx, x, s: _values(x, s, quarter), types, shape, tiles, scales)


def store_output(target: Any, out: jax.Array, quarter: int) -> None:
    """A quarter of the output [128, N], ordered as `values`, to its dims of `target` [N, > 512]."""
    columns, pitch = out.shape[1], target.shape[-1]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(
        lambda ctx, to, some: _store(to, some, quarter, columns, pitch)
    )(target, out)
