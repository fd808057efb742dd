"""The body of `gdn_prefill_chunk`: a warpgroup's chunks, one after another.

Work that depends only on keys and queries is done once for several value heads of a key head. The
next keys and queries are loaded while the last of the value heads inverts its matrix.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import (
    BETA,
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    DECAY,
    LOG_K,
    LOG_Q,
    OUT,
    READ,
    SUM,
    TILE,
    WRITE,
    both_views,
    copy_rows,
    iota,
    over_columns,
    over_rows,
    token_tiles,
    triangles,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import (
    BETAS,
    COPIED_HEADS,
    DECAYS,
    copy_gates,
    sum_gates,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.triangular_inverse import unit_lower_inverse
from jaxattn.kernels.hopper.instructions import swizzled
from jaxattn.kernels.hopper.mlir import arith, ir, llvm, utils
from jaxattn.kernels.hopper.ptx import (
    WarpgroupThread,
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

WARPGROUPS = 4  # of a CTA: they share an SM's registers, 128 a thread, and its shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnIntraChunkConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        count: Columns of the plan that have chunks.
        group: Value heads per key head.
        share: The number of them that a warpgroup takes at once.
        workers: Warpgroups of the launch.
        l2norm: Whether q and k become unit vectors.
        backward: Whether the inverse is stored without beta, together with more vectors.
    """

    count: int
    group: int
    share: int
    workers: int
    scale: float
    l2norm: bool
    backward: bool
    dtype: Any
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnIntraChunkRefs:
    """The refs of a CTA: operands and results, then the shared memory of each warpgroup."""

    q_ref: Any
    k_ref: Any
    g_ref: Any
    beta_ref: Any
    chunks_ref: Any
    x_ref: Any  # None: only the backward pass
    m_ref: Any  # None: only the forward pass
    p_ref: Any
    vectors_ref: Any
    zero_ref: Any
    k_union: Any
    q_union: Any
    copied_smem: Any  # log decay, beta
    gates_smem: Any  # running sums of log2 decay, beta
    sums_smem: Any  # running sums less log2 |k|^-1
    out_smem: Any  # P, then M, then X
    vectors_smem: Any
    low_smem: Any  # two halves of a matrix that is inverted
    high_smem: Any
    own_smem: Any
    loaded: Any


def scratch_types(share: int, vectors: int, dtype: Any, *, interpret: bool) -> dict[str, Any]:
    each = WARPGROUPS
    half = plgpu.SMEM((each, CHUNK, 32), jnp.float16, transforms=swizzled(jnp.float16, 32))
    return {
        "k_union": token_tiles((each, 2), dtype, interpret=interpret),
        "q_union": token_tiles((each, 2), dtype, interpret=interpret),
        "copied_smem": plgpu.SMEM((each, 2, CHUNK, COPIED_HEADS), jnp.float32),
        "gates_smem": plgpu.SMEM((each, share, 2, CHUNK), jnp.float32),
        "sums_smem": plgpu.SMEM((each, CHUNK), jnp.float32),
        "out_smem": triangles(each, dtype),
        "vectors_smem": plgpu.SMEM((each, vectors, CHUNK), jnp.float32),
        "low_smem": half,
        "high_smem": half,
        "own_smem": plgpu.SMEM((each,), jnp.int32),
        "loaded": plgpu.Barrier(num_arrivals=6, num_barriers=each),
    }


