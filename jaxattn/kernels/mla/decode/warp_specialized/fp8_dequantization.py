"""Dequantization of a tile of an FP8 page to bfloat16, from shared memory to shared memory.

A tile is 128 bytes of each of 64 tokens, in swizzled chunks of 16 bytes: chunk c of token i is at
c ^ (i % 8). The tiles that wgmma reads have 8 tokens and 64 numbers, swizzled in the same way. The
hardware serves eight lanes at a time, which have eight neighboring tokens and the same chunk. They
therefore read and write 8 different groups of banks, 16 bytes each. A warp has 16 tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.cache.formats import BYTES, FP8
from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    f32,
    i32,
    joined,
    load,
    plus,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.mla.decode.latent_tile import QUARTER, ROPE, SCALE_BYTES, SWIZZLED

CHUNK = 16  # bytes
LINE = 128  # bytes of a token in a tile, stored or widened
TILE = 8 * LINE  # bytes of 8 widened tokens


def dequantize_tile(
    stored: Any, scales: Any, target: Any, left: jax.Array, block: jax.Array | int, *,
    interpret: bool,
) -> None:  # fmt: skip
    """Writes a tile as bfloat16. The warpgroup's warps must synchronize before another warp reads
    it.

    Args:
        stored: e4m3 numbers [64, 128]. For a block-scaled cache, bytes: e4m3 numbers for a target
            of 128 columns, and bfloat16 numbers [64, 64] for one of 64.
        scales: For a block-scaled cache bytes [64, 16], the scales of the four blocks of each
            token. Otherwise None.
        target: bfloat16 [64, 128], or [64, 64] for the last 64 columns.
        left: Tokens of the row that remain. Later tokens become zeros, except in 64 bfloat16
            columns, which are only keys and may be anything.
        block: The block of the scales, 0 to 3.
    """
    columns = target.shape[-1]
    as_it_is = stored.dtype == BYTES and columns == ROPE
    if interpret:
        if as_it_is:
            numbers = lax.bitcast_convert_type(stored[...].reshape(-1, ROPE, 2), jnp.bfloat16)
        else:
            numbers = lax.bitcast_convert_type(stored[...], FP8)[:, QUARTER - columns :]
            numbers = numbers.astype(jnp.float32) * _interpreted_scales(scales, block)
            numbers = numbers.astype(jnp.bfloat16)
        inside = jnp.arange(numbers.shape[0])[:, None] < left
        target[...] = jnp.where(inside, numbers, jnp.zeros((), jnp.bfloat16))
        return
    refs = [plgpu.RefType(SWIZZLED), plgpu.RefType(swizzled(jnp.bfloat16))]
    scalars = [plgpu.Layout.WG_SPLAT] * 2

    def run(ctx: Any, stored: Any, target: Any, left: Any, block: Any, *scales: Any) -> None:
        del ctx
        if as_it_is:
            _copied(stored, target)
        else:
            of_block = [(x, times(single(block), 4)) for x in scales]
            _widen(stored, target, single(left), columns, *of_block)

    given = [] if scales is None or as_it_is else [scales]
    types = (*refs, *scalars, *[plgpu.RefType()] * len(given))
    block = jnp.asarray(block, jnp.int32)
    plgpu.inline_mgpu(arg_types=types)(run)(stored, target, left, block, *given)


def _interpreted_scales(scales: Any, block: Any) -> Any:
    if scales is None:
        return 1.0
    numbers = lax.bitcast_convert_type(scales[...].reshape(PAGE, -1, 4), jnp.float32)
    return jnp.take(numbers, block, axis=1)[:, None]


def _copied(stored: Any, target: Any) -> None:
    """Copies rope numbers, which are only keys and may be anything past a row's end. A warp reads
    its own 16 tokens, as in `_widen`: it may have copied them itself, and has waited for no other
    warp."""
    thread, of_warp, step = WarpgroupThread(), PAGE // 4 * LINE, 32 * CHUNK
    lane = arith.andi(thread.index, word(31))
    at = plus(times(thread.warp, of_warp), times(lane, CHUNK))
    for first in range(0, of_warp, step):
        store(joined(load(stored, at, first, 4)), target, at, first)


def _widen(
    stored: Any, target: Any, left: Any, columns: int, of_block: tuple[Any, Any] | None = None
) -> None:
    """Widens e4m3 numbers. `of_block`: the scales, and the byte offset of the block's scale within
    a token's scales."""
    thread = WarpgroupThread()
    # A lane has one of eight tokens and one of four chunks; of the other 64 bytes, the chunk four
    # further on.
    token, chunk = (
        arith.andi(thread.index, word(7)),
        arith.andi(arith.shrui(thread.index, word(3)), word(3)),
    )
    eights = times(thread.warp, 2)  # the index of the warp's first eight tokens
    tiles = columns // ROPE
    line = times(token, LINE)
    read_at = plus(times(eights, TILE), line)
    # Chunks 4 to 7 lie where the first four do, except for one bit.
    first_chunk = times(arith.xori(chunk, token), CHUNK)
    second_chunk = arith.xori(first_chunk, word(4 * CHUNK))
    chunks = (first_chunk, second_chunk)[2 - tiles :]
    write_at = plus(times(eights, tiles * TILE), line)
    halves = [
        plus(write_at, times(arith.xori(plus(times(chunk, 2), word(i)), token), CHUNK))
        for i in range(2)
    ]
    of_eights: list[Any] = [None, None]
    if of_block is not None:
        scales, inside = of_block
        first = plus(times(plus(times(eights, 8), token), SCALE_BYTES), inside)
        loaded = [load(scales, first, 8 * i * SCALE_BYTES, 1, f32())[0] for i in range(2)]
        of_eights = [_broadcast_bf16x2(scale) for scale in loaded]
    units = [(eight, tile) for eight in range(2) for tile in range(tiles)]

    def read(unit: int) -> list[Any]:
        eight, tile = units[unit]
        return load(stored, plus(read_at, chunks[tile]), eight * TILE, 4)

    words = read(0)
    for unit, (eight, tile) in enumerate(units):
        # The compiler moves no load before a store, so the next load is issued here.
        following = read(unit + 1) if unit + 1 < len(units) else []
        wide = [half for four in words for half in _e4m3x4_to_bf16x2(four, of_eights[eight])]
        for i, at in enumerate(halves):
            store(joined(wide[4 * i : 4 * i + 4]), target, at, (eight * tiles + tile) * TILE)
        words = following
    with utils.when(arith.cmpi(arith.CmpIPredicate.slt, left, word(ROPE))):
        for eight in range(2):
            number = plus(times(plus(eights, word(eight)), 8), token)
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, number, left)):
                for tile in range(tiles):
                    for at in halves:
                        to = (eight * tiles + tile) * TILE
                        store(joined([word(0)] * 4), target, at, to)


