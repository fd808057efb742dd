"""The body of `kda_prefill_chunk`: two warpgroups scale keys and queries, each half of the
channels, and two make A, P and X, of every other item each, of the tiles that the former leave in a
ring of shared memory. While one of the two inverts its matrix, the other takes the next tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn_prefill.channel_factors import (
    KEYS,
    QUERIES,
    WARP_TOKENS,
    Factors,
    load_half,
    within,
)
from jaxattn.kernels.gdn_prefill.channel_scores import (
    SIZES,
    WITHIN_A_WARP,
    Scores,
    between_warps,
    own_columns,
    within_warps,
)
from jaxattn.kernels.gdn_prefill.chunk_body import own_products
from jaxattn.kernels.gdn_prefill.inverse import unit_lower_inverse
from jaxattn.kernels.gdn_prefill.tiles import (
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    TILE,
    copy_rows,
    iota,
    token_tiles,
    triangles,
)
from jaxattn.kernels.hopper.machine import shown, swizzled

SCALING = 2  # warpgroups, and halves of the channels
MULTIPLYING = 2  # warpgroups, of which each takes every other item
WARPGROUPS = SCALING + MULTIPLYING
REGISTERS = 144, 112  # of a thread that scales, and of one that multiplies
BETAS = 4  # items: a warpgroup reads those of its item until it has inverted the matrix
SLOTS = 2  # of the ring of tiles
Q_READ, K_READ, K_WRITTEN = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """What is known of a launch when it is traced.

    Attributes:
        count: columns of the plan that have chunks.
        group: value heads of a key head.
        blocks: of the launch.
        l2norm: whether q and k become unit vectors.
    """

    count: int
    group: int
    blocks: int
    scale: float
    l2norm: bool
    dtype: Any
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """What a block works on: operands and results, then shared memory and barriers."""

    q_ref: Any
    k_ref: Any
    g_ref: Any
    beta_ref: Any
    chunks_ref: Any
    q_read_ref: Any
    k_read_ref: Any
    k_written_ref: Any
    x_ref: Any
    p_ref: Any
    ends_ref: Any
    k_union: Any
    q_union: Any
    g_smem: Any
    beta_smem: Any
    k_tiles: Any
    q_tiles: Any
    outs: Any  # by Q_READ, K_READ, K_WRITTEN
    totals_smem: Any
    ends_smem: Any
    lengths_smem: Any
    # From here on one of each for every warpgroup that multiplies, whose items alone it serves: a
    # thread that waits on a barrier has to see each of its completions.
    inverted: Any  # `_inverted`
    matrix_smem: Any  # P, then X
    loaded: Any
    taken: Any  # the operands, by every thread into its registers
    measured: Any  # the lengths
    full: Any  # a slot of the ring
    empty: Any


def scratch_types(dtype: Any, *, interpret: bool) -> dict[str, Any]:
    def tiles(*leading: int) -> Any:
        return token_tiles((*leading, 2), dtype, interpret=interpret, plain=True)

    return {
        "k_union": tiles(),
        "q_union": tiles(),
        "g_smem": plgpu.SMEM((2, CHUNK, 64), jnp.float32),
        "beta_smem": plgpu.SMEM((BETAS, CHUNK), jnp.float32),
        "k_tiles": tiles(SLOTS),
        "q_tiles": tiles(SLOTS),
        "outs": tiles(3),
        "totals_smem": plgpu.SMEM((SCALING, CHUNK // WARP_TOKENS, 64), jnp.float32),
        "ends_smem": plgpu.SMEM((SCALING, 64), jnp.float32),
        "lengths_smem": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
        "inverted": _inverted(interpret=interpret),
        "matrix_smem": triangles(MULTIPLYING, dtype),
        # Keys, queries and log decays in halves, and betas.
        "loaded": plgpu.Barrier(num_arrivals=7, num_barriers=MULTIPLYING),
        "taken": plgpu.Barrier(num_arrivals=SCALING + 1, num_barriers=MULTIPLYING),
        "measured": plgpu.Barrier(num_barriers=MULTIPLYING),
        "full": plgpu.Barrier(num_arrivals=SCALING, num_barriers=MULTIPLYING * SLOTS),
        "empty": plgpu.Barrier(num_barriers=MULTIPLYING * SLOTS),
    }


def _inverted(*, interpret: bool) -> Any:
    """Products of each warp's own columns, and then two halves of the matrix that is inverted. They
    have the same bytes: a warpgroup has all products in its registers, and passed a barrier, before
    it writes a half, and has used the halves, and passed another, before its next products."""
    own = plgpu.SMEM((MULTIPLYING, 2, CHUNK, WARP_TOKENS), jnp.float32)
    shape = (MULTIPLYING, 2, CHUNK, 32)
    if interpret:
        return own, plgpu.SMEM(shape, jnp.float16)
    halves = plgpu.SMEM(shape, jnp.float16, transforms=swizzled(jnp.float16, 32))
    return plgpu.RefUnion(own, halves)


def _views(union: Any, *, interpret: bool) -> tuple[Any, Any, Any]:
    """(copied, operand, plain) of `token_tiles`."""
    return (union, union, union) if interpret else union


class Block:
    """Walks over items, a value head of a chunk each; its warpgroups work on different ones."""

    def __init__(self, cut: Cut, refs: Refs):
        self.cut, self.refs, interpret = cut, refs, cut.interpret
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.k_copied, self.k_smem, self.k_plain = _views(refs.k_union, interpret=interpret)
        self.q_copied, self.q_smem, self.q_plain = _views(refs.q_union, interpret=interpret)
        _, self.k_tile, self.k_scaled = _views(refs.k_tiles, interpret=interpret)
        _, self.q_tile, self.q_scaled = _views(refs.q_tiles, interpret=interpret)
        _, self.outs, self.outs_plain = _views(refs.outs, interpret=interpret)
        self.own, self.halves = refs.inverted
        self.heads = refs.x_ref.shape[1]
        self.items = refs.chunks_ref[0, cut.count] * self.heads
        self.steps = lax.div(self.items - self.block + (cut.blocks - 1), jnp.int32(cut.blocks))

    def run(self) -> None:
        @pl.when(self.wg < SCALING)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            lax.fori_loop(0, self.steps, self._scale, None)

            @pl.when(self.steps > 0)
            def _():
                for slot in range(SLOTS):
                    plgpu.barrier_wait(self._of(self.refs.empty, self.steps - 1, slot))

            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.wg >= SCALING)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            first = self.wg - SCALING
            pl.when((first == 0) & (self.steps > 0))(lambda: self._issue(jnp.int32(0)))
            items = lax.div(self.steps - first + (MULTIPLYING - 1), jnp.int32(MULTIPLYING))
            multiply = lambda n, _: self._multiply(first + MULTIPLYING * n)  # noqa: E731
            lax.fori_loop(0, items, multiply, None)
            plgpu.wait_smem_to_gmem(0)

    def _of(self, barriers: Any, i: Any, slot: int | None = None) -> Any:
        """The barrier for item i."""
        which = lax.rem(i, jnp.int32(MULTIPLYING))
        return barriers.at[which if slot is None else SLOTS * which + slot]

    def _place(self, i: Any) -> tuple[jax.Array, jax.Array]:
        """Chunk and value head of item i.

        The last chunks come first: what was written last is still in L2 where it is read first.
        """
        item = self.items - 1 - self.block - i * self.cut.blocks
        return lax.div(item, jnp.int32(self.heads)), lax.rem(item, jnp.int32(self.heads))

    def _issue(self, i: Any) -> None:
        """Starts the copies of an item."""
        refs, (chunk, head) = self.refs, self._place(i)
        rows = pl.ds(refs.chunks_ref[0, chunk], CHUNK)
        key_head = lax.div(head, jnp.int32(self.cut.group))
        loaded = self._of(refs.loaded, i)
        copy_rows(refs.g_ref.at[rows, head], refs.g_smem, loaded)
        copy_rows(refs.k_ref.at[rows, key_head], self.k_copied, loaded)
        copy_rows(refs.q_ref.at[rows, key_head], self.q_copied, loaded)
        beta = refs.beta_smem.at[lax.rem(i, jnp.int32(BETAS))]
        plgpu.copy_gmem_to_smem(refs.beta_ref.at[chunk, head], beta, loaded)

    def _scale(self, i: jax.Array, _: None) -> None:
        """A warpgroup's half of the channels of an item."""
        refs, half = self.refs, self.wg
        chunk, head = self._place(i)
        factors = self._factors(i, refs.chunks_ref[1, chunk])
        totals = refs.totals_smem.at[half]
        for n, size in enumerate(SIZES):
            slot = n % SLOTS
            if n < SLOTS:
                last = lambda slot=slot: plgpu.barrier_wait(self._of(refs.empty, i - 1, slot))  # noqa: E731
                pl.when(i > 0)(last)
            else:
                plgpu.barrier_wait(self._of(refs.empty, i, slot))
            if size == WARP_TOKENS:
                factors.share_totals(totals)
            k_tile, q_tile = self.k_scaled.at[slot, half], self.q_scaled.at[slot, half]
            factors.write(size, k_tile, q_tile, totals)
            if size > WITHIN_A_WARP:  # wgmma reads them
                plgpu.commit_smem()
            plgpu.barrier_arrive(self._of(refs.full, i, slot))
        plgpu.barrier_wait(self._of(refs.measured, i))
        # What was copied out before.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        q_read, k_read, k_written = (
            self.outs_plain.at[out, half] for out in (Q_READ, K_READ, K_WRITTEN)
        )
        lengths, end = self._lengths(i), refs.ends_smem.at[half]
        factors.write_ends(lengths, q_read, k_read, k_written, end)
        plgpu.commit_smem()
        channels = pl.ds(64 * half, 64)
        targets = (refs.q_read_ref, refs.k_read_ref, refs.k_written_ref)
        for out, target in zip((Q_READ, K_READ, K_WRITTEN), targets, strict=True):
            place = target.at[chunk, head, :, channels]
            plgpu.copy_smem_to_gmem(self.outs.at[out, half], place)
        plgpu.copy_smem_to_gmem(end, refs.ends_ref.at[chunk, head, half])

    def _lengths(self, i: Any) -> Any:
        """Of an item; the next but one's come when this one is done."""
        return self.refs.lengths_smem.at[lax.rem(i, jnp.int32(2))]

    def _factors(self, i: jax.Array, length: jax.Array) -> Factors:
        refs, half, interpret = self.refs, self.wg, self.cut.interpret
        plgpu.barrier_wait(self._of(refs.loaded, i))
        given = load_half(
            self.k_plain.at[half], self.q_plain.at[half], refs.g_smem.at[half],
            interpret=interpret,
        )  # fmt: skip
        shown(interpret=interpret)
        plgpu.barrier_arrive(self._of(refs.taken, i))

        # What lies past the end may be NaN, and 0 * NaN is NaN.
        def cleared() -> tuple[jax.Array, ...]:
            fills = (0.0, 0.0, 1.0)
            return tuple(
                within(length, x, fill, interpret=interpret)
                for x, fill in zip(given, fills, strict=True)
            )

        return Factors(*lax.cond(length < CHUNK, cleared, lambda: given), interpret=interpret)

    def _multiply(self, i: jax.Array) -> None:
        """P and X of an item."""
        refs, cut = self.refs, self.cut
        chunk, head = self._place(i)
        length = refs.chunks_ref[1, chunk]
        loaded, taken, measured = (
            self._of(of, i) for of in (refs.loaded, refs.taken, refs.measured)
        )
        plgpu.barrier_wait(loaded)
        own, lengths = self._measure(length), self._lengths(i)
        for row, factor in zip((KEYS, QUERIES), own[1:], strict=True):
            lengths[row, :] = factor
        shown(interpret=cut.interpret)
        plgpu.barrier_arrive(taken)
        plgpu.barrier_wait(taken)
        plgpu.barrier_arrive(measured)
        pl.when(i + 1 < self.steps)(lambda: self._issue(i + 1))
        of_keys, of_queries = self._scores(i, own[0])
        row_of_key, row_of_query = own[1:]
        beta = refs.beta_smem.at[lax.rem(i, jnp.int32(BETAS))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and a barrier: the lengths are read
        by_row = lax.broadcast_in_dim(row_of_query, (CHUNK, 16), [0])
        a_by_row = -row_of_key * _load(beta, BY_ROW)
        a_by_row = lax.broadcast_in_dim(a_by_row, (CHUNK, 16), [0])
        p, a = [], []
        for n, (query, key) in enumerate(zip(of_queries.columns(), of_keys.columns(), strict=True)):
            by_column = _across(_load(lengths.at[KEYS, pl.ds(16 * n, 16)], BY_COLUMN))
            p.append(query * by_row * by_column)
            a.append(key * a_by_row * by_column)
        self._keep([jnp.concatenate(p[at : at + 2], axis=1) for at in (0, 2)])
        plgpu.commit_smem()
        self._copy_out(refs.p_ref.at[chunk, head])

        def betas(first: int) -> jax.Array:
            return _across(_load(beta.at[pl.ds(first, CHUNK // 2)], BY_COLUMN))

        inverse = unit_lower_inverse(
            jnp.concatenate(a, axis=1), betas, [self._mine(self.halves, n) for n in range(2)],
            interpret=cut.interpret,
        )  # fmt: skip
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._keep(list(inverse))
        plgpu.commit_smem()
        self._copy_out(refs.x_ref.at[chunk, head])

    def _measure(self, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Products of queries with their own keys, on the diagonal of [64, 16]; and by row what
        multiplies a key, and a query. What lies past the end may be NaN."""
        cut = self.cut
        keys, queries = (
            [plgpu.load(rows.at[half], layout=TILE) for half in range(2)]
            for rows in (self.k_smem, self.q_smem)
        )
        own = lax.rem(iota((CHUNK, 16), 0), jnp.int32(16)) == iota((CHUNK, 16), 1)
        inside = own & (iota((CHUNK, 16), 0) < length)

        def products(rows: list[jax.Array], columns: list[jax.Array]) -> jax.Array:
            return jnp.where(inside, own_products(rows, columns, interpret=cut.interpret), 0.0)

        of_query = plgpu.layout_cast(jnp.full((CHUNK,), cut.scale, jnp.float32), BY_ROW)
        of_key = plgpu.layout_cast(jnp.ones((CHUNK,), jnp.float32), BY_ROW)
        if cut.l2norm:
            squares = [products(rows, rows).sum(axis=1) for rows in (keys, queries)]
            inverse = [lax.rsqrt(x + 1e-6) for x in squares]
            of_key, of_query = of_key * inverse[0], of_query * inverse[1]
        return products(queries, keys), of_key, of_query

    def _mine(self, refs: Any, *more: Any) -> Any:
        """Of a warpgroup that multiplies."""
        return refs.at[(self.wg - SCALING, *more)]

    def _scores(self, i: jax.Array, own: jax.Array) -> list[Scores]:
        """Of keys and of queries, by the ring's tiles."""
        refs, interpret = self.refs, self.cut.interpret
        products = self._mine(self.own)
        wide: dict[int, list[jax.Array]] = {}
        for n, size in enumerate(SIZES):
            slot = n % SLOTS
            plgpu.barrier_wait(self._of(refs.full, i, slot))
            if size <= WITHIN_A_WARP:
                tiles = self.k_scaled.at[slot], self.q_scaled.at[slot]
                within_warps(size, *tiles, products, interpret=interpret)
            else:
                wide[size] = between_warps(size, self.k_tile.at[slot], self.q_tile.at[slot])
            plgpu.barrier_arrive(self._of(refs.empty, i, slot))
        keys, queries = own_columns(products, interpret=interpret)
        row, column = (iota((CHUNK, WARP_TOKENS), dimension) for dimension in range(2))
        # Nobody wrote the diagonal and what is right of it.
        queries = jnp.where(column < lax.rem(row, jnp.int32(WARP_TOKENS)), queries, own)
        return [Scores(*x) for x in zip((keys, queries), *wide.values(), strict=True)]

    def _keep(self, columns: list[jax.Array]) -> None:
        for half, x in enumerate(columns):
            self._mine(self.refs.matrix_smem, half)[...] = x.astype(self.cut.dtype)

    def _copy_out(self, target: Any) -> None:
        out = self._mine(self.refs.matrix_smem)
        plgpu.copy_smem_to_gmem(out.at[0], target.at[pl.ds(0, CHUNK)])
        plgpu.copy_smem_to_gmem(out.at[1, pl.ds(32, 32)], target.at[pl.ds(CHUNK, 32)])


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _across(vector: jax.Array) -> jax.Array:
    """[n] by column -> [64, n]."""
    return lax.broadcast_in_dim(vector, (CHUNK, *vector.shape), [1])
