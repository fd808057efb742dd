"""What the gated delta rule's prefill needs of each chunk of 64 tokens alone, on tensor cores.

With `G` the running sum of the log decay inside a chunk and rows i, j of it,

    A_ij = beta_i (k_i . k_j) exp(G_i - G_j)            for i > j, else 0
    X    = (I + A)^-1                                   unit lower triangular
    P_ij = scale (q_i . k_j) exp(G_i - G_j)             for i >= j, else 0

and vectors that scale rows and columns of the products in `gdn_prefill_state`. Everything is masked
before exp. Every warpgroup of a block has a value head of its own and goes from chunk to chunk; its
next keys and queries are on their way while it inverts.

The inverse: diagonal blocks of 2 are known, and a level joins pairs of blocks of b to blocks of 2b,

    [[x, 0], [-y l x, y]]  inverts  [[x^-1, 0], [l, y^-1]],

so no power of A is formed (with equal keys those reach 1e18). The blocks of all rows are kept side
by side in one [64, b] array. Up to 16 a block belongs to one warp, whose `mma` multiplies it; the
last two levels are wgmmas of a few columns. Operands of the products are rounded to float16, whose
11 bits are kept better than the 8 of the result; sums and what is added are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from jaxattn.kernels.hopper import interpret_mode, swizzled

DIM = 128  # Dk and Dv
CHUNK = 64
# Rows of the vectors: beta, exp(G) beta |k|^-1, scale exp(G) |q|^-1, exp(G_last - G) |k|^-1, and
# exp(G_last) in every place. Without l2norm the inverse lengths are 1.
BETA, READ, OUT, WRITE, DECAY = range(5)
VECTORS = 5

NUM_SMS = 132

TILE = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = TILE.reduce(1), TILE.reduce(0)


def compiler_params() -> Any:
    """Stores to shared memory are ordered by `commit_smem` and by waits alone, in all kernels here:
    what a warpgroup writes there it commits before other threads, wgmma or TMA read it, and at
    least one such barrier lies between a read and the next write of the same place."""
    return plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
    )


def token_tiles(
    leading: tuple[int, ...], dtype: Any, *, interpret: bool, plain: bool = False
) -> Any:
    """Scratch [*leading, 64 tokens, 64] for rows that start at any token.

    A copy through `swizzled` tiles of 8 rows starts at a multiple of 8 rows in global memory. The
    same bytes seen without tiles are what TMA writes from any row: the kernel gets the two views
    (copied, operand), and with `plain` a third without the swizzle, for a few rows of an end. The
    interpreter keeps no bytes, and there all are one array.
    """
    shape = (*leading, CHUNK, 64)
    if interpret:
        return plgpu.SMEM(shape, dtype)
    rows = (plgpu.SwizzleTransform(128),)  # type: ignore[abstract]
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=rows),
        plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)),
        *([plgpu.SMEM(shape, dtype)] if plain else []),
    )


def both_views(ref: Any, *, interpret: bool) -> tuple[Any, Any]:
    """(copied, operand) of a `token_tiles` scratch."""
    return (ref, ref) if interpret else ref


def copy_rows(source: Any, destination: Any, barrier: Any) -> None:
    """[64, 128] rows from any token into the two halves [2, 64, 64]."""
    for half in range(2):
        columns = source.at[:, pl.ds(64 * half, 64)]
        plgpu.copy_gmem_to_smem(columns, destination.at[half], barrier)


def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=TILE)


def over_rows(vector: jax.Array) -> jax.Array:
    """[64] by row -> [64, 64]."""
    return lax.broadcast_in_dim(vector, (CHUNK, CHUNK), [0])


def over_columns(vector: jax.Array) -> jax.Array:
    """[64] by column -> [64, 64]."""
    return lax.broadcast_in_dim(vector, (CHUNK, CHUNK), [1])


def block_product(x: jax.Array, y: jax.Array, *, interpret: bool) -> jax.Array:
    """Products of four pairs of 16 x 16 blocks, each [64, 16] float32, operands in float16.

    A warp's rows of the layout are one block, as `mma` has its left operand and its result; the
    right one is transposed in 8 x 8 pieces.
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
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    zero = mgpu.c(0.0, f32)

    def asm(result: Any, operands: list[Any], code: str, constraints: str) -> Any:
        return llvm.inline_asm(result, operands, code, constraints, has_side_effects=True)

    def half(pair: Any) -> Any:
        low, high = (vector.extract(pair, [], [i]) for i in range(2))
        return asm(i32, [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f")

    def transposed(piece: Any) -> Any:
        return asm(i32, [piece], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")

    # Registers in order: columns 0 to 7 of rows 0 to 7 and 8 to 15, then columns 8 to 15.
    left = [half(pair) for pair in x.registers.flat]
    right = [transposed(half(pair)) for pair in y.registers.flat]
    pairs = []
    for column in range(2):
        product = asm(
            llvm.StructType.get_literal([f32] * 4),
            [*left, right[2 * column], right[2 * column + 1], *[zero] * 4],
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, "
            "{$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        )
        values = [llvm.extractvalue(f32, product, [i]) for i in range(4)]
        pair_type = ir.VectorType.get((2,), f32)
        pairs += [vector.from_elements(pair_type, values[i : i + 2]) for i in (0, 2)]
    registers = np.array(pairs, dtype=object).reshape(x.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def unit_lower_inverse(a: jax.Array, half_smem: list[Any], *, interpret: bool) -> jax.Array:
    """`(I + tril(a, -1))^-1` of a float32 [64, 64] in registers; the rest of `a` is not looked at.

    Args:
        half_smem: float16 scratch, two of [64, 16] and two of [64, 32]: no product's operand is
            written before every warp has finished the product two before it.
    """

    def below(b: int) -> jax.Array:
        """Of blocks of 2b, the lower left quarter."""
        block, column_block = lax.div(within, jnp.int32(b)), lax.div(column, jnp.int32(b))
        return (lax.rem(block, jnp.int32(2)) == 1) & (column_block == block - 1)

    def times(pieces: list[tuple[jax.Array, int]], rows: jax.Array, smem: Any) -> list[jax.Array]:
        """For each (left [64, width], first): left @ rows[first : first + width]."""
        width = rows.shape[1]
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
    x = jnp.where(within == column, 1.0, jnp.where(below(1), -diagonal, 0.0))
    for b in (2, 4, 8):
        corner = jnp.where(below(b), diagonal, 0.0)
        corner = block_product(corner, x, interpret=interpret)
        x = x - block_product(x, corner, interpret=interpret)

    # Rows 16 to 31 join rows 0 to 15, rows 48 to 63 join rows 32 to 47: what the other rows get
    # is not used.
    upper, lower = times([(columns(a, 0, 16), 0), (columns(a, 32, 16), 32)], x, half_smem[0])
    corner = jnp.where(row < 32, upper, lower)
    upper, lower = times([(x, 16), (x, 48)], corner, half_smem[1])
    step = jnp.where(row < 32, upper, lower)
    odd = lax.rem(frame, jnp.int32(2)) == 1
    x = jnp.concatenate([jnp.where(odd, -step, x), jnp.where(odd, x, 0.0)], axis=1)
    # Rows 32 to 63 join rows 0 to 31.
    (corner,) = times([(columns(a, 0, 32), 0)], x, half_smem[2])
    (step,) = times([(x, 32)], corner, half_smem[3])
    half = iota((CHUNK, 32), 0) >= 32
    return jnp.concatenate([jnp.where(half, -step, x), jnp.where(half, x, 0.0)], axis=1)


def chunk_matrices(
    q: jax.Array,
    k: jax.Array,
    gates: jax.Array,
    chunk_start: jax.Array,
    chunk_length: jax.Array,
    *,
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """X, P and the vectors of every chunk.

    Args:
        q, k: [T, Hk, 128] bfloat16 or float16. What lies outside the chunks may be NaN.
        gates: float32 [N, Hv, 2, 64], log2 decay and beta of each chunk's tokens; 0 past its end.
        chunk_start, chunk_length: int32 [N], first token of a chunk and its tokens, 0 to 64.

    Returns:
        X and P [N, Hv, 64, 64] in q's dtype, vectors float32 [N, Hv, 5, 64]; undefined for chunks
        without a token.
    """
    chunks, value_heads = gates.shape[:2]
    dtype = q.dtype
    # Four warpgroups share an SM's registers, 128 a thread, and its shared memory. At most one
    # block an SM: one more would wait for a whole block to end.
    heads = next(n for n in (4, 2, 1) if value_heads % n == 0)
    blocks = max(1, min(chunks, NUM_SMS * heads // value_heads))
    body = _body(
        group=value_heads // k.shape[1],
        heads=heads,
        blocks=blocks,
        scale=scale,
        l2norm=use_qk_l2norm,
        dtype=dtype,
        interpret=interpret,
    )
    matrix = jax.ShapeDtypeStruct((chunks, value_heads, CHUNK, CHUNK), dtype)
    vectors = jax.ShapeDtypeStruct((chunks, value_heads, VECTORS, CHUNK), jnp.float32)
    half = (
        plgpu.TilingTransform((8, 16)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(32),  # type: ignore[abstract]
    )
    kernel = plgpu.kernel(
        body,
        out_type=(matrix, matrix, vectors),
        scratch_types=[
            token_tiles((heads, 2), dtype, interpret=interpret),  # K
            token_tiles((heads, 2), dtype, interpret=interpret),  # Q
            plgpu.SMEM((heads, 2, CHUNK), jnp.float32),  # log2 decay, beta
            plgpu.SMEM((heads, 2, CHUNK), jnp.float32),  # running sums, and less log2 |k|^-1
            plgpu.SMEM((heads, CHUNK, CHUNK), dtype, transforms=swizzled(dtype)),  # P, then X
            plgpu.SMEM((heads, VECTORS, CHUNK), jnp.float32),
            *[
                plgpu.SMEM((heads, CHUNK, width), jnp.float16, transforms=half)
                for width in (16, 16, 32, 32)
            ],
            plgpu.Barrier(num_arrivals=5, num_barriers=heads),
        ],
        grid=(blocks, value_heads // heads),
        grid_names=("block", "heads"),
        num_threads=heads,
        thread_name="wg",
        kernel_name="gdn_prefill_chunk",
        compiler_params=compiler_params(),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):  # the kernel's integers are int32
        return kernel(q, k, gates, chunk_start, chunk_length)


def _body(
    *,
    group: int,
    heads: int,
    blocks: int,
    scale: float,
    l2norm: bool,
    dtype: Any,
    interpret: bool,
) -> Any:
    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def scores(left: Any, right: Any) -> jax.Array:
        """left right^T, over the two halves of the head's dimension."""

        def terms(acc: Any) -> jax.Array:
            for half in range(2):
                plgpu.wgmma(acc, left.at[half], right.at[half].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(terms, plgpu.ACC((CHUNK, CHUNK), jnp.float32))

    def inverse_length(rows: Any) -> jax.Array:
        squares = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), BY_ROW)
        for half in range(2):
            wide = plgpu.load(rows.at[half], layout=TILE).astype(jnp.float32)
            squares += (wide * wide).sum(axis=1)
        return lax.rsqrt(squares + 1e-6)

    def body(
        q_ref, k_ref, gates_ref, start_ref, length_ref, x_ref, p_ref, vectors_ref,
        k_union, q_union, all_gates, all_sums, all_out, all_vectors, *rest,
    ):  # fmt: skip
        *all_half, loaded = rest
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        head = lax.axis_index("heads") * heads + wg
        key_head = lax.div(head, jnp.int32(group))
        k_copied, k_smem = both_views(k_union, interpret=interpret)
        q_copied, q_smem = both_views(q_union, interpret=interpret)
        keys, queries, gates_smem = k_smem.at[wg], q_smem.at[wg], all_gates.at[wg]
        sums_smem, out_smem, vectors_smem = all_sums.at[wg], all_out.at[wg], all_vectors.at[wg]
        half_smem = [ref.at[wg] for ref in all_half]
        count = gates_ref.shape[0]
        steps = lax.div(count - block + (blocks - 1), jnp.int32(blocks))

        def issue(chunk):
            barrier, rows = loaded.at[wg], pl.ds(start_ref[chunk], CHUNK)
            copy_rows(k_ref.at[rows, key_head], k_copied.at[wg], barrier)
            plgpu.copy_gmem_to_smem(gates_ref.at[chunk, head], gates_smem, barrier)
            copy_rows(q_ref.at[rows, key_head], q_copied.at[wg], barrier)

        @pl.when(steps > 0)
        def _():
            issue(block)

        @pl.loop(0, steps)
        def _(i):
            chunk = block + i * blocks
            length = length_ref[chunk]
            plgpu.barrier_wait(loaded.at[wg])

            # What lies past the end may be NaN, and 0 * NaN is NaN. Queries there are left: they
            # reach only their own outputs, which nobody stores.
            @pl.when(length < CHUNK)
            def _clear_tail():
                inside = iota((CHUNK, CHUNK), 0) < length
                for half in range(2):
                    kept = plgpu.load(keys.at[half], layout=TILE)
                    keys.at[half][...] = jnp.where(inside, kept, jnp.zeros((), dtype))
                plgpu.commit_smem()

            lower = iota((CHUNK, CHUNK), 1) <= iota((CHUNK, CHUNK), 0)
            g = over_columns(load(gates_smem.at[0], BY_COLUMN))
            running = jnp.where(lower, g, 0.0).sum(axis=1)
            beta = load(gates_smem.at[1], BY_ROW)
            sums_smem[0, :] = running
            if l2norm:
                k_scale = inverse_length(keys)
                sums_smem[1, :] = running - jnp.log2(k_scale)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what the last chunk wrote
            plgpu.commit_smem()  # the sums, read again by column
            total = sums_smem[0, CHUNK - 1]
            gamma, to_end = jnp.exp2(running), jnp.exp2(total - running)
            weight = beta * k_scale if l2norm else beta
            if l2norm:
                factor = inverse_length(queries) * scale
            else:
                factor = plgpu.layout_cast(jnp.full((CHUNK,), scale, jnp.float32), BY_ROW)
            every = plgpu.layout_cast(jnp.full((CHUNK,), jnp.exp2(total)), BY_ROW)
            vectors_smem[BETA, :] = beta
            vectors_smem[READ, :] = gamma * weight
            vectors_smem[OUT, :] = gamma * factor
            vectors_smem[WRITE, :] = to_end * k_scale if l2norm else to_end
            vectors_smem[DECAY, :] = every

            # exp(G_i - G_j), times the inverse length of key j; 0 above the diagonal, where it
            # might be inf.
            columns = over_columns(load(sums_smem.at[int(l2norm)], BY_COLUMN))
            decay = jnp.exp2(jnp.where(lower, over_rows(running) - columns, -1e30))
            p = scores(queries, keys) * decay * over_rows(factor)
            out_smem[...] = p.astype(dtype)
            a = scores(keys, keys) * decay * over_rows(weight)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(vectors_smem, vectors_ref.at[chunk, head])
            plgpu.copy_smem_to_gmem(out_smem, p_ref.at[chunk, head])

            @pl.when(i + 1 < steps)
            def _():
                issue(chunk + blocks)

            x = unit_lower_inverse(a, half_smem, interpret=interpret)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = x.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, x_ref.at[chunk, head])

        plgpu.wait_smem_to_gmem(0)

    return body