def _broadcast_bf16x2(scale: Any) -> Any:
    """Returns a float32 number as two bfloat16 ones; a power of two loses no bit."""
    code = "cvt.rn.bf16x2.f32 $0, $1, $1;"
    return asm(code, [i32()], [scale], "=r,f", movable=True)[0]


def _e4m3x4_to_bf16x2(four: Any, scale: Any = None) -> list[Any]:
    """Returns four e4m3 numbers, a word, as two words of bfloat16; times the scale, a pair from
    `_broadcast_bf16x2`."""
    scaled = "" if scale is None else "mul.rn.bf16x2 $0, $0, $3; mul.rn.bf16x2 $1, $1, $3; "
    code = (
        "{ .reg .b16 x<2>, h<4>; .reg .b32 w<2>; .reg .f32 f<4>; mov.b32 {x0, x1}, $2; "
        "cvt.rn.f16x2.e4m3x2 w0, x0; cvt.rn.f16x2.e4m3x2 w1, x1; "
        "mov.b32 {h0, h1}, w0; mov.b32 {h2, h3}, w1; "
        "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3; "
        f"cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; {scaled}}}"
    )
    operands = [four] if scale is None else [four, scale]
    constraints = ",".join(["=&r", "=&r", "r", "r"][: 2 + len(operands)])
    return asm(code, [i32()] * 2, operands, constraints, movable=True)
