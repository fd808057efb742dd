"""Gather of scattered tokens of a paged cache to shared memory: their addresses and copies.

A warp has 16 of a page's 64 tokens, and copies all of their columns. Lane 8 i + c has the 16 bytes
at c of every 128, of the tokens 4 p + i. So eight lanes read a whole line of the cache, and write a
whole line of shared memory. Its 16-byte chunks are swizzled: chunk c of token t is at c ^ (t % 8).
TMA would need one copy per token and 128 bytes, 576 of them for a page.

`cp.async` copies belong to a thread: it counts them in groups, and must signal their arrival
itself. A token that is not attended to becomes zeros, and nothing is read for it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.attention.split_kv_schedule import PAGE
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, mgpu, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    asm_word,
    element,
    i32,
    plus,
    pointer,
    single,
    times,
    word,
)

SPLAT, PLAIN = plgpu.Layout.WG_SPLAT, plgpu.RefType()
CHUNK, LINE, TILE = 16, 128, 1024  # bytes: of a copy, of a token in a tile, of 8 tokens' lines
# One word per thread: lane l of warp w has that of token 16 w + l % 16 of the page.
BY_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
WORDS = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=BY_THREAD)
WORD = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)


def _to_byte_offset(x: Any, by: int, size: int) -> Any:
    """Returns a word times `by` elements in bytes, with 64 bits."""
    wide = ir.IntegerType.get_signless(64)
    return arith.muli(arith.extui(wide, x), mgpu.c(by * size, wide))


def _read(ref: Any, offset: Any) -> Any:
    """Loads a word of read-only global memory here, and not where it is needed."""
    source = pointer(ref, offset)
    return asm("ld.global.nc.b32 $0, [$1];", [i32()], [source], "=r,l,~{memory}")[0]


def _lane() -> Any:
    return arith.andi(WarpgroupThread().index, word(31))


def _by_thread(x: Any) -> Any:
    layout = BY_THREAD.to_mgpu()
    return mgpu.FragmentedArray.splat(x, (128,), layout, is_signed=True)


def read_positions(indices_ref: Any, row: jax.Array, page: jax.Array) -> jax.Array:
    """Loads int32 [128] `BY_THREAD`, the row's entries 64 * `page` and on."""

    def run(ctx: Any, indices: Any, row: Any, page: Any) -> Any:
        del ctx
        thread = WarpgroupThread()
        token = plus(times(thread.warp, 16), arith.andi(thread.index, word(15)))
        entries = ir.MemRefType(indices.type).shape[1]
        inside = plus(times(single(page), PAGE), token)
        offset = arith.addi(_to_byte_offset(single(row), entries, 4), _to_byte_offset(inside, 1, 4))
        return _by_thread(_read(indices, offset))

    types = (PLAIN, SPLAT, SPLAT)
    return plgpu.inline_mgpu(arg_types=types, return_type=WORDS)(run)(indices_ref, row, page)


def read_tables(
    positions: jax.Array, table_ref: Any, row: jax.Array, visible: jax.Array, *, page_size: int
) -> list[jax.Array]:
    """Returns two int32 [128] `BY_THREAD`: the page of the cache with each position, whose load is
    in flight, and the position, or -1 if it is not attended to.

    Args:
        positions: The result of `read_positions`.
        table_ref: Block tables [B, M], of which `row` is read.
        visible: Positions from here on are not attended to.
    """

    def run(ctx: Any, positions: Any, table: Any, row: Any, visible: Any) -> Any:
        del ctx
        position = element(positions.registers.flat[0], 0)
        seen = arith.cmpi(arith.CmpIPredicate.ult, position, single(visible))
        entry = arith.shrui(arith.select(seen, position, word(0)), _shift(page_size))
        width = ir.MemRefType(table.type).shape[1]
        page = _read(
            table, arith.addi(_to_byte_offset(single(row), width, 4), _to_byte_offset(entry, 1, 4))
        )
        return [_by_thread(page), _by_thread(arith.select(seen, position, word(-1)))]

    types = (BY_THREAD, PLAIN, SPLAT, SPLAT)
    make = plgpu.inline_mgpu(arg_types=types, return_type=[WORDS, WORDS])
    return make(run)(positions, table_ref, row, visible)


