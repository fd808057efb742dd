"""What the gated delta rule's prefill needs of each chunk of 64 tokens alone, on tensor cores.

With `G` the running sum of the log decay inside a chunk and rows i, j of it,

    A_ij = beta_i (k_i . k_j) exp(G_i - G_j)            for i > j, else 0
    X    = (I + A)^-1 diag(beta)                        by `gdn_prefill_inverse`
    P_ij = scale (q_i . k_j) exp(G_i - G_j)             for i >= j, else 0

and vectors that scale rows and columns of the products in `gdn_prefill_state`. Everything is masked
before exp. Every warpgroup goes from chunk to chunk on its own. What depends on keys and queries
alone, their copies and lengths, is done once for several value heads of a key head, as many as
leave no warpgroup idle; the next keys and queries are on their way while the last of them inverts.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxattn.kernels.gdn_prefill.gates import (
    BETAS,
    COPIED_HEADS,
    DECAYS,
    copy_gates,
    copyable,
    sum_gates,
)
from jaxattn.kernels.gdn_prefill.inverse import unit_lower_inverse
from jaxattn.kernels.gdn_prefill.tiles import (
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    DECAY,
    OUT,
    READ,
    TILE,
    TRIANGLE,
    VECTORS,
    WRITE,
    both_views,
    compiler_params,
    copy_rows,
    iota,
    over_columns,
    over_rows,
    token_tiles,
    triangles,
)
from jaxattn.kernels.hopper.machine import NUM_SMS, interpret_mode, swizzled
from jaxattn.kernels.hopper.registers import (
    Thread,
    asm,
    element,
    fragmented,
    i32,
    joined,
    mma,
    number,
    pairs,
    plus,
    single,
    times,
    word,
)

WARPGROUPS = 4  # of a block: they share an SM's registers, 128 a thread, and its shared memory


def fill_above(x: jax.Array, fill: float, *, interpret: bool) -> jax.Array:
    """`x` [64, 64] with `fill` above the diagonal."""
    if interpret:
        return jnp.where(iota((CHUNK, CHUNK), 1) <= iota((CHUNK, CHUNK), 0), x, fill)

    # One register tells every comparison, where the compiler keeps one for each column otherwise.
    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=TILE),
    )
    def filled(ctx: Any, x: Any) -> Any:
        del ctx
        thread = Thread()
        row = plus(times(thread.warp, 16), thread.g)
        lead = arith.subi(row, times(thread.t, 2))
        registers = []
        for i, pair in enumerate(x.registers.flat):  # columns 8 (i // 2) on, rows 8 (i % 2) on
            values = []
            for j in range(2):
                reach = word(8 * (i // 2) - 8 * (i % 2) + j)
                inside = arith.cmpi(arith.CmpIPredicate.sge, lead, reach)
                values.append(arith.select(inside, element(pair, j), number(fill)))
            registers.append(joined(values))
        return fragmented(registers, x.shape, x.layout)

    return filled(x)


def own_products(rows: list[jax.Array], *, interpret: bool) -> jax.Array:
    """Products of rows [64, 64] side by side with the 16 rows of their warp, float32 [64, 16].

    A row's square stands on the diagonal: `mma` takes a sixth of the instructions that squares and
    sums of single numbers do.
    """
    if interpret:
        wide = jnp.concatenate(rows, axis=1).astype(jnp.float32).reshape(4, 16, -1)
        return jnp.einsum("bik,bjk->bij", wide, wide).reshape(CHUNK, 16)
    kind = "bf16" if rows[0].dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(
        arg_types=(TILE,) * len(rows),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, 16), jnp.float32, layout=TILE),
    )
    def products(ctx: Any, *rows: Any) -> Any:
        del ctx
        halves = [[number(0.0)] * 4 for _ in range(2)]
        for part in rows:
            registers = [llvm.bitcast(i32(), pair) for pair in part.registers.flat]
            for first in range(0, len(registers), 4):
                left = registers[first : first + 4]
                for half in range(2):  # what is a row on the left is a column on the right
                    right = [left[half], left[2 + half]]
                    halves[half] = mma(kind, left, right, halves[half])
        return fragmented(pairs([*halves[0], *halves[1]]), (CHUNK, 16), rows[0].layout)

    return products(*rows)


def prefetch_rows(k: Any, q: Any, length: jax.Array, *, interpret: bool) -> None:
    """Asks for the first `length` of rows [64, 128] of global memory to come to L2."""
    if interpret:
        return

    def run(ctx: Any, k: Any, q: Any, length: Any) -> None:
        del ctx
        long = ir.IntegerType.get_signless(64)
        pitch = ir.MemRefType(k.type).get_strides_and_offset()[0][0]
        index = Thread().index
        token = arith.andi(index, word(CHUNK - 1))
        of_keys = arith.cmpi(arith.CmpIPredicate.ult, index, word(CHUNK))
        places = (llvm.ptrtoint(long, utils.memref_ptr(x)) for x in (k, q))
        place = arith.addi(
            arith.select(of_keys, *places), arith.extui(long, times(token, 2 * pitch))
        )
        inside = arith.cmpi(arith.CmpIPredicate.slt, token, single(length))
        code = (
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p prefetch.global.L2 [$0]; "
            "@p prefetch.global.L2 [$0+128]; }"
        )
        asm(code, [], [place, arith.extui(i32(), inside)], "l,r")

    types = (plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(run)(k, q, length)


def value_heads_at_once(chunks: int, value_heads: int, group: int) -> int:
    """Value heads that a warpgroup takes of a chunk, of the `group` that share a key head.

    What they share takes about 0.3 of what each takes by itself, counted in instructions; the
    warpgroup with the most to do ends last.
    """

    def time(share: int) -> float:
        turns = -(-chunks * value_heads // (share * NUM_SMS * WARPGROUPS))
        return turns * (share + 0.3)

    return min((n for n in (1, 2, COPIED_HEADS) if group % n == 0), key=time)


def chunk_matrices(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunks: jax.Array,
    count: int,
    *,
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """X, P and the vectors of every chunk, and a 0 for `gdn_prefill_turns`.

    Args:
        q, k: [T, Hk, 128] bfloat16 or float16. What lies outside the chunks may be NaN.
        g, beta: float32 [T, Hv], log decay and beta; what lies outside the chunks likewise.
        chunks: int32 [2 or more, N + 1 or more], first token of a chunk and its tokens, 0 to 64;
            and in column N how many chunks from the first are to be done.
        count: N.
        scale: greater than 0.

    Returns:
        X and P [N, Hv, *TRIANGLE] in q's dtype, vectors float32 [N, Hv, 4, 64]; undefined for
        chunks without a token. The 0 is int32 [1].
    """
    value_heads, dtype = g.shape[1], q.dtype
    group = value_heads // k.shape[1]
    # Most of N: there is one more for every sequence, in case its last chunk is not full.
    share = value_heads_at_once(-(-k.shape[0] // CHUNK), value_heads, group)
    # At most one block an SM: one more would wait for a whole block to end.
    items = count * (value_heads // share)
    blocks = min(-(-items // WARPGROUPS), NUM_SMS)
    body = _body(
        count=count,
        group=group,
        share=share,
        workers=blocks * WARPGROUPS,
        scale=scale,
        l2norm=use_qk_l2norm,
        dtype=dtype,
        interpret=interpret,
    )
    matrix = jax.ShapeDtypeStruct((count, value_heads, *TRIANGLE), dtype)
    vectors = jax.ShapeDtypeStruct((count, value_heads, VECTORS, CHUNK), jnp.float32)
    each = WARPGROUPS
    kernel = plgpu.kernel(
        body,
        out_type=(matrix, matrix, vectors, jax.ShapeDtypeStruct((1,), jnp.int32)),
        scratch_types=[
            token_tiles((each, 2), dtype, interpret=interpret),  # K
            token_tiles((each, 2), dtype, interpret=interpret),  # Q
            plgpu.SMEM((each, 2, CHUNK, COPIED_HEADS), jnp.float32),  # log decay, beta
            plgpu.SMEM((each, share, 2, CHUNK), jnp.float32),  # running sums of log2 decay, beta
            plgpu.SMEM((each, CHUNK), jnp.float32),  # running sums less log2 |k|^-1
            triangles(each, dtype),  # P, then X
            plgpu.SMEM((each, VECTORS, CHUNK), jnp.float32),
            *[plgpu.SMEM((each, CHUNK, 32), jnp.float16, transforms=swizzled(jnp.float16, 32))] * 2,
            plgpu.SMEM((each,), jnp.int32),
            plgpu.Barrier(num_arrivals=6, num_barriers=each),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=each,
        thread_name="wg",
        kernel_name="gdn_prefill_chunk",
        compiler_params=compiler_params(),
        interpret=interpret_mode(interpret, detect_races=detect_races),
    )
    with jax.enable_x64(False):  # the kernel's integers are int32
        return kernel(q, k, copyable(g), copyable(beta), chunks)


def _body(
    *,
    count: int,
    group: int,
    share: int,
    workers: int,
    scale: float,
    l2norm: bool,
    dtype: Any,
    interpret: bool,
) -> Any:
    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def start_scores(acc: Any, left: Any, right: Any) -> None:
        """acc += left right^T, over the two halves of the head's dimension."""
        for half in range(2):
            plgpu.wgmma(acc, left.at[half], right.at[half].transpose((1, 0)))

    def log_inverse_length(rows: Any) -> jax.Array:
        halves = [plgpu.load(rows.at[half], layout=TILE) for half in range(2)]
        products = own_products(halves, interpret=interpret)
        own = lax.rem(iota((CHUNK, 16), 0), jnp.int32(16)) == iota((CHUNK, 16), 1)
        return -0.5 * jnp.log2(jnp.where(own, products, 0.0).sum(axis=1) + 1e-6)

    def body(
        q_ref, k_ref, g_ref, beta_ref, chunks_ref, x_ref, p_ref, vectors_ref, zero_ref,
        k_union, q_union, all_copied, all_gates, all_sums, all_out, all_vectors, *rest,
    ):  # fmt: skip
        *all_half, own_smem, loaded = rest
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        worker = block * WARPGROUPS + wg
        k_copied, k_smem = both_views(k_union, interpret=interpret)
        q_copied, q_smem = both_views(q_union, interpret=interpret)
        own_smem[wg] = wg  # by each of its threads, and nowhere else
        plgpu.commit_smem()

        def own():
            """The warpgroup's number, read again where it is used: addresses that are made of it
            there need no register from chunk to chunk, of which there are none left."""
            return own_smem[wg]

        each = x_ref.shape[1] // share
        items = chunks_ref[0, count] * each
        steps = lax.div(items - worker + (workers - 1), jnp.int32(workers))

        def place(worker, i):
            """Chunk and first value head of a warpgroup's item i, which may be one too many.

            The last chunks come first: what was written last is still in L2 where it is read first.
            """
            item = jnp.maximum(items - 1 - worker - i * workers, 0)
            return lax.div(item, jnp.int32(each)), lax.rem(item, jnp.int32(each)) * share

        def issue(wg, first_head, start):
            rows = pl.ds(start, CHUNK)
            barrier = loaded.at[wg]
            key_head = lax.div(first_head, jnp.int32(group))
            copy_rows(k_ref.at[rows, key_head], k_copied.at[wg], barrier)
            copy_gates(g_ref, beta_ref, start, first_head, all_copied.at[wg], barrier)
            copy_rows(q_ref.at[rows, key_head], q_copied.at[wg], barrier)

        def keep(wg, *halves):
            for half, columns in enumerate(halves):
                all_out.at[wg, half][...] = columns.astype(dtype)

        def copy_out(wg, matrix_ref):
            out_smem = all_out.at[wg]
            plgpu.copy_smem_to_gmem(out_smem.at[0], matrix_ref.at[pl.ds(0, CHUNK)])
            plgpu.copy_smem_to_gmem(out_smem.at[1, pl.ds(32, 32)], matrix_ref.at[pl.ds(CHUNK, 32)])

        def item_step(i, length):
            chunk, first_head = place(worker, i)
            keys, queries = k_smem.at[own()], q_smem.at[own()]
            # Long before they are used: they come from global memory.
            next_chunk, next_head = place(worker, i + 1)
            next_start, next_length = chunks_ref[0, next_chunk], chunks_ref[1, next_chunk]
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

            gates = all_gates.at[own()]
            sum_gates(all_copied.at[own()], first_head, length, gates, interpret=interpret)
            plgpu.commit_smem()
            # What multiplies a key, and what a query, as logarithms: one exponential has both and
            # the decay between them. The tail's queries may be NaN, and their rows of A are 0.
            log_q = plgpu.layout_cast(jnp.full((CHUNK,), math.log2(scale), jnp.float32), BY_ROW)
            log_k = jnp.zeros_like(log_q)
            if l2norm:
                log_k, log_q = log_inverse_length(keys), log_q + log_inverse_length(queries)
                token = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=BY_ROW)
                log_q = jnp.where(token < length, log_q, 0.0)

            next_rows = pl.ds(next_start, CHUNK), lax.div(next_head, jnp.int32(group))
            prefetch_rows(
                k_ref.at[next_rows], q_ref.at[next_rows], next_length, interpret=interpret
            )

            @pl.loop(0, share)
            def _value_head(n):
                head, wg = first_head + n, own()
                gates_smem = all_gates.at[wg, n]
                sums_smem = gates_smem.at[DECAYS]
                running, beta = load(sums_smem, BY_ROW), load(gates_smem.at[BETAS], BY_ROW)
                if l2norm:
                    sums_smem = all_sums.at[wg]
                    sums_smem[...] = running - log_k
                # What was copied out before; and a barrier, for the sums are read again by column.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                def matrices(qk, kk):
                    wg = own()
                    keys, vectors_smem = k_smem.at[wg], all_vectors.at[wg]
                    start_scores(qk, q_smem.at[wg], keys)
                    total = gates_smem[DECAYS, CHUNK - 1]
                    every = plgpu.layout_cast(jnp.full((CHUNK,), jnp.exp2(total)), BY_ROW)
                    vectors_smem[READ, :] = -jnp.exp2(running + log_k)
                    vectors_smem[OUT, :] = jnp.exp2(running + log_q)
                    vectors_smem[WRITE, :] = jnp.exp2(total - running + log_k)
                    vectors_smem[DECAY, :] = every
                    # exp(G_i - G_j), times what multiplies query i and key j; 0 above the diagonal,
                    # where it might be inf.
                    columns = over_columns(load(sums_smem, BY_COLUMN))
                    between = over_rows(running + log_q) - columns
                    decay = jnp.exp2(fill_above(between, -1e30, interpret=interpret))
                    p = plgpu.wgmma_accumulator_load(qk)
                    start_scores(kk, keys, keys)
                    p = p * decay
                    keep(wg, *(lax.slice(p, (0, at), (CHUNK, at + 32)) for at in (0, 32)))
                    # Row i of A has key i where P has query i.
                    decay = decay * over_rows(-beta * jnp.exp2(log_k - log_q))
                    return plgpu.wgmma_accumulator_load(kk) * decay

                acc = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
                a = pl.run_scoped(matrices, acc, acc)
                plgpu.commit_smem()
                wg = own()
                plgpu.copy_smem_to_gmem(all_vectors.at[wg], vectors_ref.at[chunk, head])
                copy_out(wg, p_ref.at[chunk, head])

                @pl.when((n == share - 1) & (i + 1 < steps))
                def _():
                    issue(own(), next_head, next_start)

                wg = own()
                half_smem = [ref.at[wg] for ref in all_half]

                def betas(first):
                    row = all_gates.at[own(), n, BETAS, pl.ds(first, CHUNK // 2)]
                    return over_columns(load(row, BY_COLUMN))

                x = unit_lower_inverse(a, betas, half_smem, interpret=interpret)
                wg = own()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                keep(wg, *x)
                plgpu.commit_smem()
                copy_out(wg, x_ref.at[chunk, head])

            return next_length

        first = [place(block * WARPGROUPS + i, 0) for i in range(WARPGROUPS)]
        starts = [chunks_ref[0, chunk] for chunk, _ in first]
        first_length = chunks_ref[1, place(worker, 0)[0]]

        @pl.when((block == 0) & (wg == 0))
        def _():
            zero_ref[0] = 0

        # One warpgroup's copies after another's, so that the first does not wait for all of them.
        @pl.when(wg == 0)
        def _():
            for i, ((_, head), start) in enumerate(zip(first, starts, strict=True)):
                copies = functools.partial(issue, jnp.int32(i), head, start)
                pl.when(block * WARPGROUPS + i < items)(copies)

        lax.fori_loop(0, steps, item_step, first_length)
        plgpu.wait_smem_to_gmem(0)

    return body
