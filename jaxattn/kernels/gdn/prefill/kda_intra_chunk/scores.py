"""A and P of a chunk with decays per channel, from tiles of scaled keys and queries.

For each size of halves, 1 to 32 tokens, there is a tile of keys and one of queries, see
decay_scaling.py. Row i of a block's second half meets column j of its first half in a product of
the two tiles' rows. Halves of up to 8 tokens are within a warp's 16 rows. For these a `mma`
multiplies eight keys and eight queries, 16 rows, with eight keys; its results go through shared
memory to their place. The last two sizes are wgmmas of a few columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK, TILE, iota
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.decay_scaling import (
    HALF_WARP,
    PLAIN,
    WARP_TOKENS,
    place_of,
)
from jaxattn.kernels.hopper.mlir import arith, ir, llvm
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
    asm,
    f32,
    fragmented,
    i32,
    joined,
    load,
    mma,
    number,
    plus,
    pointer,
    times,
    word,
)

SIZES = (1, 2, 4, 8, 16, 32)  # of halves
WITHIN_A_WARP = 8
OF_KEYS, OF_QUERIES = 0, 1  # indices of the products of a warp's own columns
ROW_BYTES, HALF_BYTES = 128, CHUNK * 128  # of a tile


class KdaChunkScores(NamedTuple):
    """Scores of queries or of keys with keys."""

    diagonal: jax.Array  # float32 [64, 16], each warp's own 16 columns
    right: jax.Array  # [64, 48]; columns 0 to 15 and 32 to 47 count, for rows 16 and 48 on
    lower: jax.Array  # [64, 32], columns 0 to 31, for rows 32 on

    def columns(self) -> list[jax.Array]:
        """Returns the columns of the whole [64, 64], 16 at a time. Above the diagonal those of the
        upper left and of the lower right quarter are 0, and the others undefined."""
        frame = lax.div(iota((CHUNK, 16), 0), jnp.int32(16))
        (left, right), below = (
            [
                lax.slice(x, (0, first_column), (CHUNK, first_column + 16))
                for first_column in offsets
            ]
            for x, offsets in ((self.right, (0, 32)), (self.lower, (0, 16)))
        )
        zero = jnp.zeros_like(self.diagonal)
        of_rows = (
            (self.diagonal, left, below[0], below[0]),
            (zero, self.diagonal, below[1], below[1]),
            (self.diagonal, self.diagonal, self.diagonal, right),
            (zero, zero, zero, self.diagonal),
        )
        columns = []
        for values in of_rows:
            column = values[0]
            for n in range(1, 4):
                if values[n] is not values[n - 1]:
                    column = jnp.where(frame >= n, values[n], column)
            columns.append(column)
        return columns


def between_warps(size: int, k_tile: Any, q_tile: Any) -> list[jax.Array]:
    """Returns products of keys and of queries [64, up to the last first half's end] with keys."""
    width = CHUNK - size

    def products(*accs: Any) -> list[jax.Array]:
        for tile, acc in zip((k_tile, q_tile), accs, strict=True):
            for half in range(2):
                columns = k_tile.at[half, pl.ds(0, width)].transpose((1, 0))
                plgpu.wgmma(acc, tile.at[half], columns)
        return [acc[...] for acc in accs]

    accs = [plgpu.ACC((CHUNK, width), jnp.float32)] * 2
    return list(pl.run_scoped(products, *accs))


def within_warps(
    size: int, k_tile: Any, q_tile: Any, diagonal_ref: Any, *, interpret: bool
) -> None:
    """Computes products of keys and of queries with keys, where halves of `size` tokens meet, into
    `diagonal_ref`, float32 [2, 64, 16]."""
    if interpret:
        _interpreted(size, k_tile, q_tile, diagonal_ref)
        return

    def run(ctx: Any, *args: Any) -> None:
        del ctx
        _products(size, *args)

    plgpu.inline_mgpu(arg_types=(PLAIN,) * 3)(run)(k_tile, q_tile, diagonal_ref)


def _interpreted(size: int, k_tile: Any, q_tile: Any, diagonal_ref: Any) -> None:
    token = jnp.arange(WARP_TOKENS)
    half, rank = place_of(token, size)
    keys, queries = (
        jnp.concatenate([tile[0], tile[1]], axis=1).astype(jnp.float32)[: rows * 4]
        .reshape(4, rows, -1)
        for tile, rows in ((k_tile, WARP_TOKENS), (q_tile, HALF_WARP))
    )  # fmt: skip
    meets = (half[:, None] == 1) & (token[None] // size == token[:, None] // size - 1)
    columns = keys[:, HALF_WARP * half + rank]
    for operand, rows in ((OF_KEYS, columns), (OF_QUERIES, queries[:, rank])):
        products = jnp.einsum("bik,bjk->bij", rows, columns)
        scores = jnp.where(meets, products, diagonal_ref[operand].reshape(4, WARP_TOKENS, -1))
        diagonal_ref[operand] = scores.reshape(CHUNK, WARP_TOKENS)


def _matrices(address: Any, fixed: int) -> list[Any]:
    """Loads four words per thread: 8 x 8 matrices of 16 bits, one row at each lane's address."""
    code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4 + FIXED];"
    code = code.replace("FIXED", str(fixed))
    return asm(code, [i32()] * 4, [address], "=r,=r,=r,=r,r,~{memory}")


def _products(size: int, k_tile: Any, q_tile: Any, diagonal_ref: Any) -> None:
    kind = "bf16" if isinstance(ir.MemRefType(k_tile.type).element_type, ir.BF16Type) else "f16"
    thread = WarpgroupThread()
    lane = arith.andi(thread.index, word(31))
    matrix, row = arith.shrui(lane, word(3)), arith.andi(lane, word(7))
    keys, queries = (llvm.ptrtoint(i32(), pointer(x, word(0))) for x in (k_tile, q_tile))
    first = times(thread.warp, WARP_TOKENS)
    # Left operand: eight keys, eight queries, of 8 channels; the same of the next 8.
    of_queries = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(matrix, word(1)), word(0))
    left = arith.select(
        of_queries,
        plus(queries, times(plus(times(thread.warp, HALF_WARP), row), ROW_BYTES)),
        plus(keys, times(plus(first, row, word(HALF_WARP)), ROW_BYTES)),
    )
    left_offset = times(arith.xori(arith.shrui(matrix, word(1)), row), 16)
    # Right operand: eight keys, of 32 channels.
    right, right_offset = (
        plus(keys, times(plus(first, row), ROW_BYTES)),
        times(arith.xori(matrix, row), 16),
    )
    sums = [[number(0.0)] * 4 for _ in range(2)]
    for half in range(2):
        fixed = half * HALF_BYTES
        for step in range(4):
            if step % 2 == 0:
                column_address = plus(right, arith.xori(right_offset, word(32 * step)))
                columns = _matrices(column_address, fixed)
            rows = _matrices(plus(left, arith.xori(left_offset, word(32 * step))), fixed)
            pair = columns[2 * (step % 2) : 2 * (step % 2) + 2]
            sums[half] = mma(kind, rows, pair, sums[half])
    products = [arith.addf(x, y) for x, y in zip(*sums, strict=True)]
    _keep(size, thread, products, diagonal_ref)