def _shift(page_size: int) -> Any:
    return word(page_size.bit_length() - 1)


def _number(kv: Any, page: Any, position: Any, layer: Any) -> Any:
    """Returns the index, among all tokens of the cache, of the thread's page and position; negative
    if it is not attended to. Pages that the cache does not have become zeros, as with TMA."""
    _, pages, page_size, _ = ir.MemRefType(kv.type).shape
    page, position = (element(x.registers.flat[0], 0) for x in (page, position))
    first = arith.shli(plus(times(single(layer), pages), page), _shift(page_size))
    token = plus(first, arith.andi(position, word(page_size - 1)))
    exists = arith.cmpi(arith.CmpIPredicate.ult, page, word(pages))
    seen = arith.cmpi(arith.CmpIPredicate.sge, position, word(0))
    return arith.select(arith.andi(seen, exists), token, word(-1))


def select_words(condition: jax.Array, there: jax.Array, other: jax.Array) -> jax.Array:
    """Selects one of two int32 [128] `BY_THREAD`, at its place among the reads. A later select in a
    loop, taking the register of `other` or `there`, would need a copy of both, which waits for the
    read."""

    code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; selp.b32 $0, $2, $3, p; }"

    def run(ctx: Any, condition: Any, *words: Any) -> Any:
        del ctx
        chosen = arith.extui(i32(), single(condition))
        values = [element(x.registers.flat[0], 0) for x in words]
        return _by_thread(asm_word(code, chosen, *values))

    make = plgpu.inline_mgpu(arg_types=(SPLAT, BY_THREAD, BY_THREAD), return_type=WORDS)
    return make(run)(condition, there, other)


def read_page(indices_ref: Any, row: jax.Array, page: jax.Array) -> list[jax.Array]:
    """Loads the row's 64 entries of a page in each warp: lane l has entries l and 32 + l."""

    def run(ctx: Any, indices: Any, row: Any, page: Any) -> Any:
        del ctx
        entries = ir.MemRefType(indices.type).shape[1]
        inside = plus(times(single(page), PAGE), _lane())
        offset = arith.addi(_to_byte_offset(single(row), entries, 4), _to_byte_offset(inside, 1, 4))
        found = [
            _read(indices, arith.addi(offset, _to_byte_offset(word(32 * i), 1, 4)))
            for i in range(2)
        ]
        return [_by_thread(x) for x in found]

    make = plgpu.inline_mgpu(arg_types=(PLAIN, SPLAT, SPLAT), return_type=[WORDS, WORDS])
    return make(run)(indices_ref, row, page)


def seen_words(entries: list[jax.Array], visible: jax.Array) -> list[jax.Array]:
    """Returns a bit for each of the 64 entries of `read_page`: whether it is attended to."""

    def run(ctx: Any, low: Any, high: Any, visible: Any) -> Any:
        del ctx
        code = "{ .reg .pred p; setp.lt.u32 p, $1, $2; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
        found = [element(x.registers.flat[0], 0) for x in (low, high)]
        words = [asm_word(code, x, single(visible)) for x in found]
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in words]

    types = (BY_THREAD, BY_THREAD, SPLAT)
    make = plgpu.inline_mgpu(arg_types=types, return_type=[WORD, WORD])
    return make(run)(*entries, visible)


