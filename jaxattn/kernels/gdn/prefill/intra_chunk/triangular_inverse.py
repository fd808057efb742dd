"""The inverse of a unit lower triangular matrix in a warpgroup's registers, on tensor cores.

Diagonal blocks of 2 are known, and a level joins pairs of blocks of b to blocks of 2b,

    [[x, 0], [-y l x, y]]  inverts  [[x^-1, 0], [l, y^-1]],

so no power of A is formed (with equal keys powers reach 1e18). It is written for -A, whose products
all have the same sign. LLVM would move a negated product before the wait for it, and ptxas then
serializes the wgmmas of the kernel (its note C7514). The blocks of all rows are stored side by side
in one [64, b] array. Up to 16 a block belongs to one warp, whose `mma` multiplies it; the last two
levels are wgmmas of a few columns. Operands are rounded to float16, whose 11 bits are more accurate
than the 8 of the result; sums and addends are float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import CHUNK, TILE, iota
from jaxattn.kernels.hopper.ptx import (
    asm,
    asm_word,
    element,
    fragmented,
    i32,
    mma,
    number,
    pairs,
)


def block_product(x: jax.Array, y: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns the products of four pairs of 16 x 16 blocks, each [64, 16] float32, operands in
    float16.

    A warp's rows of the layout are one block, in the form of `mma`'s left operand and result; the
    right operand is transposed in 8 x 8 pieces.
    """
    if interpret:
        blocks = (z.astype(jnp.float16).astype(jnp.float32).reshape(4, 16, 16) for z in (x, y))
        return jnp.einsum("bij,bjk->bik", *blocks).reshape(CHUNK, 16)
    return plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, 16), jnp.float32, layout=TILE),
    )(_block_product)(x, y)


def _block_product(ctx: Any, x: Any, y: Any) -> Any:
    del ctx

    def half(pair: Any) -> Any:
        low, high = (element(pair, i) for i in range(2))
        return asm("cvt.rn.f16x2.f32 $0, $1, $2;", [i32()], [high, low], "=r,f,f")[0]

    def transposed(piece: Any) -> Any:
        return asm_word("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", piece)

    # Registers in order: columns 0 to 7 of rows 0 to 7 and 8 to 15, then columns 8 to 15.
    left = [half(pair) for pair in x.registers.flat]
    right = [transposed(half(pair)) for pair in y.registers.flat]
    values = []
    for column in range(2):
        values += mma("f16", left, right[2 * column : 2 * column + 2], [number(0.0)] * 4)
    return fragmented(pairs(values), x.shape, x.layout)


def unit_lower_inverse(
    a: jax.Array,
    weights: Callable[[int], jax.Array] | None,
    half_smem: list[Any],
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns `(I - tril(a, -1))^-1 diag(w)` of a float32 [64, 64] in registers; the rest of `a` is
    ignored.

    The results are columns 0 to 31 and 32 to 63. Rows 0 to 31 of the latter, which are 0 in the
    inverse, hold other numbers.

    Args:
        weights: Returns float32 [64, 32] for the first of 32 columns, with w in each row. Only
            results are multiplied by it: in float16 numbers below 1e-4 lose bits. None: w is 1.
        half_smem: float16 scratch, two of [64, 32] that products use in turn: no operand is written
            before every warp has finished the product two before it.
    """

    def below(b: int) -> jax.Array:
        """Returns the lower left quarter of blocks of 2b."""
        block, column_block = lax.div(within, jnp.int32(b)), lax.div(column, jnp.int32(b))
        return (lax.rem(block, jnp.int32(2)) == 1) & (column_block == block - 1)

    def times(pieces: list[tuple[jax.Array, int]], rows: jax.Array, smem: Any) -> list[jax.Array]:
        """Returns, for each (left [64, width], first): left @ rows[first : first + width]."""
        width = rows.shape[1]
        smem = smem.at[:, pl.ds(0, width)]
        smem[...] = rows.astype(jnp.float16)
        plgpu.commit_smem()

        def products(*accs: Any) -> list[jax.Array]:
            for acc, (left, first) in zip(accs, pieces, strict=True):
                plgpu.wgmma(acc, left.astype(jnp.float16), smem.at[pl.ds(first, width)])
            return [acc[...] for acc in accs]

        if interpret:
            right = smem[...].astype(jnp.float32)
            half = [(left.astype(jnp.float16).astype(jnp.float32), at) for left, at in pieces]
            return [jnp.dot(left, right[at : at + width]) for left, at in half]
        accs = [plgpu.ACC((CHUNK, width), jnp.float32)] * len(pieces)
        return pl.run_scoped(products, *accs)

    def columns(of: jax.Array, first: int, width: int) -> jax.Array:
        return lax.slice(of, (0, first), (CHUNK, first + width))

    row, column = iota((CHUNK, 16), 0), iota((CHUNK, 16), 1)
    frame, within = lax.div(row, jnp.int32(16)), lax.rem(row, jnp.int32(16))
    diagonal = columns(a, 0, 16)
    for n in range(1, 4):
        diagonal = jnp.where(frame == n, columns(a, 16 * n, 16), diagonal)
    a = a.astype(jnp.float16)
    x = jnp.where(within == column, 1.0, jnp.where(below(1), diagonal, 0.0))
    for b in (2, 4, 8):
        corner = jnp.where(below(b), diagonal, 0.0)
        corner = block_product(corner, x, interpret=interpret)
        x = x + block_product(x, corner, interpret=interpret)

    # Rows 16 to 31 join rows 0 to 15, rows 48 to 63 join rows 32 to 47: the other rows' results are
    # not used.
    upper, lower = times([(columns(a, 0, 16), 0), (columns(a, 32, 16), 32)], x, half_smem[0])
    corner = jnp.where(row < 32, upper, lower)
    upper, lower = times([(x, 16), (x, 48)], corner, half_smem[1])
    step = jnp.where(row < 32, upper, lower)
    odd = lax.rem(frame, jnp.int32(2)) == 1
    x = jnp.concatenate([jnp.where(odd, step, x), jnp.where(odd, x, 0.0)], axis=1)
    # Rows 32 to 63 join rows 0 to 31.
    (corner,) = times([(columns(a, 0, 32), 0)], x, half_smem[0])
    (step,) = times([(x, 32)], corner, half_smem[1])
    half = iota((CHUNK, 32), 0) >= 32
    halves = jnp.where(half, step, x), x
    return halves if weights is None else (halves[0] * weights(0), halves[1] * weights(32))