def _keep(size: int, thread: WarpgroupThread, products: list[Any], diagonal_ref: Any) -> None:
    """Stores a thread's products. In its row it has those with two columns: two of keys, two of
    queries."""
    bits = size.bit_length() - 1
    row, column = thread.g, times(thread.t, 2)
    blocks = [arith.shrui(x, word(bits)) for x in (row, column)]
    i, j = (
        plus(times(block, 2 * size), arith.andi(x, word(size - 1)))
        for block, x in zip(blocks, (row, column), strict=True)
    )
    is_pair = arith.cmpi(arith.CmpIPredicate.eq, *blocks)
    if size == 1:  # one of two columns
        is_pair = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(row, word(1)), thread.t)
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(row, word(1)), word(0))
        products = [arith.select(is_odd, products[first + 1], products[first]) for first in (0, 2)]
        j = times(row, 2)
    index = plus(times(plus(times(thread.warp, WARP_TOKENS), i, word(size)), WARP_TOKENS), j)
    target = llvm.ptrtoint(i32(), pointer(diagonal_ref, times(index, 4)))
    num_products = len(products) // 2
    operands = ", ".join(f"${2 + n}" for n in range(num_products))
    store = f"st.shared{'.v2' if num_products == 2 else ''}.f32 [$0 + FIXED], {{{operands}}};"
    for operand in (OF_KEYS, OF_QUERIES):
        code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p " + store + " }"
        code = code.replace("FIXED", str(operand * CHUNK * WARP_TOKENS * 4))
        values = products[num_products * operand : num_products * (operand + 1)]
        constraints = "r,r" + ",f" * num_products + ",~{memory}"
        asm(code, [], [target, arith.extui(i32(), is_pair), *values], constraints)


def own_columns(diagonal_ref: Any, *, interpret: bool) -> list[jax.Array]:
    """Returns the results of `within_warps`, of keys and of queries [64, 16]; a warp reads its own
    rows."""
    if interpret:
        return [diagonal_ref[operand] for operand in (OF_KEYS, OF_QUERIES)]
    out = plgpu.ShapeDtypeStruct((CHUNK, WARP_TOKENS), jnp.float32, layout=TILE)
    return plgpu.inline_mgpu(arg_types=(PLAIN,), return_type=(out, out))(_own_columns)(diagonal_ref)


def _own_columns(ctx: Any, diagonal_ref: Any) -> Any:
    del ctx
    asm("bar.warp.sync 0xffffffff;", [], [], "~{memory}")
    thread = WarpgroupThread()
    row = plus(times(thread.warp, WARP_TOKENS), thread.g)
    offset = plus(times(row, 4 * WARP_TOKENS), times(thread.t, 8))
    columns = []
    for operand in (OF_KEYS, OF_QUERIES):
        registers = []
        for column in range(2):
            for lower in range(2):
                fixed = 4 * (operand * CHUNK * WARP_TOKENS + 8 * WARP_TOKENS * lower + 8 * column)
                registers.append(joined(load(diagonal_ref, offset, fixed, 2, f32())))
        columns.append(fragmented(registers, (CHUNK, WARP_TOKENS), TILE.to_mgpu()))
    return tuple(columns)