def copy_tokens(
    kv_ref: Any,
    tokens: list[jax.Array],
    layer: jax.Array,
    target: Any,
    transforms: Sequence[Any],
    first: Any,
) -> None:
    """Starts the copies of some bytes of each token to a place of [64, n] numbers.

    Args:
        kv_ref: The whole cache [L, N, C, Ds].
        tokens: The result of `read_tables`.
        target: The destination, whose rows are whole lines of 128 bytes.
        transforms: Those of `target`, tiles of 8 tokens and 128 bytes, swizzled.
        first: The first number of a token to copy.
    """

    def run(
        ctx: Any, kv: Any, page: Any, position: Any, layer: Any, target: Any, first: Any
    ) -> None:
        del ctx
        element_type = ir.MemRefType(kv.type).element_type
        size = utils.bitwidth(element_type) // 8
        width = ir.MemRefType(kv.type).shape[3]
        tiles = _bytes_of(target) // (PAGE * LINE)
        thread, lane = WarpgroupThread(), _lane()
        chunk, some = arith.andi(lane, word(7)), arith.shrui(lane, word(3))
        mine = _number(kv, page, position, layer)
        column = arith.addi(
            _to_byte_offset(single(first), 1, size), _to_byte_offset(chunk, 1, CHUNK)
        )
        for i in range(4):
            in_tile = plus(some, word(4 * (i % 2)))
            at = plus(
                times(thread.warp, 2 * tiles * TILE),
                times(in_tile, LINE),
                times(arith.xori(chunk, in_tile), CHUNK),
            )
            place = llvm.ptrtoint(i32(), pointer(target, at, (i // 2) * tiles * TILE))
            code = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
            token = asm_word(code, mine, plus(some, word(4 * i)))
            there = arith.cmpi(arith.CmpIPredicate.sge, token, word(0))
            token = arith.select(there, token, word(0))
            source = pointer(kv, arith.addi(_to_byte_offset(token, width, size), column))
            read = arith.select(there, word(CHUNK), word(0))
            copies = "".join(
                f"cp.async.cg.shared.global [$0+{tile * TILE}], [$1+{tile * LINE}], 16, $2; "
                for tile in range(tiles)
            )
            asm(copies, [], [place, source, read], "r,l,r,~{memory}")

    types = (PLAIN, BY_THREAD, BY_THREAD, SPLAT, plgpu.RefType(tuple(transforms)), SPLAT)
    copy = plgpu.inline_mgpu(arg_types=types)(run)
    copy(kv_ref, *tokens, layer, target, jnp.asarray(first, jnp.int32))


def copy_scales(
    kv_ref: Any, tokens: list[jax.Array], layer: jax.Array, target: Any, first: int
) -> None:
    """Starts the copies of 16 bytes of each token, from its byte `first` on, to bytes [64, 16]."""

    def run(ctx: Any, kv: Any, page: Any, position: Any, layer: Any, target: Any) -> None:
        del ctx
        width = ir.MemRefType(kv.type).shape[3]
        thread, lane = WarpgroupThread(), _lane()
        token = _number(kv, page, position, layer)
        there = arith.cmpi(arith.CmpIPredicate.sge, token, word(0))
        token = arith.select(there, token, word(0))
        source = pointer(kv, _to_byte_offset(token, width, 1), first)
        read = arith.select(there, word(CHUNK), word(0))
        at = plus(times(thread.warp, 16 * CHUNK), times(lane, CHUNK))
        place = llvm.ptrtoint(i32(), pointer(target, at))
        code = (
            "{ .reg .pred p; setp.lt.u32 p, $3, 16; "
            "@p cp.async.cg.shared.global [$0], [$1], 16, $2; }"
        )
        asm(code, [], [place, source, read, lane], "r,l,r,r,~{memory}")

    types = (PLAIN, BY_THREAD, BY_THREAD, SPLAT, PLAIN)
    plgpu.inline_mgpu(arg_types=types)(run)(kv_ref, *tokens, layer, target)


def _bytes_of(ref: Any) -> int:
    type = ir.MemRefType(ref.type)
    count = 1
    for n in type.shape:
        count *= n
    return count * utils.bitwidth(type.element_type) // 8


def end_group() -> None:
    """Commits the copies that the thread has started since the last group as one group."""

    @plgpu.inline_mgpu()
    def end(_: Any) -> None:
        asm("cp.async.commit_group;", [], [], "~{memory}")

    end()


def wait_for_groups(pending: int, *, of_warp: bool) -> None:
    """Waits for all copy groups of the thread except the last `pending`; or for those of its
    warp."""

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        asm(f"cp.async.wait_group {pending};", [], [], "~{memory}")
        if of_warp:
            asm("bar.warp.sync 0xffffffff;", [], [], "~{memory}", convergent=True)

    wait()