def fill_above(x: jax.Array, fill: float, *, diagonal: bool = False, interpret: bool) -> jax.Array:
    """Returns `x` [64, 64] with `fill` above the diagonal, or from the diagonal on."""
    if interpret:
        row, column = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
        return jnp.where(column + int(diagonal) <= row, x, fill)

    # All comparisons use one register, where the compiler would otherwise keep one for each column.
    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=TILE),
    )
    def filled(ctx: Any, x: Any) -> Any:
        del ctx
        thread = WarpgroupThread()
        row = plus(times(thread.warp, 16), thread.g)
        lead = arith.subi(row, times(thread.t, 2))
        registers = []
        for i, pair in enumerate(x.registers.flat):  # columns 8 (i // 2) on, rows 8 (i % 2) on
            values = []
            for j in range(2):
                reach = word(8 * (i // 2) - 8 * (i % 2) + j + int(diagonal))
                inside = arith.cmpi(arith.CmpIPredicate.sge, lead, reach)
                values.append(arith.select(inside, element(pair, j), number(fill)))
            registers.append(joined(values))
        return fragmented(registers, x.shape, x.layout)

    return filled(x)


def own_products(rows: list[jax.Array], columns: list[jax.Array], *, interpret: bool) -> jax.Array:
    """Returns the products of rows [64, 64], side by side, with the 16 `columns` of their warp,
    float32 [64, 16].

    For rows with themselves the diagonal has the square of each row: `mma` takes a sixth of the
    instructions of squares and sums of single numbers.
    """
    if interpret:
        left, right = (
            jnp.concatenate(x, axis=1).astype(jnp.float32).reshape(4, 16, -1)
            for x in (rows, columns)
        )
        return jnp.einsum("bik,bjk->bij", left, right).reshape(CHUNK, 16)
    kind, parts = "bf16" if rows[0].dtype == jnp.bfloat16 else "f16", len(rows)

    @plgpu.inline_mgpu(
        arg_types=(TILE,) * (2 * parts),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, 16), jnp.float32, layout=TILE),
    )
    def products(ctx: Any, *given: Any) -> Any:
        del ctx
        halves = [[number(0.0)] * 4 for _ in range(2)]
        for part in zip(given[:parts], given[parts:], strict=True):
            of_rows, of_columns = (
                [llvm.bitcast(i32(), pair) for pair in x.registers.flat] for x in part
            )
            for first in range(0, len(of_rows), 4):
                left = of_rows[first : first + 4]
                for half in range(2):  # a row of the left operand is a column of the right one
                    right = [of_columns[first + half], of_columns[first + 2 + half]]
                    halves[half] = mma(kind, left, right, halves[half])
        return fragmented(pairs([*halves[0], *halves[1]]), (CHUNK, 16), given[0].layout)

    return products(*rows, *columns)


def prefetch_rows(k: Any, q: Any, length: jax.Array, *, interpret: bool) -> None:
    """Prefetches the first `length` of rows [64, 128] of global memory into L2."""
    if interpret:
        return

    def run(ctx: Any, k: Any, q: Any, length: Any) -> None:
        del ctx
        long = ir.IntegerType.get_signless(64)
        pitch = ir.MemRefType(k.type).get_strides_and_offset()[0][0]
        index = WarpgroupThread().index
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


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _start_scores(acc: Any, left: Any, right: Any) -> None:
    """Issues acc += left right^T, over the two halves of the head's dimension."""
    for half in range(2):
        plgpu.wgmma(acc, left.at[half], right.at[half].transpose((1, 0)))


class LogScales(NamedTuple):
    """The factors of a key and of a query, as logarithms: one exponential then covers both and the
    decay between them."""

    k: jax.Array
    q: jax.Array


