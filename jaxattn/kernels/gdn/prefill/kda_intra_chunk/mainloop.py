"""The body of `kda_prefill_chunk`. Two warpgroups scale keys and queries, half of the channels
each, and store them as tiles in a ring of shared memory. A third computes A, P and X from these
tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn.kernels.gdn.chunk.tiles import (
    BY_COLUMN,
    BY_ROW,
    CHUNK,
    TILE,
    copy_rows,
    iota,
    over_columns,
    token_tiles,
    triangles,
)
from jaxattn.kernels.gdn.prefill.intra_chunk.gate_cumsum import LOG2E
from jaxattn.kernels.gdn.prefill.intra_chunk.mainloop import own_products
from jaxattn.kernels.gdn.prefill.intra_chunk.triangular_inverse import unit_lower_inverse
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.decay_scaling import (
    KEYS,
    QUERIES,
    WARP_TOKENS,
    DecayFactors,
    load_half,
    within,
)
from jaxattn.kernels.gdn.prefill.kda_intra_chunk.scores import (
    SIZES,
    WITHIN_A_WARP,
    KdaChunkScores,
    between_warps,
    own_columns,
    within_warps,
)
from jaxattn.kernels.hopper.instructions import fence_proxy_async, swizzled

SCALING = 2  # warpgroups, and halves of the channels
WARPGROUPS = SCALING + 1
SLOTS = 2  # stages of the ring of tiles
Q_READ, K_READ, K_WRITTEN = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaIntraChunkConfig:
    """The static properties of a launch, known when it is traced.

    Attributes:
        count: Columns of the plan that have chunks.
        group: Value heads per key head.
        blocks: CTAs of the launch.
        l2norm: Whether q and k become unit vectors.
        backward: Whether the inverse is stored without beta.
    """

    count: int
    group: int
    blocks: int
    scale: float
    l2norm: bool
    backward: bool
    dtype: Any
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaIntraChunkRefs:
    """The refs of a CTA: operands and results, then shared memory and barriers."""

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
    own_smem: Any  # products of each warp's own columns
    matrix_smem: Any  # P, then X
    low_smem: Any  # two halves of a matrix that is inverted
    high_smem: Any
    loaded: Any
    operands_read: Any  # every thread has loaded the operands into registers
    measured: Any  # the lengths are there
    full: Any  # a stage of the ring is full
    empty: Any


def scratch_types(dtype: Any, *, interpret: bool) -> dict[str, Any]:
    half = plgpu.SMEM((CHUNK, 32), jnp.float16, transforms=swizzled(jnp.float16, 32))

    def tiles(*leading: int) -> Any:
        return token_tiles((*leading, 2), dtype, interpret=interpret, plain=True)

    return {
        "k_union": tiles(),
        "q_union": tiles(),
        "g_smem": plgpu.SMEM((2, CHUNK, 64), jnp.float32),
        "beta_smem": plgpu.SMEM((2, CHUNK), jnp.float32),
        "k_tiles": tiles(SLOTS),
        "q_tiles": tiles(SLOTS),
        "outs": tiles(3),
        "totals_smem": plgpu.SMEM((SCALING, CHUNK // WARP_TOKENS, 64), jnp.float32),
        "ends_smem": plgpu.SMEM((SCALING, 64), jnp.float32),
        "lengths_smem": plgpu.SMEM((2, 2, CHUNK), jnp.float32),
        "own_smem": plgpu.SMEM((2, CHUNK, WARP_TOKENS), jnp.float32),
        "matrix_smem": triangles(1, dtype),
        "low_smem": half,
        "high_smem": half,
        # Keys, queries and log decays in halves, and betas.
        "loaded": plgpu.Barrier(num_arrivals=7),
        "operands_read": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "measured": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=SCALING, num_barriers=SLOTS),
        "empty": plgpu.Barrier(num_barriers=SLOTS),
    }


def _views(union: Any, *, interpret: bool) -> tuple[Any, Any, Any]:
    """The (copied, operand, plain) views of `token_tiles`."""
    return (union, union, union) if interpret else union


class KdaIntraChunkCta:
    """A CTA whose items are a value head of a chunk each; its warpgroups work on different
    items."""

    def __init__(self, cut: KdaIntraChunkConfig, refs: KdaIntraChunkRefs):
        self.cut, self.refs, interpret = cut, refs, cut.interpret
        self.wg, self.block = lax.axis_index("wg"), lax.axis_index("block")
        self.k_copied, self.k_smem, self.k_plain = _views(refs.k_union, interpret=interpret)
        self.q_copied, self.q_smem, self.q_plain = _views(refs.q_union, interpret=interpret)
        _, self.k_tile, self.k_scaled = _views(refs.k_tiles, interpret=interpret)
        _, self.q_tile, self.q_scaled = _views(refs.q_tiles, interpret=interpret)
        _, self.outs, self.outs_plain = _views(refs.outs, interpret=interpret)
        self.heads = refs.x_ref.shape[1]
        self.items = refs.chunks_ref[0, cut.count] * self.heads
        self.steps = lax.div(self.items - self.block + (cut.blocks - 1), jnp.int32(cut.blocks))

    def run(self) -> None:
        @pl.when(self.wg < SCALING)
        def _():
            lax.fori_loop(0, self.steps, self._scale, None)
            # A thread that waits on a barrier must observe each of its completions.
            for slot in range(SLOTS):
                wait = lambda slot=slot: plgpu.barrier_wait(self.refs.empty.at[slot])  # noqa: E731
                pl.when(self.steps > 0)(wait)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(self.wg == SCALING)
        def _():
            self._clear_own()
            pl.when(self.steps > 0)(lambda: self._issue(jnp.int32(0)))
            lax.fori_loop(0, self.steps, self._multiply, None)
            plgpu.wait_smem_to_gmem(0)

    def _clear_own(self) -> None:
        """Clears the diagonal and everything right of it, which nobody writes."""
        own = self.refs.own_smem
        for which in range(2):
            zeros = plgpu.layout_cast(jnp.zeros((CHUNK, WARP_TOKENS), jnp.float32), TILE)
            own.at[which][...] = zeros
        plgpu.commit_smem()

    def _place(self, i: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the chunk and value head of item i.

        The last chunks come first: the chunks written last are still in L2 for the pass that reads
        them first.
        """
        item = self.items - 1 - self.block - i * self.cut.blocks
        return lax.div(item, jnp.int32(self.heads)), lax.rem(item, jnp.int32(self.heads))

    def _issue(self, i: Any) -> None:
        """Starts the copies of an item."""
        refs, (chunk, head) = self.refs, self._place(i)
        rows = pl.ds(refs.chunks_ref[0, chunk], CHUNK)
        key_head = lax.div(head, jnp.int32(self.cut.group))
        copy_rows(refs.g_ref.at[rows, head], refs.g_smem, refs.loaded)
        copy_rows(refs.k_ref.at[rows, key_head], self.k_copied, refs.loaded)
        copy_rows(refs.q_ref.at[rows, key_head], self.q_copied, refs.loaded)
        beta = refs.beta_smem.at[lax.rem(i, jnp.int32(2))]
        plgpu.copy_gmem_to_smem(refs.beta_ref.at[chunk, head], beta, refs.loaded)

    def _scale(self, i: jax.Array, _: None) -> None:
        """Scales a warpgroup's half of the channels of an item."""
        refs, half = self.refs, self.wg
        chunk, head = self._place(i)
        factors = self._factors(refs.chunks_ref[1, chunk])
        totals = refs.totals_smem.at[half]
        for n, size in enumerate(SIZES):
            slot = n % SLOTS
            if n < SLOTS:
                wait = lambda slot=slot: plgpu.barrier_wait(refs.empty.at[slot])  # noqa: E731
                pl.when(i > 0)(wait)
            else:
                plgpu.barrier_wait(refs.empty.at[slot])
            if size == WARP_TOKENS:
                factors.share_totals(totals)
            k_tile, q_tile = self.k_scaled.at[slot, half], self.q_scaled.at[slot, half]
            factors.write(size, k_tile, q_tile, totals)
            if size > WITHIN_A_WARP:  # wgmma reads them
                plgpu.commit_smem()
            plgpu.barrier_arrive(refs.full.at[slot])
        plgpu.barrier_wait(refs.measured)
        # Waits for earlier copies out.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        q_read, k_read, k_written = (
            self.outs_plain.at[out, half] for out in (Q_READ, K_READ, K_WRITTEN)
        )
        lengths, end = refs.lengths_smem.at[lax.rem(i, jnp.int32(2))], refs.ends_smem.at[half]
        factors.write_ends(lengths, q_read, k_read, k_written, end)
        plgpu.commit_smem()
        channels = pl.ds(64 * half, 64)
        targets = (refs.q_read_ref, refs.k_read_ref, refs.k_written_ref)
        for out, target in zip((Q_READ, K_READ, K_WRITTEN), targets, strict=True):
            place = target.at[chunk, head, :, channels]
            plgpu.copy_smem_to_gmem(self.outs.at[out, half], place)
        plgpu.copy_smem_to_gmem(end, refs.ends_ref.at[chunk, head, half])

    def _factors(self, length: jax.Array) -> DecayFactors:
        refs, half, interpret = self.refs, self.wg, self.cut.interpret
        plgpu.barrier_wait(refs.loaded)
        k, q, g = load_half(
            self.k_plain.at[half], self.q_plain.at[half], refs.g_smem.at[half],
            interpret=interpret,
        )  # fmt: skip
        fence_proxy_async(interpret=interpret)
        plgpu.barrier_arrive(refs.operands_read)
        given = (k, q, jnp.exp2(g * LOG2E))

        # Numbers past the end may be NaN, and 0 * NaN is NaN.
        def cleared() -> tuple[jax.Array, ...]:
            fills = (0.0, 0.0, 1.0)
            return tuple(
                within(length, x, fill, interpret=interpret)
                for x, fill in zip(given, fills, strict=True)
            )

        return DecayFactors(*lax.cond(length < CHUNK, cleared, lambda: given), interpret=interpret)

    def _multiply(self, i: jax.Array, _: None) -> None:
        """Computes P and X of an item."""
        refs, cut = self.refs, self.cut
        chunk, head = self._place(i)
        length = refs.chunks_ref[1, chunk]
        parity = lax.rem(i, jnp.int32(2))
        plgpu.barrier_wait(refs.loaded)
        own, lengths = self._measure(length), refs.lengths_smem.at[parity]
        for row, factor in zip((KEYS, QUERIES), own[1:], strict=True):
            lengths[row, :] = factor
        fence_proxy_async(interpret=cut.interpret)
        plgpu.barrier_arrive(refs.operands_read)
        plgpu.barrier_wait(refs.operands_read)
        plgpu.barrier_arrive(refs.measured)
        pl.when(i + 1 < self.steps)(lambda: self._issue(i + 1))
        of_keys, of_queries = self._scores(own[0])
        row_of_key, row_of_query = own[1:]
        beta = refs.beta_smem.at[parity]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # also a barrier: the lengths are read
        by_row = lax.broadcast_in_dim(row_of_query, (CHUNK, 16), [0])
        a_by_row = -row_of_key * _load(beta, BY_ROW)
        a_by_row = lax.broadcast_in_dim(a_by_row, (CHUNK, 16), [0])
        p, a = [], []
        for n, (query, key) in enumerate(zip(of_queries.columns(), of_keys.columns(), strict=True)):
            by_column = over_columns(_load(lengths.at[KEYS, pl.ds(16 * n, 16)], BY_COLUMN))
            p.append(query * by_row * by_column)
            a.append(key * a_by_row * by_column)
        self._keep([jnp.concatenate(p[at : at + 2], axis=1) for at in (0, 2)])
        plgpu.commit_smem()
        self._copy_out(refs.p_ref.at[chunk, head])

        def betas(first: int) -> jax.Array:
            return over_columns(_load(beta.at[pl.ds(first, CHUNK // 2)], BY_COLUMN))

        inverse = unit_lower_inverse(
            jnp.concatenate(a, axis=1), None if cut.backward else betas,
            [refs.low_smem, refs.high_smem], interpret=cut.interpret,
        )  # fmt: skip
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._keep(list(inverse))
        plgpu.commit_smem()
        self._copy_out(refs.x_ref.at[chunk, head])

    def _measure(self, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the products of queries with their own keys, on the diagonal of [64, 16]; and by
        row the factors of a key, and of a query. Numbers past the end may be NaN."""
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

    def _scores(self, own: jax.Array) -> list[KdaChunkScores]:
        """Returns the scores of keys and of queries, from the ring's tiles."""
        refs, interpret = self.refs, self.cut.interpret
        wide: dict[int, list[jax.Array]] = {}
        for n, size in enumerate(SIZES):
            slot = n % SLOTS
            plgpu.barrier_wait(refs.full.at[slot])
            if size <= WITHIN_A_WARP:
                tiles = self.k_scaled.at[slot], self.q_scaled.at[slot]
                within_warps(size, *tiles, refs.own_smem, interpret=interpret)
            else:
                wide[size] = between_warps(size, self.k_tile.at[slot], self.q_tile.at[slot])
            plgpu.barrier_arrive(refs.empty.at[slot])
        keys, queries = own_columns(refs.own_smem, interpret=interpret)
        # The diagonal of `queries` is 0.
        return [KdaChunkScores(*x) for x in zip((keys, queries + own), *wide.values(), strict=True)]

    def _keep(self, columns: list[jax.Array]) -> None:
        for half, x in enumerate(columns):
            self.refs.matrix_smem.at[0, half][...] = x.astype(self.cut.dtype)

    def _copy_out(self, target: Any) -> None:
        out = self.refs.matrix_smem.at[0]
        plgpu.copy_smem_to_gmem(out.at[0], target.at[pl.ds(0, CHUNK)])
        plgpu.copy_smem_to_gmem(out.at[1, pl.ds(32, 32)], target.at[pl.ds(CHUNK, 32)])


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
