"""A tile of an FP8 page as bfloat16, from shared memory to shared memory.

A tile is 128 bytes of each of 64 tokens, chunks of 16 bytes swizzled: chunk c of token i is at
c ^ (i % 8). What wgmma reads is tiles of 8 tokens and 64 numbers, swizzled likewise. Of eight lanes,
which are served at a time, each has another of eight neighbouring tokens and the same chunk: they
read and write 8 different banks of 16 bytes. A warp has 16 tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.core.formats import BYTES, FP8
from jaxattn.kernels.hopper.machine import swizzled
from jaxattn.kernels.hopper.mlir import arith, utils
from jaxattn.kernels.hopper.registers import (
    Thread,
    asm,
    i32,
    joined,
    load,
    plus,
    single,
    store,
    times,
    word,
)
from jaxattn.kernels.mla_decode.rows_memory import QUARTER, ROPE, SWIZZLED
from jaxattn.kernels.mla_decode.schedule import PAGE

CHUNK = 16  # bytes
LINE = 128  # bytes of a token in a tile, stored or widened
TILE = 8 * LINE  # bytes, of 8 tokens widened
THREADS = 128


def widen(stored: Any, target: Any, left: jax.Array, *, interpret: bool) -> None:
    """Writes e4m3 [64, 128] to bfloat16 [64, 128], or its last 64 columns to [64, 64]; zeros in
    place of the tokens behind the first `left`.

    Bytes [64, 128] are e4m3 numbers too, and where [64, 64] is wanted bfloat16 ones. The
    warpgroup's warps have to meet before another one reads what was written.
    """
    columns = target.shape[-1]
    as_it_is = stored.dtype == BYTES and columns == ROPE
    if interpret:
        if as_it_is:
            numbers = lax.bitcast_convert_type(stored[...].reshape(-1, ROPE, 2), jnp.bfloat16)
        else:
            numbers = lax.bitcast_convert_type(stored[...], FP8)[:, QUARTER - columns :]
            numbers = numbers.astype(jnp.bfloat16)
        inside = jnp.arange(numbers.shape[0])[:, None] < left
        target[...] = jnp.where(inside, numbers, jnp.zeros((), jnp.bfloat16))
        return
    types = (plgpu.RefType(SWIZZLED), plgpu.RefType(swizzled(jnp.bfloat16)), plgpu.Layout.WG_SPLAT)

    def run(ctx: Any, stored: Any, target: Any, left: Any) -> None:
        del ctx
        if as_it_is:
            _copied(stored, target)
        else:
            _widen(stored, target, single(left), columns)

    plgpu.inline_mgpu(arg_types=types)(run)(stored, target, left)


def _copied(stored: Any, target: Any) -> None:
    """Rope numbers, which as keys alone may be anything behind a row's end."""
    at = times(Thread().index, CHUNK)
    for i in range(PAGE * LINE // (THREADS * CHUNK)):
        store(joined(load(stored, at, i * THREADS * CHUNK, 4)), target, at, i * THREADS * CHUNK)


def _widen(stored: Any, target: Any, left: Any, columns: int) -> None:
    thread = Thread()
    # Of its 32 lanes: eight tokens, and four chunks or, of the other half, their neighbours.
    token, chunk = (
        arith.andi(thread.index, word(7)),
        arith.andi(arith.shrui(thread.index, word(3)), word(3)),
    )
    eights = times(thread.warp, 2)  # the warp's first eight tokens
    tiles = columns // ROPE
    line = times(token, LINE)
    read_at = plus(times(eights, TILE), line)
    # Chunks 4 to 7 lie where the first four do, but for one bit.
    first_chunk = times(arith.xori(chunk, token), CHUNK)
    second_chunk = arith.xori(first_chunk, word(4 * CHUNK))
    chunks = (first_chunk, second_chunk)[2 - tiles :]
    write_at = plus(times(eights, tiles * TILE), line)
    halves = [
        plus(write_at, times(arith.xori(plus(times(chunk, 2), word(i)), token), CHUNK))
        for i in range(2)
    ]
    for eight in range(2):
        for tile, of_tile in enumerate(chunks):
            words = load(stored, plus(read_at, of_tile), eight * TILE, 4)
            wide = [half for four in words for half in _wide(four)]
            for i, at in enumerate(halves):
                to = (eight * tiles + tile) * TILE
                store(joined(wide[4 * i : 4 * i + 4]), target, at, to)
    with utils.when(arith.cmpi(arith.CmpIPredicate.slt, left, word(ROPE))):
        for eight in range(2):
            number = plus(times(plus(eights, word(eight)), 8), token)
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, number, left)):
                for tile in range(tiles):
                    for at in halves:
                        to = (eight * tiles + tile) * TILE
                        store(joined([word(0)] * 4), target, at, to)


def _wide(four: Any) -> list[Any]:
    """Four e4m3 numbers, a word, as two words of bfloat16."""
    code = (
        "{ .reg .b16 x<2>, h<4>; .reg .b32 w<2>; .reg .f32 f<4>; mov.b32 {x0, x1}, $2; "
        "cvt.rn.f16x2.e4m3x2 w0, x0; cvt.rn.f16x2.e4m3x2 w1, x1; "
        "mov.b32 {h0, h1}, w0; mov.b32 {h2, h3}, w1; "
        "cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3; "
        "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }"
    )
    return asm(code, [i32()] * 2, [four], "=r,=r,r", movable=True)