class GdnIntraChunkCta:
    """A CTA of four warpgroups that process separate items: a chunk, and some value heads."""

    def __init__(self, cut: GdnIntraChunkConfig, refs: GdnIntraChunkRefs):
        self.cut, self.refs, interpret = cut, refs, cut.interpret
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.worker = self.block * WARPGROUPS + self.wg
        self.k_copied, self.k_smem = both_views(refs.k_union, interpret=interpret)
        self.q_copied, self.q_smem = both_views(refs.q_union, interpret=interpret)
        refs.own_smem[self.wg] = self.wg  # by each of its threads, and nowhere else
        plgpu.commit_smem()
        self.each = refs.p_ref.shape[1] // cut.share
        self.items = refs.chunks_ref[0, cut.count] * self.each
        self.steps = lax.div(self.items - self.worker + (cut.workers - 1), jnp.int32(cut.workers))

    def run(self) -> None:
        refs, block = self.refs, self.block
        first = [self._place(block * WARPGROUPS + i, 0) for i in range(WARPGROUPS)]
        starts = [refs.chunks_ref[0, chunk] for chunk, _ in first]
        first_length = refs.chunks_ref[1, self._place(self.worker, 0)[0]]

        @pl.when((block == 0) & (self.wg == 0))
        def _():
            refs.zero_ref[0] = 0

        # The warpgroups' copies are issued one after another, so that the first does not wait for
        # all of them.
        @pl.when(self.wg == 0)
        def _():
            for i, ((_, head), start) in enumerate(zip(first, starts, strict=True)):
                copies = functools.partial(self._issue, jnp.int32(i), head, start)
                pl.when(block * WARPGROUPS + i < self.items)(copies)

        lax.fori_loop(0, self.steps, self._item, first_length)
        plgpu.wait_smem_to_gmem(0)

    def _own(self) -> jax.Array:
        """The warpgroup's index, read again where it is used: addresses computed from it there need
        no register from chunk to chunk, of which none is left."""
        return self.refs.own_smem[self.wg]

    def _place(self, worker: Any, i: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the chunk and first value head of a warpgroup's item i, which may be one past the
        last.

        The last chunks come first: the chunks written last are still in L2 for the pass that reads
        them first.
        """
        item = jnp.maximum(self.items - 1 - worker - i * self.cut.workers, 0)
        each = jnp.int32(self.each)
        return lax.div(item, each), lax.rem(item, each) * self.cut.share

    def _issue(self, wg: Any, first_head: Any, start: Any) -> None:
        """Starts the copies of an item."""
        refs, rows = self.refs, pl.ds(start, CHUNK)
        barrier = refs.loaded.at[wg]
        key_head = lax.div(first_head, jnp.int32(self.cut.group))
        copy_rows(refs.k_ref.at[rows, key_head], self.k_copied.at[wg], barrier)
        gates = refs.copied_smem.at[wg]
        copy_gates(refs.g_ref, refs.beta_ref, start, first_head, gates, barrier)
        copy_rows(refs.q_ref.at[rows, key_head], self.q_copied.at[wg], barrier)

    def _item(self, i: jax.Array, length: jax.Array) -> jax.Array:
        """Processes an item of `length` tokens; returns the length of the next one."""
        cut, refs = self.cut, self.refs
        chunk, first_head = self._place(self.worker, i)
        keys, queries = self.k_smem.at[self._own()], self.q_smem.at[self._own()]
        # Long before their use: they come from global memory.
        next_chunk, next_head = self._place(self.worker, i + 1)
        next_start, next_length = refs.chunks_ref[0, next_chunk], refs.chunks_ref[1, next_chunk]
        plgpu.barrier_wait(refs.loaded.at[self.wg])
        self._clear_tail(keys, length)
        gates, copied = refs.gates_smem.at[self._own()], refs.copied_smem.at[self._own()]
        sum_gates(copied, first_head, length, gates, interpret=cut.interpret)
        plgpu.commit_smem()
        lengths = self._lengths(keys, queries, length)
        next_rows = pl.ds(next_start, CHUNK), lax.div(next_head, jnp.int32(cut.group))
        prefetch_rows(
            refs.k_ref.at[next_rows], refs.q_ref.at[next_rows], next_length,
            interpret=cut.interpret,
        )  # fmt: skip

        @pl.loop(0, cut.share)
        def _value_head(n):
            def then():
                @pl.when((n == cut.share - 1) & (i + 1 < self.steps))
                def _():
                    self._issue(self._own(), next_head, next_start)

            self._value_head(chunk, first_head + n, n, lengths, then)

        return next_length

    def _clear_tail(self, keys: Any, length: jax.Array) -> None:
        """Zeroes the keys past the end, which may be NaN, and 0 * NaN is NaN. Queries there stay as
        they are: they affect only their own outputs, which nobody stores."""

        @pl.when(length < CHUNK)
        def _():
            inside = iota((CHUNK, CHUNK), 0) < length
            for half in range(2):
                kept = plgpu.load(keys.at[half], layout=TILE)
                keys.at[half][...] = jnp.where(inside, kept, jnp.zeros((), self.cut.dtype))
            plgpu.commit_smem()

    def _lengths(self, keys: Any, queries: Any, length: jax.Array) -> LogScales:
        log_scale = math.log2(self.cut.scale)
        log_q = plgpu.layout_cast(jnp.full((CHUNK,), log_scale, jnp.float32), BY_ROW)
        log_k = jnp.zeros_like(log_q)
        if self.cut.l2norm:
            log_k, log_q = self._log_inverse(keys), log_q + self._log_inverse(queries)
            token = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=BY_ROW)
            # The tail's queries may be NaN, and their rows of A are 0.
            log_q = jnp.where(token < length, log_q, 0.0)
        return LogScales(log_k, log_q)

    def _log_inverse(self, rows: Any) -> jax.Array:
        """Returns the logarithm of each row's inverse length."""
        halves = [plgpu.load(rows.at[half], layout=TILE) for half in range(2)]
        products = own_products(halves, halves, interpret=self.cut.interpret)
        own = lax.rem(iota((CHUNK, 16), 0), jnp.int32(16)) == iota((CHUNK, 16), 1)
        return -0.5 * jnp.log2(jnp.where(own, products, 0.0).sum(axis=1) + 1e-6)

    def _value_head(
        self, chunk: jax.Array, head: jax.Array, n: jax.Array, lengths: LogScales, then: Any
    ) -> None:
        """Computes P, the vectors, M and X of a value head, the n-th of an item; `then` runs when K
        and Q have been read."""
        cut, refs, wg = self.cut, self.refs, self._own()
        gates = refs.gates_smem.at[wg, n]
        sums = gates.at[DECAYS]
        running, beta = _load(sums, BY_ROW), _load(gates.at[BETAS], BY_ROW)
        if cut.l2norm:
            sums = refs.sums_smem.at[wg]
            sums[...] = running - lengths.k
        # Waits for earlier copies out. It is also a barrier, because the sums are read again by
        # column.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        acc = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
        run = functools.partial(self._matrices, gates, sums, running, beta, lengths)
        a = pl.run_scoped(run, acc, acc)
        plgpu.commit_smem()
        wg = self._own()
        plgpu.copy_smem_to_gmem(refs.vectors_smem.at[wg], refs.vectors_ref.at[chunk, head])
        self._copy_out(wg, refs.p_ref.at[chunk, head])
        then()
        wg = self._own()
        half_smem = [ref.at[wg] for ref in (refs.low_smem, refs.high_smem)]

        def betas(first: int) -> jax.Array:
            row = refs.gates_smem.at[self._own(), n, BETAS, pl.ds(first, CHUNK // 2)]
            return over_columns(_load(row, BY_COLUMN))

        weights = None if cut.backward else betas
        x = unit_lower_inverse(a, weights, half_smem, interpret=cut.interpret)
        if refs.m_ref is not None:
            self._write(x, refs.m_ref.at[chunk, head])
            if refs.x_ref is not None:
                x = x[0] * betas(0), x[1] * betas(CHUNK // 2)
        if refs.x_ref is not None:
            self._write(x, refs.x_ref.at[chunk, head])

    def _write(self, halves: tuple[jax.Array, jax.Array], matrix_ref: Any) -> None:
        wg = self._own()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._keep(wg, *halves)
        plgpu.commit_smem()
        self._copy_out(wg, matrix_ref)

    def _matrices(
        self, gates: Any, sums: Any, running: jax.Array, beta: jax.Array, lengths: LogScales,
        qk: Any, kk: Any,
    ) -> jax.Array:  # fmt: skip
        """Returns A; leaves P and the vectors in shared memory."""
        wg = self._own()
        keys, vectors = self.k_smem.at[wg], self.refs.vectors_smem.at[wg]
        _start_scores(qk, self.q_smem.at[wg], keys)
        total = gates[DECAYS, CHUNK - 1]
        every = plgpu.layout_cast(jnp.full((CHUNK,), jnp.exp2(total)), BY_ROW)
        vectors[READ, :] = -jnp.exp2(running + lengths.k)
        vectors[OUT, :] = jnp.exp2(running + lengths.q)
        vectors[WRITE, :] = jnp.exp2(total - running + lengths.k)
        vectors[DECAY, :] = every
        if self.cut.backward:
            vectors[BETA, :], vectors[SUM, :] = beta, running
            # Plus 0 by row: a constant, as without l2norm, could not be stored.
            for row, log in ((LOG_Q, lengths.q), (LOG_K, lengths.k)):
                vectors[row, :] = log + 0.0 * running
        # exp(G_i - G_j), times the factors of query i and key j; 0 above the diagonal, where it
        # might be inf.
        columns = over_columns(_load(sums, BY_COLUMN))
        between = over_rows(running + lengths.q) - columns
        decay = jnp.exp2(fill_above(between, -1e30, interpret=self.cut.interpret))
        p = plgpu.wgmma_accumulator_load(qk)
        _start_scores(kk, keys, keys)
        p = p * decay
        self._keep(wg, *(lax.slice(p, (0, at), (CHUNK, at + 32)) for at in (0, 32)))
        # Row i of A has key i where P has query i.
        decay = decay * over_rows(-beta * jnp.exp2(lengths.k - lengths.q))
        return plgpu.wgmma_accumulator_load(kk) * decay

    def _keep(self, wg: jax.Array, *halves: jax.Array) -> None:
        for half, columns in enumerate(halves):
            self.refs.out_smem.at[wg, half][...] = columns.astype(self.cut.dtype)

    def _copy_out(self, wg: jax.Array, matrix_ref: Any) -> None:
        out = self.refs.out_smem.at[wg]
        plgpu.copy_smem_to_gmem(out.at[0], matrix_ref.at[pl.ds(0, CHUNK)])
        plgpu.copy_smem_to_gmem(out.at[1, pl.ds(32, 32)], matrix_ref.at[pl.ds(CHUNK, 32)])
